"""Faults that users of serving engines have met, each as a small run; the world checks every event and every token."""

from __future__ import annotations

import pytest

from leftfold.fsm import FinishReason, Phase
from leftfold.fsm.prefix import namespace
from leftfold.replay.fuzzing import World


def small(**limits: object) -> World:
    """Pages of 4, a pool of 8."""
    fields = {"num_pages": 8, "page_size": 4, "max_running": 4, "max_batch_tokens": 64, "max_model_len": 64}
    return World(**{**fields, **limits})  # type: ignore[arg-type]


def completion(world: World, rid: str, epoch: int = 0) -> tuple[FinishReason | None, int]:
    """Why a request ended, and how many tokens it got."""
    output = world.ended[rid, epoch]
    assert output.usage is not None
    return output.finish_reason, output.usage.completion_tokens


@pytest.mark.parametrize("length", range(1, 13))
def test_c02_pages_of_a_preempted_request_come_back(length: int) -> None:
    world = small()
    world.admit("b", [9] * 12, 20)
    world.admit("a", [5, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2][:length], 20)
    world.finish()
    assert world.state.stats()["preemptions"] >= 1
    assert len(world.state.pool.free) + len(world.state.pool.cached) == 8


def test_c07_demand_counts_pages_and_preemption_comes_before_allocation() -> None:
    world = small()
    for rid, first in (("a", 1), ("b", 2), ("c", 3)):
        world.admit(rid, [first] * 7, 8)
    world.steps(2)
    assert [seat.pages for seat in world.state.decoding.seats] == [[0, 1], [2, 3], [4, 5]]
    world.tick()  # three rows at the end of their second page, two free pages
    assert world.flight is not None
    assert len(world.flight.plan.preempt) == 1
    assert [len(grow.slots) for grow in world.flight.plan.grow] == [2]
    world.finish()
    assert {completion(world, rid) for rid in "abc"} == {(FinishReason.LENGTH, 8)}


def test_c10_what_can_never_fit_ends_at_once_and_holds_up_nobody() -> None:
    world = small()
    world.admit("a", [1] * 40, 1)
    error = world.ended["a", 0].error
    assert error is not None and error["code"] == "invalid" and "40" in error["text"] and "32" in error["text"]
    world.admit("b", [1] * 4, 1)
    world.finish()
    assert completion(world, "b") == (FinishReason.LENGTH, 1)


@pytest.mark.parametrize("max_model_len", [20, 33, 64])
@pytest.mark.parametrize("neighbours", [0, 2])
def test_c11_how_many_tokens_a_request_gets_depends_on_nobody_else(max_model_len: int, neighbours: int) -> None:
    for total in range(max_model_len - 2, max_model_len + 3) if max_model_len < 33 else range(30, 36):
        for prompt in (1, 17, total - 1, total):
            world = small(max_model_len=max_model_len)
            for number in range(neighbours):
                world.admit(f"n{number}", [number] * 6, 12)
            max_tokens = max(1, total - prompt)
            world.admit("a", [7] * prompt, max_tokens)
            world.finish(replay=False)
            room = min(max_model_len, 33) - prompt
            if prompt >= max_model_len or prompt > 32:
                assert world.ended["a", 0].finish_reason is FinishReason.ERROR
            else:
                assert completion(world, "a") == (FinishReason.LENGTH, min(max_tokens, room))


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_c13_preemptions_between_two_tokens_are_bounded(policy: str) -> None:
    world = small(max_chunk_tokens=4, prefix_cache=False, policy=policy)
    world.admit("a", [1] * 13, 19, priority=1)
    world.steps(5)
    world.admit("b", [2] * 24, 2)
    most = 0
    while world.clients:
        world.steps()
        request = world.state.requests["b"]
        most = max(most, request.preemptions)
    assert most <= 1
    world.finish()


def test_c16_the_last_token_needs_no_page() -> None:
    world = small()
    world.admit("a", [1] * 28, 16)
    world.finish()
    assert completion(world, "a") == (FinishReason.LENGTH, 5)
    world.admit("b", [2] * 4, 3)
    world.finish()
    assert completion(world, "b") == (FinishReason.LENGTH, 3)


def test_c20_no_token_of_a_request_aborted_while_its_last_chunk_is_in_flight() -> None:
    world = small(max_chunk_tokens=8)
    world.admit("b", [5, 6], 9)
    world.admit("a", [1] * 12, 4)
    world.steps(1)
    world.tick()
    assert world.flight is not None and [row.rid for row in world.flight.rows if row.samples] == ["b", "a"]
    world.abort("a")
    assert world.state.requests["a"].phase is Phase.STOPPING
    world.done()
    assert world.state.requests["a"].phase is Phase.FINISHED
    assert completion(world, "a") == (FinishReason.ABORT, 0)
    while world.clients:
        world.tick()
        assert world.flight is not None and [row.rid for row in world.flight.rows] == ["b"]
        world.done()
    world.finish()


def test_c21_a_queued_request_is_aborted_and_its_rid_admitted_again() -> None:
    world = small(max_running=1)
    world.admit("a", [1, 2, 3], 5)
    world.steps(2)
    world.admit("b", [4, 5], 2)
    world.abort("b")
    assert completion(world, "b") == (FinishReason.ABORT, 0)
    world.admit("b", [4, 5, 6], 3)
    world.finish()
    assert completion(world, "b") == (FinishReason.LENGTH, 3)


@pytest.mark.parametrize("running", [False, True])
def test_c23_a_late_abort_does_not_touch_the_next_request_of_that_rid(running: bool) -> None:
    world = small()
    world.admit("x", [1, 2], 4, epoch=0)
    world.steps(1)
    world.abort("x", epoch=0)
    world.admit("x", [1, 2], 4, epoch=1)
    if running:
        world.steps(1)
    world.abort("x", epoch=0)
    assert ("x", 1) in world.clients
    world.finish()
    assert completion(world, "x", 1) == (FinishReason.LENGTH, 4)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("length", [4, 8, 12])
def test_c40_a_full_hit_still_computes_a_token(page_size: int, length: int) -> None:
    world = small(page_size=page_size, num_pages=32 // page_size)
    for _ in range(2):
        world.admit("a", list(range(1, length + 1)), 1)
        world.finish(replay=False)
    usage = world.ended["a", 0].usage
    assert usage is not None and usage.cached_tokens == (length - 1) // page_size * page_size


def test_c41_another_salt_does_not_hit() -> None:
    world = small()
    for salt, cached in (("", 0), ("x", 0), ("", 4), ("x", 4)):
        world.admit("a", list(range(1, 9)), 1, salt=salt)
        world.finish()
        usage = world.ended["a", 0].usage
        assert usage is not None and usage.cached_tokens == cached


def test_c41_every_part_of_the_namespace_is_told_apart() -> None:
    parts = [
        namespace(generation=0), namespace(generation=1), namespace(generation=0, adapter="x"),
        namespace(generation=0, salt="x"), namespace(generation=0, adapter="x", adapter_generation=1),
        namespace(generation=0, adapter="x", salt="x"), namespace(generation=0, media=["x"]),
        namespace(generation=0, adapter="", adapter_generation=1), namespace(generation=0, salt='x"],["media'),
    ]  # fmt: skip
    assert len(set(parts)) == len(parts)


@pytest.mark.parametrize("in_flight", [False, True])
def test_c76_gauges_are_functions_of_the_state(in_flight: bool) -> None:
    world = small()
    world.admit("a", [1, 2, 3], 5)
    world.admit("b", [4, 5], 5)
    world.steps(2)
    if in_flight:
        world.tick()
    world.abort("a")
    world.abort("b")
    stats = world.state.stats()
    assert (stats["running"], stats["waiting"], stats["live"], stats["queued_tokens"]) == (0, 0, 0, 0)
    assert stats["pages_held"] == (3 if in_flight else 0)
    world.done()
    assert world.state.stats()["pages_held"] == world.state.stats()["in_flight"] == 0
