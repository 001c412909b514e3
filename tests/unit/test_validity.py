"""A plan that a state cannot apply is refused by name, and the state is as before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from leftfold.events import (
    Admit,
    Chunk,
    Control,
    Copy,
    End,
    Evict,
    ForwardDone,
    Grow,
    Join,
    Pause,
    Plan,
    SamplingParams,
    Tick,
)
from leftfold.fsm import Config, Phase, PlanRefused, State, apply, decide, step
from leftfold.replay.fuzzing import World


def prepared() -> State:
    """Row `a` (slot 0) decodes at the end of its pages, `b` (slot 1) prefills, `c` waits and has two pages cached.

    Pages of 2 tokens, 24 of them; rows `a` and `b`, 4 rows and 8 tokens a step at most, chunks of 4.
    """
    world = World(
        num_pages=24, page_size=2, max_running=4, max_batch_tokens=8, max_model_len=64, max_chunk_tokens=4
    )
    world.admit("seed", [7, 7, 7, 7, 7], 1)
    world.finish(replay=False)
    world.admit("a", [1, 2, 3], 9)
    world.steps(2)
    world.admit("b", [5] * 12, 4)
    world.steps(1)
    world.steps(1)
    world.admit("c", [7, 7, 7, 7, 7], 2)
    world.admit("d", [8] * 3, 2)
    state = world.state
    assert [request.phase for request in state.live.values()] == [
        Phase.DECODING, Phase.PREFILLING, Phase.WAITING, Phase.WAITING,
    ]  # fmt: skip
    assert len(state.pool.cached) == 2
    return state


def _decided() -> tuple[State, Plan]:
    state = prepared()
    plan = decide(state, 1000)
    assert plan is not None
    return state, plan


def joined(plan: Plan, **changes: object) -> Plan:
    """The plan with its first join changed."""
    return replace(plan, join=[plan.join[0]._replace(**changes), *plan.join[1:]])  # type: ignore[arg-type]


def test_the_plan_that_is_spoiled_below_is_rich_and_good() -> None:
    state, plan = _decided()
    assert [row.rid for row in plan.join] == ["c", "d"] and plan.join[0].start == 4
    assert plan.grow and [chunk.slot for chunk in plan.chunks] == [1, plan.join[0].slot, plan.join[1].slot]
    assert apply(state, Tick(t=1000, plan=plan), plan).plan is not None
    state.check()


FREE_SLOT = 3
SPOILED: dict[str, tuple[Callable[[State, Plan], Plan], str]] = {
    "no step": (lambda s, p: replace(p, step=None), "step is missing"),
    "another step": (lambda s, p: replace(p, step=p.step + 1), "is not the next one"),
    "operations": (lambda s, p: replace(p, ops=[Copy(src=[1], dst=[2])]), "ops: "),
    "an operation without rows": (lambda s, p: Plan(step=p.step, ops=[Control(op=1, verb="v", args={})]), "ops: "),
    "width": (lambda s, p: replace(p, width=2), "widths"),
    "end of a stranger": (lambda s, p: replace(p, ends=[End("x", 0, "deadline")]), "ends: 'x'"),
    "end of another epoch": (lambda s, p: replace(p, ends=[End("a", 0, "deadline", 3)]), "epoch 3"),
    "end twice": (lambda s, p: replace(p, ends=[End("d", 0, "deadline")] * 2), "ends: 'd'"),
    "end for no reason": (lambda s, p: replace(p, ends=[End("d", 0, "bored")]), "'bored' is no finish reason"),
    "end of a request that joins": (lambda s, p: replace(p, ends=[End("d", 0, "deadline")]), "join: 'd'"),
    "end of a row that is preempted": (
        lambda s, p: replace(p, ends=[End("b", 0, "deadline")], preempt=[1], chunks=p.chunks[1:]), "preempt: slot 1",
    ),
    "preempting a free slot": (lambda s, p: replace(p, preempt=[FREE_SLOT]), "preempt: slot 3 is not running"),
    "preempting slot -1": (lambda s, p: replace(p, preempt=[-1]), "preempt: slot -1"),
    "preempting slot 99": (lambda s, p: replace(p, preempt=[99]), "preempt: slot 99"),
    "preempting twice": (lambda s, p: replace(p, preempt=[1, 1]), "named twice"),
    "join of a stranger": (lambda s, p: joined(p, rid="x"), "join: 'x'"),
    "join of a running request": (lambda s, p: joined(p, rid="a"), "join: 'a'"),
    "join of another epoch": (lambda s, p: joined(p, epoch=1), "epoch 1"),
    "join twice": (
        lambda s, p: replace(
            p, join=[p.join[0], p.join[0]._replace(slot=FREE_SLOT, pages=[list(s.pool.free)[-3:]], start=0)]
        ),
        "join: 'c'",
    ),
    "join in a taken slot": (lambda s, p: joined(p, slot=0), "slot 0 is not free"),
    "join in slot 99": (lambda s, p: joined(p, slot=99), "slot 99 is not free"),
    "two joins in one slot": (lambda s, p: joined(p, slot=p.join[1].slot), "is not free"),
    "join with a page too few": (lambda s, p: joined(p, pages=[p.join[0].pages[0][:-1]]), "for 5 tokens"),
    "join in two groups": (lambda s, p: joined(p, pages=[p.join[0].pages[0], []]), "2 groups"),
    "join in no group": (lambda s, p: joined(p, pages=[]), "0 groups"),
    "join inside a page": (lambda s, p: joined(p, start=3), "join|evicted"),
    "join past its tokens": (lambda s, p: joined(p, start=6), "join"),
    "join before its tokens": (lambda s, p: joined(p, start=-2), "join"),
    "join with pages nobody published": (
        lambda s, p: joined(p, pages=[[p.join[1].pages[0][0], *p.join[0].pages[0][1:]]]), "not in the prefix cache",
    ),
    "join with a found page that does not exist": (
        lambda s, p: joined(p, pages=[[99, *p.join[0].pages[0][1:]]]), "not in the prefix cache",
    ),
    "join with other tokens": (
        lambda s, p: joined(p, pages=[[*reversed(p.join[0].pages[0][:2]), *p.join[0].pages[0][2:]]]),
        "not in the prefix cache|does not hold",
    ),
    "join with one found page twice": (
        lambda s, p: joined(p, pages=[[p.join[0].pages[0][0]] * 2 + list(p.join[0].pages[0][2:])]),
        "not in the prefix cache|does not hold",
    ),
    "a page granted twice": (
        lambda s, p: joined(p, pages=[[*p.join[0].pages[0][:2], p.join[1].pages[0][0]]]), "twice",
    ),
    "a held page": (lambda s, p: joined(p, pages=[[*p.join[0].pages[0][:2], s.by_slot[0].pages[0]]]), "is held"),
    "a page that does not exist": (lambda s, p: joined(p, pages=[[*p.join[0].pages[0][:2], 24]]), "does not exist"),
    "page -1": (lambda s, p: joined(p, pages=[[*p.join[0].pages[0][:2], -1]]), "does not exist"),
    "a found page that is evicted": (
        lambda s, p: replace(p, evict=[Evict("device", 0, p.join[0].pages[0][:1])]), "evict",
    ),
    "evicting a held page": (lambda s, p: replace(p, evict=[Evict("device", 0, [s.by_slot[0].pages[0]])]), "is held"),
    "evicting a free page": (lambda s, p: replace(p, evict=[Evict("device", 0, list(s.pool.free)[-1:])]), "not cached"),
    "evicting twice": (lambda s, p: replace(p, evict=[Evict("device", 0, [next(iter(s.pool.cached))] * 2)]), "twice"),
    "evicting from another tier": (
        lambda s, p: replace(p, join=[], chunks=p.chunks[:1], evict=[Evict("host", 0, list(s.pool.cached)[:1])]),
        "tier",
    ),
    "evicting from another group": (
        lambda s, p: replace(p, join=[], chunks=p.chunks[:1], evict=[Evict("device", 1, list(s.pool.cached)[:1])]),
        "group",
    ),
    "a cached page that is not evicted": (
        lambda s, p: joined(p, start=0, pages=[[*p.join[0].pages[0][:2], p.join[0].pages[0][2]]]), "evicted",
    ),
    "a chunk of a free slot": (lambda s, p: replace(p, chunks=[*p.chunks, Chunk(FREE_SLOT + 9, 1, False)]), "chunks"),
    "a chunk of a decoding row": (lambda s, p: replace(p, chunks=[*p.chunks, Chunk(0, 1, True)]), "slot 0"),
    "a chunk named twice": (lambda s, p: replace(p, chunks=[p.chunks[0], *p.chunks]), "named twice"),
    "a chunk past the prompt": (lambda s, p: replace(p, chunks=[Chunk(1, 8, True), *p.chunks[1:]]), "left|at once"),
    "a negative chunk": (lambda s, p: replace(p, chunks=[Chunk(1, -1, False), *p.chunks[1:]]), "left"),
    "a chunk that samples too early": (lambda s, p: replace(p, chunks=[Chunk(1, 1, True), *p.chunks[1:]]), "samples"),
    "a last chunk that does not sample": (
        lambda s, p: replace(p, chunks=[*p.chunks[:1], p.chunks[1]._replace(samples=False), *p.chunks[2:]]), "samples",
    ),
    "a prefilling row left out": (lambda s, p: replace(p, chunks=p.chunks[1:]), "not named"),
    "no page for a full row": (lambda s, p: replace(p, grow=()), "grow"),
    "a page for a row with room": (lambda s, p: replace(p, grow=[*p.grow, Grow([1], list(s.pool.free)[-1:])]), "grow"),
    "pages and slots differ in number": (lambda s, p: replace(p, grow=[Grow([0], list(s.pool.free)[-2:])]), "grow"),
    "nothing computed": (lambda s, p: replace(_only_b(p), chunks=[Chunk(1, 0, False)]), "no row computes anything"),
    "another base": (lambda s, p: replace(p, base=1), "base"),
    "a memo of large numbers": (lambda s, p: replace(p, memo={"x": 1 << 63}), "memo"),
    "a memo of words": (lambda s, p: replace(p, memo={"x": "1"}), "memo"),
}  # fmt: skip


def _only_b(plan: Plan) -> Plan:
    return replace(plan, join=(), grow=(), preempt=[0])


@pytest.mark.parametrize("name", SPOILED)
def test_a_spoiled_plan_is_refused_by_name_and_changes_nothing(name: str) -> None:
    state, plan = _decided()
    spoil, said = SPOILED[name]
    wrong = spoil(state, plan)
    before = state.digest()
    with pytest.raises(PlanRefused, match=said):
        step(state, Tick(t=1000, plan=wrong))
    assert state.digest() == before
    state.check()
    assert step(state, Tick(t=1000, plan=plan)).plan is not None


def test_rows_do_not_run_behind_a_gate() -> None:
    """A plan that was right until somebody paused the engine."""
    state, plan = _decided()
    step(state, Pause(t=1000, call="c", mode="keep"))
    before = state.digest()
    with pytest.raises(PlanRefused, match="rows may not run"):
        step(state, Tick(t=1000, plan=plan))
    assert state.digest() == before


def _full_of_cached_pages() -> tuple[State, Plan]:
    """One row, pages of others that are cached, none free; the plan lets a request join, for which some are evicted."""
    state = State(Config(num_pages=6, page_size=1, max_running=2, max_batch_tokens=8, max_model_len=8))
    for token in range(1, 5):
        step(state, Admit(t=0, rid=f"old{token}", prompt=[token], params=SamplingParams(max_tokens=2)))
        while state.live:
            step(state, Tick(t=0))
            flight = state.in_flight[0]
            step(state, ForwardDone(t=0, step=flight.step, tokens=[9] * flight.expected))
    step(state, Admit(t=0, rid="runs", prompt=[50, 51], params=SamplingParams(max_tokens=6)))
    step(state, Tick(t=0))
    step(state, ForwardDone(t=0, step=state.in_flight[0].step, tokens=[9]))
    step(state, Admit(t=0, rid="joins", prompt=[60, 61], params=SamplingParams(max_tokens=2)))
    plan = decide(state, 0)
    assert plan is not None and plan.evict and plan.join
    return state, plan


@pytest.mark.parametrize("where", ["evicted", "granted", "evicted and granted"])
@pytest.mark.parametrize("held", [False, True], ids=["not cached", "held"])
def test_only_cached_pages_are_evicted_for_whoever_joins(where: str, held: bool) -> None:
    """In a plan that is otherwise as most are, one page is another."""
    state, plan = _full_of_cached_pages()
    (evict,) = plan.evict
    running = state.running()[0]
    wrong = running.pages[-1] if held else len(state.pool)
    pages = [*evict.pages[:-1], wrong]
    join = plan.join[0]
    given = [wrong if page == evict.pages[-1] else page for page in join.pages[0]]
    spoiled = plan if where == "granted" else replace(plan, evict=[evict._replace(pages=pages)])
    if "granted" in where:
        spoiled = replace(spoiled, join=[join._replace(pages=[given]), *plan.join[1:]])
    before = state.digest()
    with pytest.raises(PlanRefused):
        step(state, Tick(t=0, plan=spoiled))
    assert state.digest() == before and step(state, Tick(t=0, plan=plan)).plan is not None


@pytest.mark.parametrize("kind", [float, str, lambda page: page == 1])
def test_pages_that_are_evicted_and_granted_are_integers(kind: Callable[[int], object]) -> None:
    """1.0 and True are equal to 1, and no record gives them back."""
    state = State(Config(num_pages=2, page_size=1, max_running=1, max_batch_tokens=4, max_model_len=8))
    step(state, Admit(t=0, rid="old", prompt=[1], params=SamplingParams(max_tokens=2)))
    while state.live:
        step(state, Tick(t=0))
        step(state, ForwardDone(t=0, step=state.next_step - 1, tokens=[2]))
    step(state, Admit(t=0, rid="new", prompt=[8, 9], params=SamplingParams(max_tokens=1)))
    plan = decide(state, 0)
    assert plan is not None and list(plan.evict[0].pages) == list(plan.join[0].pages[0]) == [1, 0]
    with pytest.raises(PlanRefused, match="does not exist"):
        wrong = replace(plan, evict=[Evict("device", 0, [*map(kind, plan.evict[0].pages)])])  # type: ignore[list-item]
        apply(state, Tick(t=0, plan=wrong), wrong)
    assert apply(state, Tick(t=0, plan=plan), plan).plan is not None


def test_a_step_over_the_token_budget_is_refused() -> None:
    state = State(Config(num_pages=8, page_size=4, max_running=2, max_batch_tokens=3, max_model_len=20))
    step(state, Admit(t=0, rid="a", prompt=[1] * 4, params=SamplingParams()))
    wrong = Plan(step=1, join=[Join(0, "a", 0, 0, [[0]])], chunks=[Chunk(0, 4, True)])
    with pytest.raises(PlanRefused, match="at once|over the limits"):
        step(state, Tick(t=1, plan=wrong))


def test_no_second_step_while_one_is_in_flight() -> None:
    state, plan = _decided()
    step(state, Tick(t=1000, plan=plan))
    before = state.digest()
    with pytest.raises(PlanRefused, match="in flight"):
        step(state, Tick(t=1001, plan=Plan(step=state.next_step)))
    assert state.digest() == before


@pytest.mark.parametrize("gone", [True, False])
def test_no_step_without_executor_or_in_a_stopped_engine(gone: bool) -> None:
    world = World(num_pages=8, page_size=4, max_running=2, max_batch_tokens=8, max_model_len=20)
    world.admit("a", [1, 2], 9)
    world.steps(1)
    if gone:
        world.lose()
    else:
        world.shutdown(deadline=5)
        world.wait(9)
        world.tick()
    before = world.state.digest()
    with pytest.raises(PlanRefused, match="executor present False" if gone else "gate stopped"):
        step(world.state, Tick(t=world.t, plan=Plan(step=world.state.next_step)))
    assert world.state.digest() == before


def test_nothing_ends_in_a_stopped_engine() -> None:
    world = World(num_pages=8, page_size=4, max_running=2, max_batch_tokens=8, max_model_len=20)
    world.shutdown(deadline=5)
    world.wait(9)
    world.tick()
    before = world.state.digest()
    with pytest.raises(PlanRefused, match="ends: the engine is stopped"):
        step(world.state, Tick(t=world.t, plan=Plan(ends=[End("a", 0, "deadline")])))
    assert world.state.digest() == before


def pipelined() -> World:
    """Two steps may be in flight beside the oldest; a row of two tokens to come, and one of many."""
    world = World(
        num_pages=8, page_size=4, max_running=2, max_batch_tokens=8, max_model_len=20, pipeline_depth=2
    )
    world.admit("short", [1, 2], 2)
    world.admit("long", [3, 4], 9)
    world.tick()
    return world


def refused(world: World, plan: Plan, says: str) -> None:
    before = world.state.digest()
    with pytest.raises(PlanRefused, match=says):
        step(world.state, Tick(t=world.t + 1, plan=plan))
    assert world.state.digest() == before


def test_a_row_that_a_step_in_flight_names_is_not_preempted() -> None:
    world = pipelined()
    refused(world, Plan(step=world.state.next_step, preempt=[0]), "preempt: a step in flight names slot 0")
    world.finish()


def test_a_row_that_is_planned_up_to_its_limit_is_left_out() -> None:
    world = pipelined()
    world.tick()
    assert [*world.state.resting] == [0]
    refused(world, Plan(step=world.state.next_step), r"chunks: slots \[0\] are planned up to their limits")
    world.finish()


def test_no_row_keeps_its_pages_where_an_operation_takes_all_of_them() -> None:
    world = pipelined()
    world.land()
    world.control("Sleep", tags=["kv"])
    plan = decide(world.state, world.t + 1)
    assert plan is not None and plan.ops and sorted(plan.preempt) == [0, 1]
    kept = replace(plan, preempt=[0], chunks=[Chunk(1, 0, False)])
    refused(world, kept, "preempt: sleep takes the K/V of all rows, and some keep their pages")
    world.control("Wake", tags=["kv"])
    world.finish()
