"""Random runs of the fuzzer with somebody looking on at every event."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from leftfold.events import Event, Plan
from leftfold.fsm import Effects
from leftfold.replay.fuzzing import World, loop, profiles

Look = Callable[[World, Event, Plan | None, Callable[[], Effects]], Effects]
"""Gets the world, the event with its plan, and the call that takes it."""


def watch(monkeypatch: pytest.MonkeyPatch, look: Look) -> None:
    """From now on `look` is around every event of `loop.random_run`."""

    class Watched(World):
        def take(self, event: Event, plan: Plan | None = None) -> Effects:
            return look(self, event, plan, lambda: super(Watched, self).take(event, plan))

    monkeypatch.setattr(profiles, "World", Watched)


def runs(seed: int, count: int) -> list[Any]:
    """So many random runs; raises what one of them finds."""
    rng = Random(seed)
    done = []
    for _ in range(count):
        run = loop.random_run(rng, refold=False)
        if run.fault is not None:
            raise run.fault
        done.append(run)
    return done
