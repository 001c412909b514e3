"""Faults from the field that concern pages (C02 to C07)."""

from __future__ import annotations

import pytest

from leftfold.executor.oracle import expected_tokens
from leftfold.fsm import FinishReason
from tests.cases import AT_EACH_DEPTH, cached, completion, fill, one_by_one, small

pytestmark = AT_EACH_DEPTH


@pytest.mark.parametrize("length", range(1, 13))
def test_c02_pages_of_a_preempted_request_come_back(depth: int, length: int) -> None:
    world = small(depth)
    world.admit("b", [9] * 12, 20)
    world.admit("a", [5, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2][:length], 20)
    world.finish()
    assert world.state.stats()["preemptions"] >= 1
    assert len(world.state.pool.free) + len(world.state.pool.cached) == 8


def test_c03_two_that_fill_the_same_page_at_once_keep_a_page_each(depth: int) -> None:
    world = small(depth)
    world.admit("a", range(1, 9), 4)
    world.admit("b", range(1, 9), 4)
    one_by_one(world, 1)
    pages = [seat.pages for seat in world.state.running()]
    assert not set(pages[0]) & set(pages[1])
    assert list(world.state.pool.published.values()) == pages[0]
    world.admit("c", range(11, 19), 4)
    while world.clients:
        world.steps()
        held = [page for seat in world.state.running() for page in seat.pages]
        assert not set(held) & set(world.state.pool.free)
    world.finish()
    assert [completion(world, rid) for rid in "abc"] == [(FinishReason.LENGTH, 4)] * 3


def test_c04_an_abort_while_the_last_step_is_in_flight_releases_once(depth: int) -> None:
    world = small(depth)
    world.admit("a", [1, 2, 3, 4], 1)
    world.tick()
    (seat,) = world.state.running()
    world.abort("a")
    world.admit("b", [5] * 8, 3)
    fill(world)
    held = [page for other in world.state.running() for page in other.pages]
    assert not set(held) & set(seat.pages) and bool(held) == (depth > 0)
    world.done()
    assert completion(world, "a") == (FinishReason.ABORT, 0)
    assert set(seat.pages) <= {*world.state.pool.free, *world.state.pool.cached}
    world.finish()
    assert completion(world, "b") == (FinishReason.LENGTH, 3)


def test_c05_the_last_token_of_an_answer_is_not_cached(depth: int) -> None:
    world = small(depth, page_size=1, num_pages=32)
    world.admit("a", [0, 1, 2, 3], 2)
    world.finish()
    world.admit("b", [0, 1, 2, 3, *expected_tokens([0, 1, 2, 3], 2, world.vocab), 9], 2)
    world.finish()
    assert cached(world, "b") == 5


def test_c06_a_request_that_is_not_to_be_cached_goes_on_with_every_chunk(depth: int) -> None:
    world = small(depth, max_chunk_tokens=8)
    world.admit("a", [7] * 20, 1, cache="off")
    reached = []
    while world.clients:
        fill(world)
        world.done()
        assert world.state.pool.held <= 5 and not world.state.pool.published
        reached += [int(world.state.columns.computed[seat.slot]) for seat in world.state.running()]
    assert reached == [8, 16]
    world.finish()


def test_c07_demand_counts_pages_and_preemption_comes_before_allocation(depth: int) -> None:
    world = small(depth)
    for rid, first in (("a", 1), ("b", 2), ("c", 3)):
        world.admit(rid, [first] * 7, 8)
    one_by_one(world, 2)
    assert [seat.pages for seat in world.state.decoding.seats] == [[0, 1], [2, 3], [4, 5]]
    world.tick()  # three rows at the end of their second page, two free pages
    assert world.flight is not None
    assert len(world.flight.plan.preempt) == 1
    assert [len(grow.slots) for grow in world.flight.plan.grow] == [2]
    world.finish()
    assert {completion(world, rid) for rid in "abc"} == {(FinishReason.LENGTH, 8)}
