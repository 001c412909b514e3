"""Quantized on a CPU: tokens do not depend on the batch, on chunks, preemption, cache hits or the page size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from leftfold.bench.determinism import answers, crowds, requests
from tests import tiny_models


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_tokens_are_the_same_alone_and_in_any_crowd(tmp_path: Path, quantization: str) -> None:
    tiny_models.make("llama", tmp_path)
    asked = requests(48, 199)
    common: dict[str, Any] = {"model": str(tmp_path), "max_model_len": 192, "quantization": quantization}
    expected, _ = answers(asked, {**common, "kv_tokens": 256, "prefix_cache": False}, alone=True)
    assert all(len(one) == params.max_tokens for one, (_, params) in zip(expected, asked, strict=True))
    preemptions = []
    for crowd in crowds(3):
        tokens, preempted = answers(asked, {**common, **crowd})
        assert tokens == expected, crowd
        preemptions.append(preempted)
    assert max(preemptions) > 0  # so the pools were small enough
