"""Faults from the field that concern pause, sleep, control calls and gauges (C60 to C63, C76)."""

from __future__ import annotations

import pytest

from leftfold.fsm import FinishReason, Gate, Phase
from tests.cases import AT_EACH_DEPTH, answers, completion, fill, one_by_one, small

pytestmark = AT_EACH_DEPTH


def test_c60_a_request_that_comes_during_sleep_waits_with_its_deadline(depth: int) -> None:
    world = small(depth)
    world.admit("old", [1, 2, 3], 9)
    fill(world)
    pause = world.control("Pause", mode="abort")
    sleep = world.control("Sleep")
    assert completion(world, "old")[0] is FinishReason.ABORT and answers(world, pause, sleep) == [None, None]
    world.land()
    one_by_one(world, 1)
    assert answers(world, pause, sleep) == [True, True] and world.state.asleep == ["weights", "kv"]
    world.admit("late", [1, 2, 3], 2, deadline=100)
    world.admit("patient", [1, 2, 3], 2)
    refused = world.control("Resume")
    world.steps(3)
    assert answers(world, refused) == [False] and world.state.wake_at is not None
    world.wait(100)
    world.tick()
    assert completion(world, "late") == (FinishReason.DEADLINE, 0)
    early = world.control("Wake", tags=["kv"])
    wake = world.control("Wake", tags=["weights"])
    kv = world.control("Wake", tags=["kv"])
    resume = world.control("Resume")
    assert answers(world, early, wake, kv, resume) == [False, None, None, False]
    one_by_one(world, 2)
    assert answers(world, wake, kv) == [True, True]
    resume = world.control("Resume")
    assert answers(world, resume) == [True]
    world.finish()
    assert completion(world, "patient") == (FinishReason.LENGTH, 2)


def test_c61_a_drain_is_computed_from_phases_and_superseded_by_a_resume(depth: int) -> None:
    world = small(depth, num_pages=5)
    early = world.control("Resume")
    assert answers(world, early) == [True] and world.state.gate is Gate.RUNNING
    world.admit("a", [1] * 7, 9)
    world.admit("c", [2] * 7, 9)
    while not world.state.stats()["preemptions"]:
        world.steps()
    pause = world.control("Pause", mode="wait")
    world.admit("b", [3] * 3, 2)
    world.steps(3)
    assert answers(world, pause) == [None] and world.state.gate is Gate.DRAINING
    assert world.state.requests["b"].phase is Phase.WAITING
    resume = world.control("Resume")
    assert answers(world, pause, resume) == [False, True]
    world.finish()
    assert [completion(world, rid)[1] for rid in "acb"] == [9, 9, 2]


@pytest.mark.parametrize("mode", ["wait", "keep", "abort"])
def test_c61_a_drain_that_is_left_alone_ends_when_all_older_requests_have_stopped(depth: int, mode: str) -> None:
    world = small(depth, num_pages=5)
    world.admit("a", [1] * 7, 9)
    world.admit("c", [2] * 7, 9)
    while not world.state.stats()["preemptions"]:
        world.steps()
    fill(world)
    pause = world.control("Pause", mode=mode)
    world.admit("b", [3] * 3, 2)
    while answers(world, pause) == [None]:
        assert world.state.gate is Gate.DRAINING
        world.steps()
        world.done()
    assert world.state.gate is Gate.PAUSED and not world.flights
    assert len(world.clients) == (3 if mode == "keep" else 1)
    resume = world.control("Resume")
    assert answers(world, resume) == [True]
    world.finish()
    ended = [completion(world, rid)[0] for rid in "acb"]
    assert ended == ([FinishReason.ABORT] * 2 if mode == "abort" else [FinishReason.LENGTH] * 2) + [FinishReason.LENGTH]


def test_c62_two_calls_that_are_pending_are_answered_in_order_when_their_effects_have_happened(depth: int) -> None:
    world = small(depth)
    world.admit("a", [1, 2, 3], 9)
    one_by_one(world, 2)
    fill(world)
    first = world.control("Sleep", tags=["kv"])
    second = world.control("Reconfigure", set={"max_running": 2})
    third = world.control("Wake", tags=["kv"])
    while world.flights:  # barriers: steps first
        assert answers(world, first, second, third) == [None, None, None] and not world.state.asleep
        world.done()
    world.tick()
    assert answers(world, first, second, third) == [None, None, None]
    world.done()
    assert answers(world, first, second, third) == [True, True, None]
    assert world.state.asleep == ["kv"] and world.state.config.max_running == 2
    one_by_one(world, 1)
    assert answers(world, third) == [True] and not world.state.asleep
    assert list(world.desk.answered) == [first, second, third]
    world.finish()
    assert completion(world, "a") == (FinishReason.LENGTH, 9)


@pytest.mark.parametrize("kind", ["UpdateWeights", "FlushCache"])
@pytest.mark.parametrize("live", ["recompute", "keep"])
def test_c63_calls_that_end_a_generation_while_requests_live(depth: int, kind: str, live: str) -> None:
    world = small(depth)
    world.admit("a", range(1, 9), 9)
    world.admit("b", range(1, 13), 2)
    world.admit("c", range(1, 9), 5)
    fill(world)
    fields = {"source": "w", "version": "2", "live": live} if kind == "UpdateWeights" else {}
    call = world.control(kind, **fields)
    world.steps(6)
    assert answers(world, call) == [True] and world.state.generation == 1
    world.finish()
    assert [completion(world, rid)[1] for rid in "abc"] == [9, 2, 5]
    assert {world.ended[rid, 0, 0].version for rid in "ac"} == {"2" if fields else ""}


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("choices", [1, 2])
def test_c76_gauges_are_functions_of_the_state(depth: int, in_flight: bool, choices: int) -> None:
    world = small(depth)
    world.admit("a", [1, 2, 3], 5, n=choices)
    world.admit("b", [4, 5], 5)
    one_by_one(world, 2)
    if in_flight:
        fill(world)
    world.abort("a")
    world.abort("b")
    stats = world.state.stats()
    assert (stats["running"], stats["waiting"], stats["live"], stats["queued_tokens"]) == (0, 0, 0, 0)
    assert (stats["pages_held"] > 0) == (stats["stopping"] > 0) == in_flight
    world.land()
    stats = world.state.stats()
    assert stats["pages_held"] == stats["in_flight"] == stats["stopping"] == 0
    world.finish()
