"""Snapshot and tail equal the whole log: a state that went through JSON has the same digest and the same future."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
import pytest

from leftfold.events import Event, Plan
from leftfold.events.codec import plan_json
from leftfold.fsm import Config, Effects, SnapshotInvalid, State, decide, step
from leftfold.fsm.policy import BUILT_IN
from leftfold.fsm.snapshot import FORMAT, decode, encode
from leftfold.replay.fuzzing import World
from tests.watching import runs, watch

SEED, RUNS = 1, 14


def through_json(state: State) -> State:
    return decode(orjson.loads(orjson.dumps(encode(state), option=orjson.OPT_SERIALIZE_NUMPY)))


def told(effects: Effects) -> tuple[Any, ...]:
    """Everything that an event led to, as values."""
    plan = effects.plan
    executed = None if plan is None else (plan_json(plan.plan), plan.digest, [*plan.rows], plan.ended, plan.voids)
    outputs = [(*one[:4], [*one.tokens], *one[5:]) for one in effects.outputs]
    return executed, outputs, [*effects.acks], [*effects.kv_events], effects.wake_at


def test_a_restored_state_is_the_same_at_every_position_and_goes_on_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every event of random runs the state goes through JSON, and from then on both are folded side by side."""
    twins: dict[World, list[State]] = {}
    depths, policies, positions = set(), set(), 0

    def look(world: World, event: Event, plan: Plan | None, take: Callable[[], Effects]) -> Effects:
        nonlocal positions
        restored = through_json(world.state)
        assert restored.digest() == world.state.digest()
        restored.check()
        positions += 1
        depths.add(world.config.pipeline_depth)
        policies.add(world.config.policy)
        kept = twins.setdefault(world, [])
        kept.append(restored)
        del kept[:-3]  # the three newest go on: each for three events, the last ones to the end
        if len(kept) > 1 and positions % 7:
            kept.pop(0 if positions % 2 else -1)
        ahead = [decide(twin, event.t) for twin in kept]
        now = decide(world.state, event.t)
        assert all((one and plan_json(one)) == (now and plan_json(now)) for one in ahead)
        effects = take()
        expected, digest = told(effects), world.state.digest()
        for twin in kept:
            assert told(step(twin, event)) == expected
            assert twin.digest() == digest
        return effects

    watch(monkeypatch, look)
    for seed in range(SEED, SEED + 10):  # whatever the fuzzer draws first
        runs(seed, RUNS)
        if depths == {0, 1, 2} and policies == {*BUILT_IN}:
            break
    assert depths == {0, 1, 2} and policies == {*BUILT_IN}
    assert positions > 1000


def test_what_is_no_state_is_refused_by_name() -> None:
    config = Config(num_pages=4, page_size=4, max_running=2, max_batch_tokens=8, max_model_len=16)
    good = orjson.loads(orjson.dumps(encode(State(config)), option=orjson.OPT_SERIALIZE_NUMPY))
    assert decode(good).digest() == State(config).digest()
    for name in good:
        with pytest.raises(SnapshotInvalid):
            decode({key: value for key, value in good.items() if key != name})
    for name in ("config", "gate", "live", "columns", "pool", "in_flight", "controls", "free_slots", "root"):
        with pytest.raises(SnapshotInvalid):
            decode({**good, name: 5})
    with pytest.raises(SnapshotInvalid, match=f"a state of format {FORMAT + 1}; this version reads up to {FORMAT}"):
        decode({**good, "format": FORMAT + 1})
