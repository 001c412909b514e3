"""Logs of random runs: folded as recorded without any planner, and with empty `Tick`s anywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import pytest

from leftfold.events import Event, Plan, Tick
from leftfold.fsm import Config, Effects, State, decide, planner, reducer, step
from leftfold.replay.fuzzing import World
from tests.watching import runs, watch


@pytest.fixture
def logs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Config, list[Event], str]]:
    """Some runs: first configuration, log, last digest."""
    worlds: dict[World, None] = {}

    def look(world: World, event: Event, plan: Plan | None, take: Callable[[], Effects]) -> Effects:
        worlds[world] = None
        return take()

    with monkeypatch.context() as patched:
        watch(patched, look)
        runs(8, 30)
    return [(world.first_config, world.log, world.state.digest()) for world in worlds]


def test_recorded_plans_fold_with_no_planner_at_all(
    logs: list[tuple[Config, list[Event], str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*arguments: Any) -> NoReturn:
        raise AssertionError("somebody decides")

    monkeypatch.setattr(planner, "decide", gone)
    monkeypatch.setattr(reducer, "decide", gone)
    for config, log, digest in logs:
        state = State(config)
        for event in log:
            step(state, event)
        assert state.digest() == digest


def test_plans_made_by_step_are_those_that_were_recorded(logs: list[tuple[Config, list[Event], str]]) -> None:
    for config, log, digest in logs:
        state = State(config)
        for event in log:
            step(state, Tick(t=event.t) if isinstance(event, Tick) else event)
        assert state.digest() == digest


def test_empty_ticks_may_come_anywhere(logs: list[tuple[Config, list[Event], str]]) -> None:
    inserted = 0
    for config, log, digest in logs:
        state = State(config)
        for event in log:
            step(state, Tick(t=event.t, plan=Plan()))
            if decide(state, event.t) is None:
                step(state, Tick(t=event.t))
                inserted += 1
            step(state, event)
        assert state.digest() == digest
    assert inserted > 500


def test_the_runs_hold_what_there_is_to_fold(logs: list[tuple[Config, list[Event], str]]) -> None:
    kinds = {type(event).__name__ for _, log, _ in logs for event in log}
    assert {"Admit", "Abort", "Tick", "ForwardDone", "Started", "ExecutorLost"} <= kinds
