"""What chance seldom brings about, with every check of the fuzzer's world behind each event."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from leftfold.events import Evict, Grow, Plan, Tick
from leftfold.events.plan import as_list
from leftfold.fsm import FinishReason, State, apply, decide
from leftfold.fsm.ending import KEPT_FINISHED
from leftfold.fsm.tenants import KEPT_IDLE
from leftfold.replay.fuzzing import World
from tests.cases import one_by_one

LIMITS = {"num_pages": 12, "page_size": 4, "max_running": 4, "max_batch_tokens": 16, "max_model_len": 40}


def world_of(**changes: object) -> World:
    return World(**{**LIMITS, "rigour": 64, **changes})  # type: ignore[arg-type]  # plain numbers and words


def test_only_so_many_finished_requests_are_remembered() -> None:
    world = world_of()
    for number in range(KEPT_FINISHED + 3):
        world.admit(f"r{number}", [1], 1)
        world.steps()
    assert len(world.state.requests) == KEPT_FINISHED and "r2" not in world.state.requests
    world.finish()


def test_a_name_that_lives_again_outlives_what_is_forgotten() -> None:
    """The finished life of a name is forgotten; the one that still runs is not."""
    world = world_of(max_model_len=4000, num_pages=1200)
    world.admit("old", [1], 1)
    world.steps()
    world.admit("old", [1], 3990)
    for number in range(KEPT_FINISHED + 1):
        world.admit(f"r{number}", [1], 1)
        world.steps()
    assert world.state.requests["old"].seat is not None
    world.abort_all()
    world.finish()


def test_only_so_many_idle_tenants_are_remembered() -> None:
    world = world_of(policy="fair")
    for number in range(KEPT_IDLE + 3):
        world.admit(f"r{number % 7}", [1], 1, tenant=f"t{number}")
        world.steps()
        if number % 200 == 0:
            world.shares.forget()  # type: ignore[union-attr]  # its account knows no bound
    assert len(world.state.tenants.served) <= KEPT_IDLE + 1
    world.shares.forget()  # type: ignore[union-attr]
    world.finish()


def test_a_call_whose_step_is_void_is_answered() -> None:
    """The step before it fails, so the one that carries it out never happens."""
    world = world_of(pipeline_depth=1)
    world.admit("a", [1] * 6, 9)
    world.tick()
    call = world.control("Call", verb="profile")
    world.tick()
    world.fail()
    answer = world.desk.answered[call]
    assert not answer.ok and "failed" in str(answer.info)
    world.finish()
    assert world.ended["a", 0, 0].finish_reason is FinishReason.LENGTH


def cached() -> World:
    """A world that has found pages and nobody who holds them, and a request in line."""
    world = world_of()
    world.admit("a", [1] * 9, 2)
    world.steps(5)
    assert len(world.state.pool.cached) == 2
    world.admit("b", [2] * 5, 2)
    return world


def take(state: State, **changes: object) -> None:
    plan = decide(state, 100)
    assert plan is not None
    plan = replace(plan, **changes)  # type: ignore[arg-type]
    apply(state, Tick(t=100, plan=plan), plan)
    state.check(thorough=True)


def test_a_plan_may_evict_more_than_it_grants() -> None:
    """Another planner's plan is as good as ours, if it is valid: what it evicts is free and found no more."""
    state = cached().state
    page, key = next((page, state.pool.keys[page]) for page in state.pool.cached)
    take(state, evict=(Evict("device", 0, [page]),))
    assert page in state.pool.free and key not in state.pool.published


def test_a_plan_may_choose_any_free_slot() -> None:
    state = cached().state
    plan = decide(state, 100)
    assert plan is not None and len(plan.join) == 1 and len(plan.chunks) == 1
    slot = state.free_slots[0]
    assert slot != plan.join[0].slot
    take(state, join=[plan.join[0]._replace(slot=slot)], chunks=[plan.chunks[0]._replace(slot=slot)])
    assert state.live["b", 0, 0].seat is state.by_slot[slot]


def test_odd_requests_are_refused_and_a_wrong_result_of_no_step_does_nothing() -> None:
    world = world_of()
    world.admit("a", [1, 2], 0)
    world.admit("b", [1, -2])
    assert [world.ended[rid, 0, 0].finish_reason for rid in "ab"] == [FinishReason.ERROR] * 2
    events = len(world.log)
    world.spoiled("digest")
    assert len(world.log) == events and world.state.executor_present
    world.finish()


@pytest.mark.parametrize("kind", [tuple, np.array])
def test_columns_of_a_plan_need_not_be_lists(kind: Callable[[Sequence[int]], Any]) -> None:
    """Another planner may give arrays: the state is the same."""
    states = []
    for of in (list, kind):
        world = world_of(num_pages=6)
        world.admit("a", [1] * 4, 9)
        world.admit("b", [2] * 8, 9)
        one_by_one(world, 1)
        plan = decide(world.state, 100)
        assert plan is not None
        ((slots, pages),) = plan.grow
        take(world.state, grow=(Grow(of(slots), of(pages)),))
        states.append(world.state.digest())
    assert states[0] == states[1]


def test_a_choice_that_lives_is_found_after_the_first_one_is_forgotten() -> None:
    world = world_of()
    world.admit("two", [1, 2], 9, n=2)
    world.abort("two", choice=0)
    first, second = world.state.requests["two"], world.state.live["two", 0, 1]
    for _ in range(KEPT_FINISHED):
        assert world.state.requests["two"] is first
        world.odd_admit("empty prompt")
    assert world.state.requests["two"] is second
    world.admit("two", [1, 2], 9, n=2)  # still the same request: the world sees to it that this changes nothing
    world.finish()
    assert world.ended["two", 0, 1].finish_reason is FinishReason.LENGTH


def preempted(plan: Plan) -> list[int]:
    """Slots that give their pages back in a plan."""
    return as_list(plan.preempt)


def newest(world: World) -> Plan:
    return world.flights[-1].plan


def slot_of(world: World, rid: str, choice: int = 0) -> int:
    seat = world.state.live[rid, 0, choice].seat
    assert seat is not None
    return seat.slot


def test_a_row_all_of_whose_pages_others_hold_too_does_not_give_way_to_one_that_runs_alone() -> None:
    """Its pages would stay held: the next one in rank gives way, which has a page of its own."""
    world = world_of(page_size=1, max_chunk_tokens=1, pipeline_depth=2)
    world.admit("s", [1, 2], 9, n=3, cache="read")
    one_by_one(world, 2)  # the first choice's prompt
    world.tick()
    assert [row.choice for row in world.flights[0].rows] == [0, 1, 2]
    world.fail(rows=[0], apart=True)
    assert list(world.state.suspects) == [("s", 0, 1), ("s", 0, 2)]  # the latter now follows the former
    world.lose()
    world.start(num_pages=6)
    one_by_one(world, 1)  # the former is past its place, and computes its prompt still
    assert list(world.state.suspects) == [("s", 0, 2)]
    world.admit("owner", [50], 9)
    world.admit("shared", [1], 9)
    one_by_one(world, 1)
    world.tick()
    assert [(row.rid, row.choice) for row in world.flights[0].rows] == [("s", 2)]
    shared, own = world.state.by_slot[slot_of(world, "shared")], slot_of(world, "owner")
    assert shared is not None and [world.state.pool.refs[page] for page in shared.pages] == [2]
    world.tick()  # while what it began is in flight, it is planned on alone
    assert world.state.pool.usable == 0 and not preempted(newest(world))
    world.tick()
    assert preempted(newest(world)) == [own]
    assert as_list(newest(world).grow[0].slots) == [slot_of(world, "s", 2)]
    assert world.state.live["shared", 0, 0].seat is shared
    world.finish()


def test_a_row_that_runs_out_of_time_makes_room_for_a_higher_class_along_with_one_that_gives_way() -> None:
    """Five pages are needed and one is free: the row that ends brings one, the one that gives way three."""
    world = world_of(policy="priority", num_pages=5)
    world.admit("late", [1] * 3, 9, deadline=50)
    world.admit("low", [2] * 10, 9)
    one_by_one(world, 1)
    low = slot_of(world, "low")
    assert world.state.pool.usable == 1
    world.admit("high", [3] * 17, 3, priority=1)
    plan = decide(world.state, 100)
    assert plan is not None and [end.rid for end in plan.ends] == ["late"]
    assert preempted(plan) == [low] and [join.rid for join in plan.join] == ["high"]
    take(world.state)
    assert [request.rid for request in world.state.waiting] == ["low"] and list(world.state.live) == [
        ("low", 0, 0), ("high", 0, 0),
    ]  # fmt: skip


def test_a_prompt_held_back_for_a_higher_class_is_held_back_once_though_a_row_needs_its_pages_too() -> None:
    world = world_of(policy="priority", num_pages=6, max_chunk_tokens=4, pipeline_depth=1)
    world.admit("grows", [1] * 4, 9, priority=1)
    world.admit("runs", [2] * 2, 9, priority=1)
    world.admit("prompt", [3] * 16, 1)
    world.tick()
    grows, prompt = slot_of(world, "grows"), slot_of(world, "prompt")
    assert world.state.pool.usable == 0 and world.state.at_edge == [grows]
    world.admit("high", [4] * 7, 4, priority=2)
    world.tick()  # what the first chunk writes is in flight
    assert [row.rid for row in world.flights[-1].rows] == ["runs"]
    assert sorted(newest(world).chunks) == sorted([(grows, 0, False), (prompt, 0, False)])
    world.done()
    world.tick()
    assert preempted(newest(world)) == [prompt]
    assert [join.rid for join in newest(world).join] == ["high"]
    world.finish()
    assert {output.finish_reason for output in world.ended.values()} == {FinishReason.LENGTH}


def test_room_made_by_a_deadline_and_by_giving_way_is_looked_at_as_one() -> None:
    world = world_of(policy="priority", num_pages=5)
    world.admit("late", [1] * 3, 9, deadline=50)
    world.admit("low", [2] * 10, 9)
    world.tick()
    world.done()
    world.admit("high", [3] * 17, 3, priority=1)
    world.wait(50)
    world.tick()
    assert world.state.counts["preemptions"] == 1 and ("late", 0, 0) not in world.state.live
    world.finish()


def test_a_plan_for_another_operation_than_the_next_is_refused() -> None:
    world = world_of()
    world.admit("a", [1, 2, 3], 4)
    world.control(kind="Call")
    plan = decide(world.state, world.t)
    assert plan is not None and plan.ops and plan.join
    world.spoiled_plan("order")  # raises if it is taken, or changes anything
    world.finish()
