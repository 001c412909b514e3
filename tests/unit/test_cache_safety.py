"""The prefix cache serves no page by a colliding key and none of a request that keeps to itself; digests; deadlines."""

from __future__ import annotations

from typing import Any

import pytest

import leftfold.fsm.commit
import leftfold.fsm.prefix
from leftfold.events import Abort, Admit, ForwardDone, Join, SamplingParams, Shutdown, Tick
from leftfold.fsm import Config, PlanRefused, State, decide, step

CONFIG = Config(num_pages=16, page_size=2, max_running=4, max_batch_tokens=32, max_model_len=24)


def admit(state: State, rid: str, prompt: list[int], max_tokens: int = 4, **fields: Any) -> None:
    step(state, Admit(t=0, rid=rid, prompt=prompt, params=SamplingParams(max_tokens=max_tokens), **fields))


def run(state: State, steps: int = 100) -> list[Join]:
    """Step until nothing is left to do, `steps` at most; every join that there was."""
    joins: list[Join] = []
    for _ in range(steps):
        plan = step(state, Tick(t=1)).plan
        if plan is None:
            break
        joins += plan.join
        tokens = [10 + plan.step for row in plan.rows if row.samples]
        step(state, ForwardDone(t=1, step=plan.step, tokens=tokens, digest=plan.digest))
    return joins


@pytest.fixture
def colliding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every page of a length has one key, whatever it holds."""

    def page_key(parent: bytes, tokens: bytes | memoryview) -> bytes:
        return (int.from_bytes(parent[:2], "big") + 1).to_bytes(2, "big") + parent[2:]

    monkeypatch.setattr(leftfold.fsm.prefix, "page_key", page_key)
    monkeypatch.setattr(leftfold.fsm.commit, "page_key", page_key)


def test_a_page_of_other_tokens_under_the_same_key_is_not_served(colliding: None) -> None:
    state = State(CONFIG)
    admit(state, "a", [1, 2, 3, 4, 5, 6, 7])
    run(state)
    assert state.pool.published
    admit(state, "b", [8, 9, 3, 4, 5, 6, 7])
    assert [join.start for join in run(state)] == [0]
    admit(state, "c", [1, 2, 9, 9, 5, 6, 7])
    assert [join.start for join in run(state)] == [2], "what really is equal is found up to the first difference"
    admit(state, "d", [1, 2, 3, 4, 5, 6, 7])
    assert [join.start for join in run(state)] == [6]


def test_a_plan_that_serves_a_colliding_page_is_refused(colliding: None) -> None:
    state = State(CONFIG)
    admit(state, "a", [1, 2, 3, 4, 5, 6, 7])
    run(state)
    admit(state, "b", [8, 9, 3, 4, 5, 6, 7])
    plan = decide(state, 2)
    assert plan is not None
    page = next(iter(state.pool.published.values()))
    wrong = plan.join[0]._replace(start=2, pages=[[page, *plan.join[0].pages[0][1:]]])
    forged = type(plan)(step=plan.step, join=[wrong], chunks=[plan.chunks[0]._replace(length=5)])
    before = state.digest()
    with pytest.raises(PlanRefused):
        step(state, Tick(t=2, plan=forged))
    assert state.digest() == before


@pytest.mark.parametrize(
    ("cache", "publishes", "finds"), [("use", True, True), ("read", False, True), ("off", False, False)]
)
def test_what_a_request_may_do_with_the_cache(cache: str, publishes: bool, finds: bool) -> None:
    state = State(CONFIG)
    admit(state, "a", [1, 2, 3, 4, 5], max_tokens=6, cache=cache)
    run(state)
    assert bool(state.pool.published) == publishes, "neither pages of its prompt nor those that it decoded"
    admit(state, "b", [1, 2, 3, 4, 5])
    assert [join.start for join in run(state)] == [4 if publishes else 0]
    published = len(state.pool.published)
    admit(state, "c", [1, 2, 3, 4, 9, 9, 9, 9, 9], max_tokens=6, cache=cache)
    assert [join.start for join in run(state)] == [4 if finds else 0]
    assert (len(state.pool.published) > published) == publishes


def test_slots_that_left_since_the_last_plan_are_part_of_the_digest() -> None:
    """The next plan tells the executor of them: two states that differ in it have different futures."""
    state = State(CONFIG)
    admit(state, "a", [1, 2, 3])
    admit(state, "b", [4, 5, 6])
    run(state, 2)
    step(state, Abort(t=1, rid="b"))
    assert state.left
    twin = state.copy()
    assert twin.digest() == state.digest()
    twin.left.clear()
    assert twin.digest() != state.digest()
    plans = [step(one, Tick(t=2)).plan for one in (state, twin)]
    assert plans[0] is not None and plans[1] is not None and plans[0].digest != plans[1].digest


@pytest.mark.parametrize(("own", "closing", "due"), [(50, 80, 50), (80, 50, 50), (50, 0, 50), (0, 80, 80)])
def test_a_closing_engine_wakes_at_whatever_deadline_comes_first(own: int, closing: int, due: int) -> None:
    state = State(CONFIG)
    admit(state, "a", [1, 2, 3], deadline=own)
    effects = step(state, Shutdown(t=0, call="s", deadline=closing))
    assert effects.wake_at == state.wake_at == due
    if own == due:
        ended = list(step(state, Tick(t=due)).outputs)
        assert [output.finish_reason for output in ended] == ["deadline"]
