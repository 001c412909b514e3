"""What a test that `leftfold replay shrink` wrote does: fold its records, and decide anew wherever they decide."""

from __future__ import annotations

import orjson

from leftfold.events import Event, Started, Tick, decode
from leftfold.fsm import Config, State, decide, step
from leftfold.replay.compare import compare_plans


def refold(records: str) -> State:
    """Fold records, one JSON object a line; a `Tick` without a plan decides.

    Raises `AssertionError` where a recorded plan is not what is decided here, `InvariantViolation` where the state is
    wrong after a record, and whatever the reducer raises.
    """
    state: State | None = None
    for seq, line in enumerate(filter(None, map(str.strip, records.splitlines())), 1):
        event = decode(orjson.loads(line))
        if state is None:
            assert isinstance(event, Started) and event.config is not None, "the first record must be a Started"
            state = State(Config.from_dict(event.config))
        if isinstance(event, Tick) and event.plan is not None:
            decided = decide(state, event.t)
            if event.plan.empty and decided is None:
                continue  # here nothing is to be decided
            differs = compare_plans(seq, event.plan, decided)
            assert differs is None, differs.describe() if differs else ""
        step(state, event)
        state.check()
    assert state is not None, "there are no records"
    return state


def events_of(records: str) -> list[Event]:
    """The events that a fold of `records` takes: each `Tick` with what is decided here (one that decides nothing is
    left out).
    """
    state: State | None = None
    events: list[Event] = []
    for line in filter(None, map(str.strip, records.splitlines())):
        event = decode(orjson.loads(line))
        if state is None:
            assert isinstance(event, Started) and event.config is not None, "the first record must be a Started"
            state = State(Config.from_dict(event.config))
        if isinstance(event, Tick) and event.plan is None:
            plan = decide(state, event.t)
            if plan is None:
                continue
            event = Tick(t=event.t, plan=plan)
        step(state, event)
        events.append(event)
    return events


__all__ = ["events_of", "refold"]
