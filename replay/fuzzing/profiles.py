"""What a fuzz run is like: which configurations, habits and faults it draws, and how closely it is looked at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from leftfold.replay.fuzzing.drawing import (
    Habits,
    draw_config,
    draw_faulty,
    draw_swarm,
    faulty_habits,
    lite_habits,
    swarm_habits,
)
from leftfold.replay.fuzzing.durable import DurableWorld
from leftfold.replay.fuzzing.rules import Rules
from leftfold.replay.fuzzing.world import World


@dataclass(frozen=True, slots=True)
class Profile:
    """`rigour`: looks that cost as much as a step are taken at one step or event in so many; `checks`: the state is
    checked after one event in so many; `refold`: the log is folded again in one run of so many."""

    name: str
    says: str
    draw: Callable[[Random], dict[str, Any]] = draw_config
    habits: Callable[[Random], Habits] = lite_habits
    rigour: int = 64
    checks: int = 1
    refold: int = 64

    def rules(self, rng: Random, config: dict[str, Any]) -> Rules:
        """What the run with this configuration does."""
        return Rules(rng, config, self.habits, self.draw)


LITE = Profile("lite", "small engines, few requests, usual rates; the state is checked after every event")
PERF = Profile("perf", "lite with the checks sampled", rigour=512, checks=16, refold=256)
SWARM = Profile("swarm", "configuration and rates drawn anew for every run", draw=draw_swarm, habits=swarm_habits)
FAULTS = Profile(
    "faults", "swarm on a log that is on a simulated disk, with crashes, restarts and faults of the disk",
    draw=draw_faulty, habits=faulty_habits,
)  # fmt: skip
PROFILES: Mapping[str, Profile] = {profile.name: profile for profile in (LITE, SWARM, FAULTS, PERF)}


def world_of(config: Mapping[str, Any], rigour: int = 1, checks: int = 1) -> World:
    """The world that a configuration is for: one on a disk, if it says when to sync."""
    return (DurableWorld if "sync_every" in config else World)(rigour=rigour, checks=checks, **config)
