"""What executors answer to control calls is told, whatever it is."""

from __future__ import annotations

from typing import Any

import pytest

from leftfold.events import ControlDone, Event, encode
from leftfold.executor.base import NO_TOKENS, Result
from leftfold.fsm import Config, State
from leftfold.results import Results


def answered(info: Any) -> Any:
    """What the log has of an answer."""
    logged: list[Event] = []

    def record(event: Event, attachments: Any = ()) -> None:
        encode(event)
        logged.append(event)

    state = State(Config(num_pages=8, page_size=4, max_running=2, max_batch_tokens=16, max_model_len=30))
    results = Results(record, lambda: 0, False)
    results.done(state, Result(step=1, tokens=NO_TOKENS, digest="", controls=[(1, info, None)]))
    (done,) = [event for event in logged if isinstance(event, ControlDone)]
    return done.info


@pytest.mark.parametrize(
    ("info", "told"),
    [
        ({"a": [1]}, {"a": [1]}),
        ({1: {2.5: "x"}}, {"1": {"2.5": "x"}}),  # as JSON tells it: keys that are no text would not be read back
        (object, "<class 'object'>"),
        ({"a": {1, 2}}, "{'a': {1, 2}}"),
    ],
    ids=repr,
)
def test_an_answer_that_no_record_can_hold_is_told_as_json_or_described(info: Any, told: Any) -> None:
    assert answered(info) == told
