"""However a policy orders, whoever waits is overtaken a bounded number of times by requests that came later."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from leftfold.events import Admit, ForwardDone, SamplingParams, Tick
from leftfold.fsm import POLICIES, Config, Policy, State, admitting, step
from leftfold.fsm.policy import BUILT_IN, MAX_OVERTAKEN

BOUND = 5


def last_come(request: object) -> tuple[int, ...]:
    """The unfairest order there is."""
    return (-request.arrival,)  # type: ignore[attr-defined]


@pytest.fixture
def policies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "last", Policy(last_come))


def overtaken(policy: str, depth: int, rng: Random, rows: int = 2) -> Counter[str]:
    """An engine that always has more to do than it can; how often each request saw a later one join before it."""
    state = State(
        Config(num_pages=40, page_size=4, max_running=rows, max_batch_tokens=32, max_model_len=60,
               pipeline_depth=depth, policy=policy)
    )  # fmt: skip
    came: dict[str, int] = {}
    joined: set[str] = set()
    counts: Counter[str] = Counter()
    t = 0
    while len(came) < 300:
        t += 1
        while len(state.waiting) < 12:
            rid = f"r{len(came)}"
            came[rid] = len(came)
            first = rng.randrange(3)
            params = SamplingParams(max_tokens=1 + rng.randrange(4))
            step(state, Admit(t=t, rid=rid, prompt=[first] * (1 + rng.randrange(12)), params=params, tenant=str(first),
                              priority=rng.randrange(4), deadline=10**6 + rng.randrange(1000)))  # fmt: skip
        plan = step(state, Tick(t=t)).plan
        if plan is not None:
            for join in plan.plan.join:
                if join.rid not in joined:
                    joined.add(join.rid)
                    for rid, at in came.items():
                        counts[rid] += at < came[join.rid] and rid not in joined
        if len(state.in_flight) > depth or (plan is None and state.in_flight):
            flight = state.in_flight[0]
            step(state, ForwardDone(t=t, step=flight.step, tokens=[1] * flight.expected, digest=flight.digest))
        state.check()
    return counts


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("policy", [*BUILT_IN, "last"])
def test_nobody_is_overtaken_more_often_than_the_bound(
    policy: str, depth: int, policies: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admitting, "MAX_OVERTAKEN", BOUND)
    counts = overtaken(policy, depth, Random(depth))
    most = max(counts.values())
    assert most <= BOUND
    if policy in ("last", "sjf", "priority"):
        assert most == BOUND  # the bound is what holds it
    if policy == "fcfs":
        assert most == 0


def test_without_the_bound_somebody_starves(policies: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admitting, "MAX_OVERTAKEN", 1 << 30)
    assert max(overtaken("last", 0, Random(1)).values()) > MAX_OVERTAKEN


def test_the_bound_that_is_stated_holds(policies: None) -> None:
    assert max(overtaken("last", 1, Random(2)).values()) == MAX_OVERTAKEN
