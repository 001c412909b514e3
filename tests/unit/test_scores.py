"""Scores beside tokens: whose they are, what they are, and that neither chunks nor neighbours change a bit of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from leftfold.events import SamplingParams
from leftfold.executor.base import Executor, Score
from leftfold.executor.oracle import OracleExecutor, expected_scores
from leftfold.executor.torch_executor import TorchExecutor
from tests.plan_stream import Driver, PlanStream, joined
from tests.tiny_models import make

PAGES, PAGE, VOCAB = 40, 4, 199
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9]
ALL = {"logprobs": 3, "logprobs_from": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    torch.set_num_threads(1)
    make("llama", path)
    return path


@pytest.fixture(scope="module", params=["oracle", "torch"])
def executor(request: pytest.FixtureRequest, folder: Path) -> Executor:
    if request.param == "oracle":
        return OracleExecutor(PAGES, PAGE, VOCAB)
    return TorchExecutor(folder, num_pages=PAGES, page_size=PAGE, max_model_len=96, max_running=8)


def scores(driver: Driver, rid: str) -> list[Score]:
    """Everything that is said beside the tokens of `rid` until all rows have ended."""
    said: list[Score] = []
    while driver.rows:
        result = driver.step()
        assert result.error is None, result.error
        for attachment in result.attachments:
            if attachment.rid == rid:
                assert (attachment.epoch, attachment.choice) == (0, 0)
                said += attachment.scores
    return said


def alone(executor: Executor, want: Any, *, chunk: int = 1 << 30, count: int = 5, **params: Any) -> Any:
    executor.reset()
    driver = Driver(executor, PAGES, PAGE, chunk)
    row = driver.add(0, PROMPT, count, SamplingParams(**{"temperature": 0.0, **params}), want)
    return scores(driver, "r0"), row.tokens


def test_who_does_not_ask_gets_nothing(executor: Executor) -> None:
    assert alone(executor, None)[0] == alone(executor, {})[0] == []


def test_tokens_are_the_same_with_and_without_scores(executor: Executor) -> None:
    for params in ({}, {"temperature": 1.0, "seed": 5, "top_k": 9}):
        assert alone(executor, ALL, **params)[1] == alone(executor, None, **params)[1]


@pytest.mark.parametrize(("want", "positions"), [
    ({"logprobs": 0}, range(13, 18)),
    ({"logprobs": 2, "logprobs_from": 0}, range(1, 18)),
    ({"logprobs": 2, "logprobs_from": 4}, range(4, 18)),
    ({"logprobs_from": 10}, range(10, 13)),
    ({"logprobs_from": 50}, range(0)),
])  # fmt: skip
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_positions_are_those_asked_for_each_once(executor: Executor, want: Any, positions: range, chunk: int) -> None:
    said, tokens = alone(executor, want, chunk=chunk)
    assert [score.position for score in said] == list(positions)
    assert [score.token for score in said] == [tokens[at] for at in positions]
    assert {len(score.top) for score in said} <= {want.get("logprobs", 0)}


def test_chunks_change_nothing(executor: Executor) -> None:
    whole = alone(executor, ALL)
    assert all(alone(executor, ALL, chunk=chunk) == whole for chunk in (1, 3, 4, 7))


def test_a_row_that_computes_its_prompt_again_says_the_same_again(executor: Executor) -> None:
    expected, _ = alone(executor, ALL)
    executor.reset()
    driver = Driver(executor, PAGES, PAGE, chunk=4)
    row = driver.add(0, PROMPT, 5, want=ALL)
    said: list[Score] = []
    for step in range(40):
        if step in (2, 7):  # in its prompt, and among its own tokens
            driver.preempt(row)
        said += [score for attachment in driver.step().attachments for score in attachment.scores]
        if not driver.rows:
            break
    assert set(said) == set(expected)
    assert [score for score in said if score.position >= len(PROMPT)] == expected[len(PROMPT) - 1 :]


def test_neighbours_change_no_bit(executor: Executor) -> None:
    expected, _ = alone(executor, ALL)
    executor.reset()
    driver = Driver(executor, PAGES, PAGE, chunk=5)
    for slot in range(1, 5):
        driver.add(slot, PROMPT[slot:], 6, want={"logprobs": 20, "logprobs_from": slot} if slot % 2 else None)
    driver.add(0, PROMPT, 5, want=ALL)
    assert scores(driver, "r0") == expected


def test_a_failed_step_says_nothing(executor: Executor) -> None:
    stream = PlanStream()
    executor.reset()
    executor.fail_next("no")  # type: ignore[attr-defined]
    row = joined(0, PROMPT, [0, 1, 2, 3], want=ALL)
    result = executor.execute(stream.plan(joined=[row], chunks=[(0, 13, True)], chunk_tokens=[PROMPT]))
    assert result.error is not None and result.attachments == ()
    stream.failed()
    again = executor.execute(stream.plan(chunks=[(0, 13, True)], chunk_tokens=[PROMPT]))
    assert [score.position for attachment in again.attachments for score in attachment.scores] == list(range(1, 14))


def test_the_oracle_says_what_is_expected() -> None:
    said, tokens = alone(OracleExecutor(PAGES, PAGE, VOCAB), ALL, chunk=4)
    assert said == expected_scores(tokens, 1, 3, VOCAB)
    assert len({score.logprob for score in said}) > len(said) / 2


@pytest.mark.parametrize("params", [
    {}, {"temperature": 0.7, "top_k": 3, "top_p": 0.8, "seed": 1}, {"repetition_penalty": 1.9, "logit_bias": {7: 4.0}},
])  # fmt: skip
def test_values_are_those_of_the_models_scores_before_anything_is_done_to_them(folder: Path, params: Any) -> None:
    import transformers

    executor = TorchExecutor(folder, num_pages=PAGES, page_size=PAGE, max_model_len=96)
    said, tokens = alone(executor, ALL, chunk=6, **params)
    reference = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0].log_softmax(-1)
    for score in said:
        row = expected[score.position - 1]
        assert score.logprob == pytest.approx(float(row[score.token]), abs=2e-4)
        best = row.topk(3)
        assert [token for token, _ in score.top] == best.indices.tolist()
        assert [value for _, value in score.top] == pytest.approx(best.values.tolist(), abs=2e-4)


def test_equal_alternatives_come_by_id(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = TorchExecutor(folder, num_pages=PAGES, page_size=PAGE, max_model_len=96)
    monkeypatch.setattr(executor.model, "logits", lambda hidden: torch.zeros(len(hidden), VOCAB))
    said, _ = alone(executor, {"logprobs": 20}, count=1)
    ids = [token for token, _ in said[0].top]
    assert ids == sorted(ids) and len(set(ids)) == 20


def test_prompt_scores_that_are_not_finite_name_their_row(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor, stream = TorchExecutor(folder, num_pages=PAGES, page_size=PAGE, max_model_len=96), PlanStream()
    monkeypatch.setattr(executor.model, "logits", lambda hidden: torch.full((len(hidden), VOCAB), float("nan")))
    rows = [joined(0, [1, 2], [0]), joined(1, [1, 2, 3], [1], want=ALL)]
    chunks = [(0, 1, False), (1, 2, False)]
    result = executor.execute(stream.plan(joined=rows, chunks=chunks, chunk_tokens=[[1], [1, 2]]))
    assert result.error is not None and (result.error["retry"], result.error["rows"]) == (True, (1,))
