"""Logits and greedy tokens of the torch executor against transformers, both in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from leftfold.events import SamplingParams
from leftfold.executor.torch_executor import TorchExecutor
from tests.plan_stream import Driver, PlanStream, generate, joined
from tests.tiny_models import KINDS, make

PAGES, PAGE = 64, 4


@pytest.fixture(scope="module", params=sorted(KINDS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp(request.param)
    reference = make(request.param, folder)
    return reference, open_executor(folder)


def open_executor(folder: Path, **fields) -> TorchExecutor:
    return TorchExecutor(folder, num_pages=PAGES, page_size=PAGE, max_model_len=256, **fields)


def greedy(reference: transformers.PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """The reference's greedy continuation, recomputed in full for every token."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(reference(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 199, length).tolist()


@pytest.mark.parametrize("chunk", [1000, 7, 1])
def test_logits_at_every_position_match(pair, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    reference, executor = pair
    executor.reset()
    prompt, stream = prompt_of(70), PlanStream()
    hidden: list[torch.Tensor] = []
    forward = executor.model.forward
    monkeypatch.setattr(executor.model, "forward", lambda *given: hidden.append(forward(*given)) or hidden[-1])
    for start in range(0, len(prompt), chunk):
        tokens = prompt[start : start + chunk]
        joins = [joined(0, prompt, range(20))] if start == 0 else []
        plan = stream.plan(joined=joins, chunks=[(0, len(tokens), False)], chunk_tokens=[tokens])
        assert executor.execute(plan).error is None
    with torch.inference_mode():
        wanted = reference(torch.tensor([prompt])).logits[0]
        got = executor.model.logits(torch.cat(hidden))
    assert got.shape == wanted.shape
    assert torch.allclose(got, wanted, atol=2e-4, rtol=1e-4), (got - wanted).abs().max()


@pytest.mark.parametrize("length", [1, 5, 33])
def test_greedy_tokens_match(pair, length: int) -> None:
    reference, executor = pair
    prompt = prompt_of(length, seed=length)
    assert generate(executor, prompt, 24, num_pages=PAGES, page_size=PAGE, chunk=9) == greedy(reference, prompt, 24)


def test_greedy_tokens_match_in_a_mixed_batch_with_preemption(pair) -> None:
    reference, executor = pair
    executor.reset()
    driver = Driver(executor, PAGES, PAGE, chunk=6)
    rows = [driver.add(slot, prompt_of(4 + 9 * slot, seed=slot), 8 + slot) for slot in (2, 0, 1)]
    for _ in range(5):
        assert driver.step().error is None
    driver.preempt(rows[1])
    late = driver.add(3, prompt_of(11, seed=9), 6)
    driver.run()
    for row in [*rows, late]:
        prompt, got = row.tokens[: row.prompt_len], row.tokens[row.prompt_len :]
        assert got == greedy(reference, prompt, row.max_tokens)


def test_a_model_in_shards_gives_the_same(tmp_path: Path) -> None:
    make("llama", tmp_path / "whole")
    make("llama", tmp_path / "parts", shard="100KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 2
    one, two = open_executor(tmp_path / "whole"), open_executor(tmp_path / "parts")
    prompt = prompt_of(12)
    assert generate(one, prompt, 20, num_pages=PAGES, page_size=PAGE) == generate(
        two, prompt, 20, num_pages=PAGES, page_size=PAGE
    )


def test_reference_kernels_give_the_same_greedy_tokens(tmp_path: Path) -> None:
    reference = make("qwen3", tmp_path)
    plain = open_executor(tmp_path, kernels={"attention": "reference", "linear": "reference"})
    prompt = prompt_of(40)
    assert generate(plain, prompt, 12, num_pages=PAGES, page_size=PAGE, chunk=16) == greedy(reference, prompt, 12)


def test_bfloat16_runs_close_to_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make("llama", tmp_path)
    seen: list[torch.Tensor] = []
    for dtype in ("float32", "bfloat16"):
        executor = open_executor(tmp_path, dtype=dtype)
        whole = executor.model.logits
        monkeypatch.setattr(executor.model, "logits", lambda hidden, f=whole: seen.append(f(hidden)) or seen[-1])
        generate(executor, prompt_of(20), 1, num_pages=PAGES, page_size=PAGE)
    assert torch.nn.functional.cosine_similarity(seen[0][0], seen[1][0], dim=0) > 0.98
    assert not torch.equal(seen[0], seen[1])


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.9, top_p=0.9, seed=11),
        SamplingParams(temperature=1.3, top_k=20, min_p=0.02, seed=5, frequency_penalty=0.4),
    ],
)
def test_tokens_do_not_depend_on_chunks_neighbours_preemption_or_page_size(pair, params: SamplingParams) -> None:
    _, executor = pair
    alone = generate(executor, prompt_of(30), 20, num_pages=PAGES, page_size=PAGE, params=params)
    for chunk in (1, 5, 16):
        assert (
            generate(executor, prompt_of(30), 20, num_pages=PAGES, page_size=PAGE, chunk=chunk, params=params) == alone
        )
    executor.reset()
    driver = Driver(executor, PAGES, PAGE, chunk=7)
    row = driver.add(5, prompt_of(30), 20, params)
    for slot in range(4):
        driver.add(slot, prompt_of(3 + 8 * slot, seed=slot), 6 + slot, params)
    for _ in range(12):
        driver.step()
    driver.preempt(row)
    driver.run()
    assert row.tokens[30:] == alone
