"""The default model, from its GGUF file, against transformers with the same dequantized weights in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from leftfold import hub
from leftfold.events import Control
from leftfold.executor.memory import resident_bytes
from leftfold.executor.torch_executor import TorchExecutor
from leftfold.executor.weights import load
from tests.plan_stream import Driver, PlanStream, generate

pytestmark = pytest.mark.slow

# "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
FRANCE = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
PAGES, PAGE = 96, 16


@pytest.fixture(scope="module")
def file() -> Path:
    return hub.resolve("smollm2", progress=False).path


@pytest.fixture(scope="module")
def executor(file: Path) -> TorchExecutor:
    return TorchExecutor(file, num_pages=PAGES, page_size=PAGE, max_model_len=1024)


@pytest.fixture(scope="module")
def reference(file: Path) -> transformers.LlamaForCausalLM:
    """Built from the GGUF by transformers' own conversion, so that names and permutations are checked as well."""
    config = transformers.AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    model = transformers.LlamaForCausalLM(config)
    read = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model, torch_dtype=torch.float32)
    missing, unexpected = model.load_state_dict(read["tensors"], strict=False)
    assert (set(missing) <= {"lm_head.weight"}, unexpected) == (True, [])
    return model.eval()


def test_weights_equal_those_that_transformers_reads(file: Path, reference: transformers.LlamaForCausalLM) -> None:
    ours = load(file)
    for name, weight in reference.named_parameters():
        if not name.startswith("model.layers.") or ".layers.7." in name:
            assert torch.equal(ours.get(name), weight), name


def test_greedy_tokens_and_logits_match(executor: TorchExecutor, reference: transformers.LlamaForCausalLM) -> None:
    got = generate(executor, FRANCE, 24, num_pages=PAGES, page_size=PAGE, chunk=7)
    with torch.inference_mode():
        logits = reference(torch.tensor([FRANCE + got])).logits[0]
    assert got == logits[len(FRANCE) - 1 : -1].argmax(-1).tolist()


def test_rows_are_bitwise_equal_alone_and_in_a_batch(executor: TorchExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of one request: alone in one chunk, and in pieces among 20 others."""
    last: list[torch.Tensor] = []
    whole = executor.model.logits
    monkeypatch.setattr(executor.model, "logits", lambda hidden: last.append(whole(hidden)) or last[-1].clone())
    long = (FRANCE * 6)[:90]
    alone = generate(executor, long, 6, num_pages=PAGES, page_size=PAGE)
    expected = [logits[0] for logits in last]
    last.clear()
    executor.reset()
    driver = Driver(executor, PAGES, PAGE, chunk=32)
    row = driver.add(0, long, 6)
    for slot in range(1, 21):
        driver.add(slot, FRANCE[: 3 + slot % 13], 12)
    seen = []
    while row in driver.rows:
        before = len(row.tokens)
        order = [r for r in driver.rows if r.present and len(r.tokens) - r.computed == 1]
        driver.step()
        if len(row.tokens) > before:
            sampled = order if row in order else [*order, row]
            seen.append(last[-1][sampled.index(row)])
    driver.run()
    assert row.tokens[90:] == alone
    assert all(torch.equal(one, two) for one, two in zip(seen, expected, strict=True))


def test_sleep_gives_the_memory_back_and_wake_the_same_tokens(executor: TorchExecutor) -> None:
    expected = generate(executor, FRANCE, 8, num_pages=PAGES, page_size=PAGE)
    executor.reset()
    stream, weights, kv = PlanStream(), executor.model.nbytes, executor.memory.nbytes
    assert weights > 500 << 20  # 135 million parameters of 4 bytes

    def call(verb: str) -> int:
        """Resident bytes after the verb."""
        ops = (Control(op=1, verb=verb, args={"tags": ["weights", "kv"]}),)
        ((_, _, error),) = executor.execute(stream.plan(ops=ops)).controls
        assert error is None
        return resident_bytes()

    awake = resident_bytes()
    asleep = call("sleep")
    assert awake - asleep > 0.95 * weights + 0.9 * kv
    again = call("wake")
    assert again - asleep > 0.8 * weights
    assert again - awake < 0.2 * weights  # it may be less: what tests before left was given back, too
    assert generate(executor, FRANCE, 8, num_pages=PAGES, page_size=PAGE) == expected
