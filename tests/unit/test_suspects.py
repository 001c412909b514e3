"""Requests that may be what made steps fail run alone until they are past it, and nobody else is held up for good."""

from __future__ import annotations

import pytest

from leftfold.fsm import FinishReason, decide
from leftfold.replay.fuzzing import World

POLICIES = ("fcfs", "priority", "lpm", "fair", "spf")


def world(**limits: object) -> World:
    fields = {"num_pages": 16, "page_size": 4, "max_running": 4, "max_batch_tokens": 16, "max_model_len": 40}
    return World(**{**fields, **limits})  # type: ignore[arg-type]


def rows(w: World) -> list[str]:
    """Whose rows the next step computes."""
    w.tick()
    assert w.flight is not None
    return [row.rid for row in w.flight.rows]


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_suspects_run_one_by_one_and_then_all_together(depth: int, policy: str) -> None:
    w = world(pipeline_depth=depth, policy=policy)
    for rid in "abc":
        w.admit(rid, [1, 2, ord(rid)], 9)
    w.steps(2 * (depth + 1))
    w.land()
    w.tick()
    w.fail(apart=True)
    assert len(w.state.suspects) == 3
    seen = []
    while w.state.suspects:
        seen += rows(w)
        w.land()
    assert sorted(seen) == ["a", "b", "c"]
    assert sorted(rows(w)) == ["a", "b", "c"]
    w.finish()
    assert {w.ended[rid, 0, 0].finish_reason for rid in "abc"} == {FinishReason.LENGTH}


def test_a_suspect_that_fails_alone_three_times_ends_and_the_others_go_on() -> None:
    w = world()
    for rid in "abc":
        w.admit(rid, [1, 2, ord(rid)], 9)
    w.tick()
    w.fail(apart=True)
    for _ in range(3):
        assert rows(w) == ["a"]
        w.fail()
    assert w.ended["a", 0, 0].finish_reason is FinishReason.ERROR
    w.finish()
    assert {w.ended[rid, 0, 0].finish_reason for rid in "bc"} == {FinishReason.LENGTH}


def test_suspicion_outlives_the_executor_until_the_place_is_passed() -> None:
    w = world(max_batch_tokens=8)
    w.admit("a", list(range(12)), 5)
    w.admit("b", [7, 8], 9)
    w.steps(1)
    assert rows(w) == ["a", "b"]  # the rest of the prompt, and the other's
    w.fail(apart=True)
    w.lose()
    w.start()
    assert rows(w) == ["a"]
    w.land()
    assert ("a", 0, 0) in w.state.suspects, "its first chunk is no proof"
    assert rows(w) == ["a"]
    w.land()
    assert list(w.state.suspects) == [("b", 0, 0)]
    assert rows(w) == ["b"]
    w.land()
    assert not w.state.suspects
    w.finish()


def test_an_abort_or_a_deadline_ends_the_suspicion() -> None:
    w = world()
    w.admit("a", [1, 2], 9)
    w.admit("b", [3, 4], 9)
    w.tick()
    w.fail(apart=True)
    w.abort("a")
    assert list(w.state.suspects) == [("b", 0, 0)]
    w.finish()


def test_the_copy_of_a_state_has_its_own_suspects_and_they_are_in_the_digest() -> None:
    w = world()
    w.admit("a", [1, 2], 9)
    w.admit("b", [3, 4], 9)
    w.tick()
    w.fail(apart=True)
    twin, digest = w.state.copy(), w.state.digest()
    assert twin.digest() == digest
    del twin.suspects["a", 0, 0]
    assert w.state.digest() == digest != twin.digest()
    w.finish()


def test_a_suspect_that_lacks_pages_which_others_hold_waits_for_them_and_nobody_joins_before_it() -> None:
    w = world(num_pages=6, max_running=3)
    w.admit("a", [1] * 8, 9)
    w.admit("b", [2] * 4, 12)
    w.steps(1)
    w.admit("late", [3], 3)
    w.tick()
    w.fail(apart=True)
    for _ in range(60):
        w.steps(1)
        if not w.state.suspects:
            break
    assert not w.state.suspects
    w.finish()
    assert {w.ended[rid, 0, 0].finish_reason for rid in ("a", "b", "late")} == {FinishReason.LENGTH}


def test_whoever_waits_is_told_why() -> None:
    w = world()
    w.admit("a", [1, 2], 9)
    w.admit("b", [3, 4], 9)
    w.tick()
    w.fail(apart=True)
    w.admit("late", [5], 3)
    reasons: list = []
    decide(w.state, w.t, reasons)
    assert [(reason.rid, reason.kind) for reason in reasons] == [("late", "apart")]
    w.finish()
