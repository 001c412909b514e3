"""What chance seldom brings about, with every check of the fuzzer's world behind each event."""

from __future__ import annotations

from dataclasses import replace

from leftfold.events import Evict, Tick
from leftfold.fsm import FinishReason, State, apply, decide
from leftfold.fsm.ending import KEPT_FINISHED
from leftfold.fsm.tenants import KEPT_IDLE
from leftfold.replay.fuzzing import World

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
