"""Requests that no engine could run are refused with one error that names field and value, and nothing else changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from leftfold.events import Admit, SamplingParams, Tick
from leftfold.fsm import Config, FinishReason, Output, Phase, State, step

CONFIG = Config(num_pages=8, page_size=4, max_running=2, max_batch_tokens=16, max_model_len=24, vocab_size=100)
GOOD: dict[str, Any] = {"prompt": [1, 2, 3], "params": {"max_tokens": 4}}

WRONG_NUMBERS = [-1, 1.0, "1", None, True, 1 << 62]
BAD_FIELDS = [
    *[("deadline", value) for value in WRONG_NUMBERS],
    *[("queue_deadline", value) for value in WRONG_NUMBERS],
    *[("priority", value) for value in (0.0, "1", None, False, 1 << 62, -(1 << 62))],
    *[("cache", value) for value in ("", "write", None, 0)],
    *[("want", value) for value in ([], "logprobs", 1)],
    ("adapter", "a"), ("media", ({"hash": "x"},)), ("session", "s"), ("peer", "p"), ("shard", 0), ("task", "embed"),
]  # fmt: skip
BAD_PARAMS = [
    *[("max_tokens", value) for value in (0, *WRONG_NUMBERS)],
    *[("n", value) for value in (0, 10**9, *WRONG_NUMBERS)],
    *[("min_tokens", value) for value in WRONG_NUMBERS],
    *[("stop_token_ids", value) for value in ("12", 7, None)],
    ("grammar", {"regex": "a"}), ("processors", ("x",)),
]  # fmt: skip
BAD_WANTS = [("logprobs", -1), ("logprobs", 10**6), ("logprobs", "5"), ("logprobs_from", -1), ("top", 1)]
BAD_PROMPTS = [
    ([], "prompt is empty"), ([True, False], "prompt holds True"), (np.ones(2), "prompt holds 1.0"),
    (["1", 2], "prompt holds '1'"), ([1, 1.5], "prompt holds 1.5"), ([1, 2**70, 3], f"prompt holds {2**70}"),
    ([[1, 2]], "prompt is not a list"), ("text", "prompt is not a list"), ([[1], [2, 3]], "prompt is not a list"),
    (np.zeros((2, 2), np.int32), "prompt is not a list"), ([1, 100], "prompt\\[1\\] is 100"),
    ([1, 2, -3], "prompt\\[2\\] is -3"), (np.array([1, -1], np.int32), "prompt\\[1\\] is -1"),
    ([7] * 24, "prompt has 24 tokens"),
]  # fmt: skip


def refused(state: State, **given: Any) -> str:
    """What one that is not taken is told, as the only effect."""
    values = {**GOOD, **given}
    values["params"] = SamplingParams(**values["params"])
    effects = step(state, Admit(t=1, rid="bad", **values))
    outputs = list(effects.outputs)
    assert not effects.acks and effects.plan is None and not state.live
    assert all(isinstance(output, Output) for output in outputs)
    assert {output.finish_reason for output in outputs} == {FinishReason.ERROR}
    (error,) = {(output.error["code"], output.error["text"]) for output in outputs}
    assert error[0] == "invalid"
    assert step(state, Tick(t=2)).plan is None, "there is nothing to run"
    return str(error[1])


@pytest.mark.parametrize(("name", "value"), BAD_FIELDS)
def test_a_field_that_is_wrong_is_named_with_its_value(name: str, value: Any) -> None:
    told = refused(State(CONFIG), **{name: value})
    assert name in told and (repr(value) in told or name == "media")


@pytest.mark.parametrize(("name", "value"), BAD_PARAMS)
def test_a_parameter_that_is_wrong_is_named_with_its_value(name: str, value: Any) -> None:
    told = refused(State(CONFIG), params={"max_tokens": 4, name: value})
    assert name in told and repr(value) in told


@pytest.mark.parametrize(("name", "value"), BAD_WANTS)
def test_a_wish_that_is_wrong_is_named(name: str, value: Any) -> None:
    told = refused(State(CONFIG), want={name: value})
    assert name in told and (repr(value) in told or "not supported" in told)


@pytest.mark.parametrize(("prompt", "told"), BAD_PROMPTS)
def test_a_prompt_that_is_none_says_what_is_wrong_with_it(prompt: Any, told: str) -> None:
    with pytest.raises(AssertionError, match=told):
        raise AssertionError(refused(State(CONFIG), prompt=prompt))


@pytest.mark.parametrize("token", [-1, 1 << 31, 1.0, "1", True, None])
def test_a_stop_id_that_is_none_is_named(token: Any) -> None:
    told = refused(State(CONFIG), params={"max_tokens": 4, "stop_token_ids": (5, token)})
    assert f"stop_token_ids holds {token!r}" in told


@pytest.mark.parametrize(
    "given", [{"tenant": object()}, {"cache_salt": b"x"}, {"params": {"max_tokens": 4, "seed": object()}}]
)
def test_what_no_record_can_hold_is_refused(given: dict[str, Any]) -> None:
    assert "cannot be written down" in refused(State(CONFIG), **given)


def test_what_was_refused_holds_no_tokens_and_is_counted() -> None:
    state = State(CONFIG)
    before = state.queued_tokens
    refused(state, prompt=[1, 100])
    (request,) = state.requests.values()
    assert (len(request.tokens), request.prompt_len, request.phase) == (0, 2, Phase.FINISHED)
    assert (state.queued_tokens, state.counts["refused"]) == (before, 1)
