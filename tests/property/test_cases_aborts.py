"""Faults from the field that concern aborts and ids (C20 to C26)."""

from __future__ import annotations

import pytest

from leftfold.fsm import FinishReason, Phase
from tests.cases import AT_EACH_DEPTH, completion, fill, one_by_one, rids, small

pytestmark = AT_EACH_DEPTH


def test_c20_no_token_of_a_request_aborted_while_its_last_chunk_is_in_flight(depth: int) -> None:
    world = small(depth, max_chunk_tokens=8)
    world.admit("b", [5, 6], 9)
    world.admit("a", [1] * 12, 4)
    one_by_one(world, 1)
    world.tick()
    assert world.flight is not None and [row.rid for row in world.flight.rows if row.samples] == ["b", "a"]
    world.abort("a")
    assert world.state.requests["a"].phase is Phase.STOPPING
    while world.clients:
        if fill(world) > 1:
            assert rids(world) == ["b"]
        world.done()
        assert world.state.requests["a"].phase is Phase.FINISHED
    assert completion(world, "a") == (FinishReason.ABORT, 0)
    world.finish()


def test_c21_a_queued_request_is_aborted_and_its_rid_admitted_again(depth: int) -> None:
    world = small(depth, max_running=1)
    world.admit("a", [1, 2, 3], 5)
    fill(world)
    world.admit("b", [4, 5], 2)
    world.abort("b")
    assert completion(world, "b") == (FinishReason.ABORT, 0)
    world.admit("b", [4, 5, 6], 3)
    world.finish()
    assert completion(world, "b") == (FinishReason.LENGTH, 3)


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("child_ended", [False, True])
def test_c22_no_choice_runs_on_when_the_request_is_aborted(depth: int, in_flight: bool, child_ended: bool) -> None:
    world = small(depth)
    world.admit("a", [1, 2, 3, 4, 5], 9, n=2)
    while any(world.clients["a", 0, choice].heard < 1 for choice in (0, 1)):
        one_by_one(world, 1)
    heard = [world.clients["a", 0, choice].heard for choice in (0, 1)]
    if child_ended:
        world.abort("a", choice=0)
    if in_flight:
        fill(world)
    world.abort("a")
    assert not world.clients
    world.tick()
    assert not world.state.running()
    world.finish()
    assert [completion(world, "a", choice=choice) for choice in (0, 1)] == [
        (FinishReason.ABORT, count) for count in heard
    ]


@pytest.mark.parametrize("running", [False, True])
def test_c23_a_late_abort_does_not_touch_the_next_request_of_that_rid(depth: int, running: bool) -> None:
    world = small(depth)
    world.admit("x", [1, 2], 4, epoch=0)
    fill(world)
    world.abort("x", epoch=0)
    world.admit("x", [1, 2], 4, epoch=1)
    if running:
        world.steps(1)
    world.abort("x", epoch=0)
    assert ("x", 1, 0) in world.clients
    world.finish()
    assert completion(world, "x", 1) == (FinishReason.LENGTH, 4)


def test_c24_pages_of_an_aborted_row_are_granted_only_after_its_step(depth: int) -> None:
    world = small(depth, num_pages=4)
    world.admit("a", [1] * 10, 5)
    one_by_one(world, 1)
    fill(world)
    (seat,) = world.state.running()
    pages = list(seat.pages)
    world.abort("a")
    world.admit("b", [2] * 8, 3)  # of the four pages, it needs three
    while world.state.requests["a"].phase is Phase.STOPPING:
        world.tick()
        assert world.state.requests["b"].phase is Phase.WAITING
        world.done()
    world.tick()
    (other,) = world.state.running()
    assert set(pages) & set(other.pages)
    world.finish()
    assert completion(world, "b") == (FinishReason.LENGTH, 3)


def test_c26_a_row_that_several_steps_name_is_released_with_the_last_of_them(depth: int) -> None:
    world = small(depth)
    world.admit("a", [1, 2, 3], 9)
    one_by_one(world, 1)
    assert fill(world) == depth + 1
    request = world.state.requests["a"]
    held = world.state.pool.held
    world.abort("a")
    while len(world.flights) > 1:
        world.done()
        assert request.phase is Phase.STOPPING and world.state.pool.held == held
    world.done()
    assert request.phase is Phase.FINISHED and world.state.pool.held == 0
    assert completion(world, "a") == (FinishReason.ABORT, 1)
    world.finish()
