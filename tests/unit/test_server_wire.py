"""The wire between the two processes: what goes in comes out, and nothing else is read."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leftfold.attaching import delivery
from leftfold.events import Abort, Admit, Call, Pause, Reconfigure, SamplingParams, Sleep, UpdateWeights, same
from leftfold.executor.base import Attachment, Score
from leftfold.fsm import Effects
from leftfold.fsm.effects import FinishReason, Usage
from leftfold.fsm.effects import Output as EngineOutput
from leftfold.server.publishing import Publisher
from leftfold.server.wire import (
    Answered,
    Ask,
    Failed,
    Output,
    Outputs,
    Ready,
    Stats,
    StatsRequest,
    Status,
    Stop,
    Submit,
    WireError,
    from_frames,
    output_row,
    to_frames,
)
from tests.engines import Listener, admit, engine


@pytest.mark.parametrize("message", [
    StatsRequest(7),
    Stop(),
    Ask("c", [["r", 0, 0, 7]], ["d"]),
    Ready({"max_model_len": 64, "fault": ""}),
    Failed("one line: é"),
    Stats(7, {"running": 1, "gate": "running"}),
    Outputs([Output("r", 0, 5, [1, 2], None, None, None), Output("s", 1, 9, [], "error", {"code": "failed"}, None)]),
    Outputs([Output("r", 0, 5, [1], "stop", None, {"prompt_tokens": 3}, "v2")]),
    Status("paused", ["weights", "kv"]),
    Status("running", [], "the log cannot be written: No space left on device"),
    Answered("c-1", True, {"mode": "wait"}),
    Answered("c-2", False, "superseded by a resume"),
])  # fmt: skip
def test_round_trip(message: Any) -> None:
    assert from_frames(to_frames(message)) == message


@pytest.mark.parametrize("event", [
    Admit(t=0, rid="a", prompt=[1, 2], params=SamplingParams(seed=2**64 - 1, logit_bias={5: -1.5}, stop_token_ids=[2])),
    Pause(t=0, call="c-1", mode="wait"),
    Sleep(t=0, call="c-2", tags=["kv"]),
    UpdateWeights(t=0, call="c-3", source="/models/b", version="v2", live="keep"),
    Reconfigure(t=0, call="c-4", set={"max_running": 2, "max_queued_tokens": None}),
    Call(t=0, call="c-5", verb="slow_down", args={"seconds": 0.5}),
    Admit(t=0, rid="b", prompt=np.arange(5, dtype=np.int32), priority=-3),
    Abort(t=0, rid="a", reason="stop_string", keep=3),
])  # fmt: skip
def test_events_travel_as_the_log_keeps_them(event: Any) -> None:
    message = from_frames(to_frames(Submit(event)))
    assert isinstance(message, Submit) and same(message.event, event)


@given(st.lists(st.binary(max_size=40), max_size=4))
def test_noise_is_refused(frames: list[bytes]) -> None:
    try:
        message = from_frames(frames)
    except WireError:
        return
    assert to_frames(message)[0] == frames[0]  # by chance a message


@pytest.mark.parametrize("tag", [b"E", b"Q", b"X", b"R", b"F", b"O", b"S", b"G", b"A", b"?", b""])
@pytest.mark.parametrize("body", [b"", b"{", b"5", b"[5]", b'[["r",0,0,["x"],null,null,null]]', b"{}x"])
@pytest.mark.parametrize("more", [b"", b'{"unknown":1}', b'{"call":"1"}', b'{"info":5}', pickle.dumps({"call": 1})])
def test_broken_bodies_are_refused(tag: bytes, body: bytes, more: bytes) -> None:
    for broken in (body, more):
        with pytest.raises(WireError):
            from_frames([tag, broken])


SCORES = [Score(4, 7, -0.125, ((7, -0.125), (9, -3.0000001))), Score(5, 8, -1e-30)]


def test_scores_travel_typed() -> None:
    message = Outputs([Output("r", 0, 5, [8], None, None, None, "", SCORES), Output("s", 0, 1, [2], None, None, None)])
    again = from_frames(to_frames(message))
    assert isinstance(again, Outputs)
    assert list(again.rows[0].scores) == SCORES and isinstance(again.rows[0].scores[0], Score)
    assert list(again.rows[1].scores) == []


@pytest.mark.parametrize("score", [5, [], [1, 2, "x", []], [1, 2, None, []], [1.5, 2, 0.0, []], [1, 2, 0.0, [5]],
    [1, 2, 0.0, [[1]]], [1, 2, 0.0, [["a", 0.0]]], [1, 2, 0.0, [[1, "a"]]], [1, 2, 0.0, {}]])  # fmt: skip
def test_broken_scores_are_refused(score: Any) -> None:
    body = orjson.dumps([["r", 0, 5, [1], None, None, None, "", [score]]])
    with pytest.raises(WireError):
        from_frames([b"O", body])


def test_what_came_beside_an_output_goes_with_the_first_of_its_choice() -> None:
    row = EngineOutput("r", 0, 0, 5, (8,), None, None, None, "")
    end = row._replace(tokens=(), finish_reason=FinishReason.ABORT)
    other = row._replace(choice=1)
    said: list[Any] = []
    effects = Effects(plan=None, outputs=[row, other, end], acks=[], kv_events=(), wake_at=None)
    Publisher(said.append)(delivery(effects, [Attachment("r", 0, 0, SCORES)]))
    assert [list(output.scores) for output in said[0].rows] == [SCORES, [], []]


def test_an_engines_row_becomes_plain_data() -> None:
    usage = Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1)
    row = EngineOutput("r", 0, 1, 4, np.array([7, 8], dtype=np.int32), FinishReason.STOP, None, usage, "v2")
    plain = output_row(row)
    assert plain == Output("r", 1, 4, [7, 8], "stop", None, usage._asdict(), "v2")
    assert from_frames(to_frames(Outputs([plain]))) == Outputs([plain])


def test_who_has_the_answer_to_a_call_has_heard_its_effect_before() -> None:
    said: list[Any] = []
    listener = Listener()
    publisher = Publisher(said.append)
    made = engine(listener)
    made.on_effects = publisher
    publisher.watch(made)
    assert said == [Status("running", [])]
    admit(made, "a")
    made.submit(Pause, call="c-1", mode="abort")
    made.submit(Sleep, tags=["kv"])  # nobody waits for this one
    made.submit(Pause, call="c-2", mode="later")
    made.stop()
    made.run()
    assert said[1] == Status("paused", [])
    kinds = [type(message) for message in said[2:]]
    assert kinds == [Outputs, Answered, Answered]
    assert said[2].rows[0].finish_reason == "abort"
    assert said[3:] == [Answered("c-1", True, {"mode": "abort"}), Answered("c-2", False, said[4].info)]
    assert "later" in said[4].info


def test_an_engine_without_a_state_says_nothing_of_it() -> None:
    said: list[Any] = []

    class Faulted:
        state = None

    Publisher(said.append).watch(Faulted())
    assert said == []
