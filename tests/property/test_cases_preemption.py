"""Faults from the field that concern preemption and pipelining (C30, C32; C31 is in unit/test_attaching.py)."""

from __future__ import annotations

from leftfold.fsm import FinishReason, Phase
from tests.cases import AT_EACH_DEPTH, completion, one_by_one, rids, small

pytestmark = AT_EACH_DEPTH


def test_c30_a_row_without_a_page_is_left_out_and_preempted_once_its_result_is_in(depth: int) -> None:
    world = small(depth, num_pages=4)
    world.admit("a", [1] * 4, 9)
    world.admit("b", [2] * 7, 5)
    one_by_one(world, 1)
    world.tick()  # b's last position of its second page; all four pages are held
    assert rids(world) == ["a", "b"] and world.state.pool.held == 4
    if depth:
        world.tick()
        assert rids(world) == ["a"] and world.state.requests["b"].phase is Phase.DECODING
    world.done()
    world.tick()
    assert world.state.requests["b"].phase is Phase.PREEMPTED
    world.finish()
    assert world.state.stats()["preemptions"] == 1
    assert [completion(world, rid) for rid in "ab"] == [(FinishReason.LENGTH, 9), (FinishReason.LENGTH, 5)]


def test_c32_a_victim_takes_nothing_in_the_plan_it_leaves(depth: int) -> None:
    world = small(depth, num_pages=5, policy="priority", prefix_cache=False)
    world.admit("low", [1] * 7, 6)
    world.admit("high", [2] * 7, 6, priority=1)
    one_by_one(world, 2)  # both have filled two pages, one page is free
    assert world.state.pool.usable == 1 and len(world.state.at_edge) == 2
    world.tick()
    assert rids(world) == ["high"] and world.flight is not None
    assert [len(grow.slots) for grow in world.flight.plan.grow] == [1]
    assert world.state.requests["low"].phase is Phase.PREEMPTED
    world.finish()
    assert [completion(world, rid)[1] for rid in ("low", "high")] == [6, 6]


def test_c32_a_row_that_gives_way_to_a_higher_class_leaves_its_budget_too(depth: int) -> None:
    world = small(depth, policy="priority", max_running=1, max_batch_tokens=8, prefix_cache=False)
    world.admit("low", [1] * 7, 6)
    one_by_one(world, 2)
    world.admit("high", [2] * 8, 2, priority=1)
    world.tick()
    assert world.flight is not None
    assert [(row.rid, row.length) for row in world.flight.rows] == [("high", 8)]
    assert world.flight.plan.preempt and not world.flight.plan.grow
    world.finish()
    assert [completion(world, rid)[1] for rid in ("low", "high")] == [6, 2]
