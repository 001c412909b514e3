"""Configurations that are none, and requests that no engine can take: the message names field and value."""

from __future__ import annotations

import re
from typing import Any

import pytest

from leftfold.events import Admit, SamplingParams
from leftfold.fsm import Config, FinishReason, State, step
from leftfold.fsm.limits import ConfigError, demand

LIMITS: dict[str, Any] = {
    "num_pages": 8, "page_size": 4, "max_running": 2, "max_batch_tokens": 8, "max_model_len": 16,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_pages": 0}, "num_pages 0 is not a positive integer"),
        ({"page_size": 2.0}, r"page_size 2\.0 is not a positive integer"),
        ({"max_running": True}, "max_running True is not a positive integer"),
        ({"max_chunk_tokens": 0}, "max_chunk_tokens 0 is not a positive integer"),
        ({"vocab_size": (1 << 31) + 1}, "vocab_size 2147483649 is more than int32 token ids can tell apart"),
        ({"op_deadline": -1}, "op_deadline -1 is not a duration"),
        ({"growth_horizon": 1.5}, r"growth_horizon 1\.5 is not a number of tokens"),
        ({"prefix_cache": 1}, "prefix_cache 1 is neither true nor false"),
        ({"max_running": 1 << 40}, "max_running 1099511627776 is more than"),
        ({"pipeline_depth": 3}, "pipeline_depth 3 must be 0 to 2"),
        ({"pipeline_depth": True}, "pipeline_depth True must be"),
        ({"policy": "luck"}, "policy 'luck' is unknown: choose one of .*fcfs"),
        ({"policy": None}, "policy None is unknown"),
        ({"pages": 8}, "unknown configuration field 'pages': known are num_pages, .*growth_horizon$"),
    ],
)
def test_a_configuration_that_is_none_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Config.from_dict({**LIMITS, **changes})


def test_a_configuration_without_a_field_it_must_have_is_incomplete() -> None:
    with pytest.raises(ConfigError, match="incomplete configuration.*max_model_len"):
        Config.from_dict({name: value for name, value in LIMITS.items() if name != "max_model_len"})


def test_a_configuration_is_what_its_fields_say() -> None:
    config = Config(**LIMITS, vocab_size=1 << 31)
    assert Config.from_dict(config.as_dict()) == config


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"rid": "\ud800"}, "the request cannot be written down"),
        ({"tenant": "\ud800"}, "the request cannot be written down"),
        ({"params": SamplingParams(temperature=float("nan"))}, "the request cannot be written down: .*temperature nan"),
        ({"want": ["logprobs"]}, r"want is \['logprobs'\], it must be a mapping"),
        ({"want": {"logprobs": 21}}, "logprobs is 21, it must be 0 to 20"),
        ({"want": {"logprobs": True}}, "logprobs is True, it must be"),
        ({"want": {"hidden": 1}}, "want 'hidden' is not supported"),
    ],
)
def test_a_request_that_no_engine_can_take_is_refused_and_leaves_nothing(fields: dict[str, Any], says: str) -> None:
    state = State(Config(**LIMITS))
    effects = step(state, Admit(**{"t": 0, "rid": "a", "prompt": [1, 2], **fields}))
    (output,) = effects.outputs
    assert output.finish_reason is FinishReason.ERROR and output.error is not None
    assert output.error["code"] == "invalid"
    assert re.search(says, output.error["text"])
    assert not state.live and not state.waiting


def test_so_many_pages_hold_so_many_tokens() -> None:
    assert [demand(tokens, 4) for tokens in (1, 3, 4, 5, 8, 9)] == [1, 1, 1, 2, 2, 3]
    assert [demand(tokens, 1) for tokens in (1, 2, 7)] == [1, 2, 7]
