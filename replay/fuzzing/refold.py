"""Fold a run's own log again: recorded plans are decided anew and applied as recorded, the digest must be equal."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from leftfold.events import Event, Tick, decode, encode
from leftfold.events.codec import plan_json, same
from leftfold.fsm import Config, State, decide, step
from leftfold.replay.fuzzing.errors import Violation


def refold(config: Config, log: Sequence[Event], digest: str) -> State:
    """Raises `Violation` where the replay, through the codec, leaves the run."""
    state = State(config)
    for number, event in enumerate(log):
        read = decode(orjson.loads(encode(event)))
        if not same(read, event):
            raise Violation("replay", f"event {number} was {event}, and is read back as {read}")
        if isinstance(read, Tick):
            assert read.plan is not None
            again = decide(state, read.t)
            if again is None or plan_json(again) != plan_json(read.plan):
                raise Violation("replay", f"event {number}: {read.plan} is decided anew as {again}")
        step(state, read)
    if state.digest() != digest:
        raise Violation("replay", "the log folds to another state")
    return state
