"""Sleep, wake and other weights under a running engine with a real (tiny) model: the same tokens, or the new ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from leftfold.attaching import Delivery
from leftfold.events import Call, Event, SamplingParams, Sleep, UpdateWeights, Wake
from leftfold.fsm import Ack
from leftfold.llm import LLM
from tests import tiny_models
from tests.tiny_folder import VOCAB_SIZE, write_tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SCORED: Any = {"logprobs": 2, "prompt_logprobs": 1, "use_tqdm": False}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        for kind in ("text", "other text"):  # the length of the name is the seed
            patch.setitem(tiny_models.KINDS, kind, ("Llama", {"vocab_size": VOCAB_SIZE}))
            tiny_models.make(kind, root / kind)
    return {kind: write_tokenizer(root / kind) for kind in ("text", "other text")}


class Operated(LLM):
    """An LLM with somebody who makes control calls."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.acks: SimpleQueue[Ack] = SimpleQueue()
        super().__init__(str(folder), kv_tokens=1024, max_model_len=256, threads=1, device="cpu", **options)

    def _deliver(self, effects: Delivery) -> None:
        super()._deliver(effects)
        for ack in effects.acks:
            self.acks.put(ack)

    def call(self, kind: type[Event], **fields: Any) -> Ack:
        self.engine.submit(kind, call="c", **fields)
        return self.acks.get(timeout=60)


@pytest.fixture(params=[0, 2])
def llm(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Iterator[Operated]:
    with Operated(folders["text"], pipeline_depth=request.param, max_chunk_tokens=16) as made:
        yield made


def test_a_stream_goes_on_after_a_sleep_with_the_same_tokens_and_scores(llm: Operated) -> None:
    whole = llm.generate("a prompt of several chunks", GREEDY, **SCORED)[0]
    for tags in (("kv",), ("weights",), ("weights", "kv")):
        stream = llm.stream("a prompt of several chunks", GREEDY, logprobs=2, prompt_logprobs=1)
        pieces = [next(stream)]
        ack = llm.call(Sleep, tags=tags)
        assert ack.ok and ack.info["freed_bytes"] > 0
        assert llm.call(Wake, tags=tags).ok
        *more, answer = stream
        assert answer == whole
        assert "".join(map(str, pieces + more)) == whole.text


def test_a_wrong_source_is_the_calls_answer_and_nothing_else(llm: Operated, tmp_path: Path) -> None:
    whole = llm.generate("abc", GREEDY, **SCORED)[0]
    ack = llm.call(UpdateWeights, source=str(tmp_path / "nowhere"), version="2")
    assert not ack.ok and "there is no model at" in ack.info
    assert llm.generate("abc", GREEDY, **SCORED)[0] == whole
    unknown = llm.call(Call, verb="dance", args={})
    assert not unknown.ok and "'dance' is unknown; there are: sleep, wake" in unknown.info


def test_new_weights_answer_and_the_old_ones_can_come_back(llm: Operated, folders: dict[str, Path]) -> None:
    with Operated(folders["other text"]) as other:
        new = other.generate("abc", GREEDY, **SCORED)[0]
    old = llm.generate("abc", GREEDY, **SCORED)[0]
    assert llm.call(UpdateWeights, source=str(folders["other text"]), version="2").ok
    assert llm.generate("abc", GREEDY, **SCORED)[0] == new
    assert llm.call(Sleep, tags=("weights", "kv")).ok and llm.call(Wake, tags=("weights", "kv")).ok
    assert llm.generate("abc", GREEDY, **SCORED)[0] == new
    assert llm.call(UpdateWeights, source=str(folders["text"]), version="3").ok
    assert llm.generate("abc", GREEDY, **SCORED)[0] == old
