"""The loop: run after run from one seed until the budget is spent or something is found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from leftfold.events import Event
from leftfold.replay.fuzzing.errors import kind_of
from leftfold.replay.fuzzing.profiles import LITE, Profile, world_of
from leftfold.replay.fuzzing.world import Command, World


@dataclass(frozen=True, slots=True)
class Run:
    """What one run did, enough to do it again. `fault`: what it ended with, None if nothing is wrong; `log`: what the
    reducer took, the last of which may be what it could not take."""

    config: Mapping[str, Any]
    commands: Sequence[Command]
    steps: int = 0
    events: int = 0
    fault: BaseException | None = None
    log: Sequence[Event] = ()

    @property
    def kind(self) -> str | None:
        return None if self.fault is None else kind_of(self.fault)


@dataclass(slots=True)
class Tally:
    """What the loop did. `found`: the run in which something is wrong, which is the one with this `number`."""

    seed: int
    runs: int = 0
    steps: int = 0
    found: Run | None = None
    number: int = 0


def run_seed(seed: int, number: int) -> Random:
    """What all chance of run `number` comes from, so that it can be made without those before it."""
    return Random(f"{seed}/{number}")


def random_run(rng: Random, refold: bool, profile: Profile = LITE) -> Run:
    """One run from the next numbers of `rng`: safety, then liveness (see `World.finish`)."""
    config = profile.draw(rng)
    world = world_of(config, rigour=profile.rigour, checks=profile.checks)
    rules = profile.rules(rng, config)
    commands: list[Command] = []
    fault: BaseException | None = None
    try:
        for _ in range(10 + int(rng.random() * 60)):
            commands.append(rules.next(world))
            world.perform(commands[-1])
        commands.append(("finish", {} if refold else {"replay": False}))
        world.perform(commands[-1])
    except Exception as error:  # whatever the reducer raises is a finding
        fault = error
    return Run(config, commands, world.steps_done, len(world.log), fault, world.log)


def execute(config: Mapping[str, Any], commands: Sequence[Command]) -> Run:
    """Carry out commands from the start, looking closely at every step."""
    world: World | None = None
    fault: BaseException | None = None
    try:
        world = world_of(config)
        for command in commands:
            world.perform(command)
    except Exception as error:
        fault = error
    if world is None:
        return Run(config, commands, fault=fault)
    return Run(config, commands, world.steps_done, len(world.log), fault, world.log)


def made_again(seed: int, number: int, profile: Profile = LITE) -> Run:
    """Run `number` of a seed, as the loop makes it, without those before it."""
    return random_run(run_seed(seed, number), number % profile.refold == 0, profile)


def fuzz(
    seed: int, go_on: Callable[[Tally], bool], profile: Profile = LITE, skip: int = 0, stride: int = 1
) -> Tally:
    """Runs until `go_on(tally)` says no, or a run finds something: each `stride`-th, the first `skip` left out.

    Equal seeds make equal sequences of runs, byte for byte.
    """
    tally = Tally(seed)
    while tally.found is None and go_on(tally):
        number = skip + tally.runs * stride
        run = made_again(seed, number, profile)
        tally.runs += 1
        tally.steps += run.steps
        if run.fault is not None:
            tally.found, tally.number = run, number
    return tally
