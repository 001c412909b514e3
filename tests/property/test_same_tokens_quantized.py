"""Quantized on a CPU: tokens do not depend on the batch, on chunks, preemption, cache hits or the page size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leftfold.attaching import Delivery
from leftfold.builder import build_engine
from leftfold.events import Admit, SamplingParams
from leftfold.options import EngineOptions
from tests import tiny_models

REQUESTS = 48


def requests(count: int, vocabulary: int) -> list[tuple[list[int], SamplingParams]]:
    """Greedy and seeded, some with penalties, a third of them with a prefix in common."""
    random = np.random.default_rng(7)
    shared = random.integers(3, vocabulary, 40).tolist()
    found = []
    for index in range(count):
        prompt = (shared if index % 3 == 0 else []) + random.integers(3, vocabulary, random.integers(2, 60)).tolist()
        drawn: dict[str, Any] = {"temperature": 0.9, "seed": index, "top_p": 0.9} if index % 2 else {"temperature": 0.0}
        if index % 5 == 0:
            drawn |= {"repetition_penalty": 1.1, "frequency_penalty": 0.2}
        found.append((prompt, SamplingParams(max_tokens=int(random.integers(4, 20)), ignore_eos=True, **drawn)))
    return found


def answers(asked: list[tuple[list[int], SamplingParams]], alone: bool, **options: Any) -> tuple[list[list[int]], int]:
    """Tokens of each request, and how many preemptions it took; `alone`: one after the other."""
    tokens: list[list[int]] = [[] for _ in asked]
    left = list(range(len(asked)))

    def submit(index: int) -> None:
        prompt, params = asked[index]
        engine.submit(Admit, rid=str(index), prompt=prompt, params=params)

    def deliver(delivery: Delivery) -> None:
        for output in delivery.outputs:
            assert output.error is None
            tokens[int(output.rid)].extend(output.tokens)
            if output.finish_reason is not None:
                left.remove(int(output.rid))
                if alone and left:
                    submit(left[0])
        if not left:
            engine.stop()

    engine = build_engine(EngineOptions(durability="off", device="cpu", quantization="int8", **options), deliver)
    engine.start()
    for index in left[:1] if alone else list(left):
        submit(index)
    engine.run()
    return tokens, int(engine.stats()["preemptions"])


@pytest.mark.slow
def test_tokens_are_the_same_alone_and_in_any_crowd(tmp_path: Path) -> None:
    tiny_models.make("llama", tmp_path)
    asked = requests(REQUESTS, 199)
    common: dict[str, Any] = {"model": str(tmp_path), "max_model_len": 128}
    expected, _ = answers(asked, alone=True, kv_tokens=256, prefix_cache=False, **common)
    assert all(len(one) == params.max_tokens for one, (_, params) in zip(expected, asked, strict=True))
    crowds: list[dict[str, Any]] = [
        {"kv_tokens": 256, "max_num_seqs": 16, "max_num_batched_tokens": 48, "max_chunk_tokens": 7},
        {"kv_tokens": 4096, "max_num_seqs": 48, "max_num_batched_tokens": 200, "page_size": 5},
        {"kv_tokens": 200, "max_num_seqs": 9, "max_num_batched_tokens": 23, "prefix_cache": False, "page_size": 8},
    ]
    preemptions = []
    for crowd in crowds:
        tokens, preempted = answers(asked, alone=False, **common, **crowd)
        assert tokens == expected, crowd
        preemptions.append(preempted)
    assert max(preemptions) > 0  # so the pools were small enough
