"""The loop: run after run from one seed until the budget is spent or something is found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from leftfold.replay.fuzzing.errors import kind_of
from leftfold.replay.fuzzing.rules import Rules, draw_config
from leftfold.replay.fuzzing.world import Command, World

REFOLD_EVERY = 64
"""Every so many runs the log is folded again and decided anew."""
RIGOUR = 64
"""In the loop, looks that cost as much as a step are taken at one step or event in so many."""


@dataclass(frozen=True, slots=True)
class Run:
    """What one run did, enough to do it again. `fault`: what it ended with, None if nothing is wrong."""

    config: Mapping[str, Any]
    commands: Sequence[Command]
    steps: int = 0
    events: int = 0
    fault: BaseException | None = None

    @property
    def kind(self) -> str | None:
        return None if self.fault is None else kind_of(self.fault)


@dataclass(slots=True)
class Tally:
    """What the loop did. `found`: the run in which something is wrong."""

    seed: int
    runs: int = 0
    steps: int = 0
    found: Run | None = None


def random_run(rng: Random, refold: bool) -> Run:
    """One run from the next numbers of `rng`."""
    config = draw_config(rng)
    world = World(rigour=RIGOUR, **config)
    rules = Rules(rng, config)
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
    return Run(config, commands, world.steps_done, len(world.log), fault)


def execute(config: Mapping[str, Any], commands: Sequence[Command]) -> Run:
    """Carry out commands from the start, looking closely at every step."""
    world: World | None = None
    fault: BaseException | None = None
    try:
        world = World(**config)
        for command in commands:
            world.perform(command)
    except Exception as error:
        fault = error
    steps, events = (0, 0) if world is None else (world.steps_done, len(world.log))
    return Run(config, commands, steps, events, fault)


def fuzz(seed: int, go_on: Callable[[Tally], bool]) -> Tally:
    """Runs until `go_on(tally)` says no, or a run finds something. Equal seeds make equal sequences of runs."""
    rng = Random(seed)
    tally = Tally(seed)
    while tally.found is None and go_on(tally):
        run = random_run(rng, refold=tally.runs % REFOLD_EVERY == 0)
        tally.runs += 1
        tally.steps += run.steps
        tally.found = run if run.fault is not None else None
    return tally
