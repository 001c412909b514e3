"""`leftfold serve` as users start it: a tiny random model made here, and the default model; log, replay and all."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from leftfold.events import EventLog
from leftfold.hub import resolve
from leftfold.replay.verify import verify
from tests import tiny_models
from tests.e2e.chats import COUNT, all_at_once, one_by_one
from tests.e2e.servers import PATIENCE, ROOT, ServerProcess, free_port
from tests.tiny_folder import VOCAB_SIZE, write_tokenizer

COMMAND = [sys.executable, "-c", "import sys; from leftfold.cli import main; sys.exit(main())"]
FRANCE: Any = [{"role": "user", "content": "What is the capital of France?"}]


def start(folder: Path, *arguments: str) -> ServerProcess:
    port = free_port()
    command = [*COMMAND, "serve", *arguments, "--port", str(port), "--threads", "2", "--log-dir", str(folder / "log")]
    return ServerProcess(command, port, folder / "stderr.txt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny_models.KINDS, "text", ("Llama", {"vocab_size": VOCAB_SIZE}))
        torch.set_num_threads(1)
        tiny_models.make("text", path)
    return write_tokenizer(path)


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Iterator[ServerProcess]:
    with start(folder, str(folder), "--kv-tokens", "16384", "--disable-access-log") as server:
        yield server.wait_until_ready()


def client_of(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=PATIENCE)


@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 5}, {"seed": 5, "top_p": 0.8, "n": 2}])
def test_the_same_request_gives_the_same_text_streamed_or_whole(tiny: ServerProcess, options: Any) -> None:
    client = client_of(tiny)
    asked = {"model": "tiny", "messages": FRANCE, "max_tokens": 30, **options}
    whole = client.chat.completions.create(**asked)
    texts = [""] * len(whole.choices)
    for chunk in client.chat.completions.create(**asked, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    if options.get("n"):
        first = client.chat.completions.create(**{**asked, "n": 1}).choices[0].message.content
        assert first == texts[0] != texts[1]


def test_parameters_reach_the_model(tiny: ServerProcess) -> None:
    client = client_of(tiny)
    ids = httpx.post(f"{tiny.url}/tokenize", json={"prompt": "Z"}).json()["tokens"]
    biased = client.completions.create(model="tiny", prompt="ab", max_tokens=5, logit_bias={str(ids[0]): 100})
    assert biased.choices[0].text == "ZZZZZ"
    stop = client.completions.create(
        model="tiny", prompt="ab", max_tokens=5, logit_bias={str(ids[0]): 100}, extra_body={"stop_token_ids": ids}
    )
    assert (stop.choices[0].text, stop.choices[0].finish_reason) == ("", "stop")
    assert stop.usage is not None and stop.usage.completion_tokens == 1


def test_a_third_of_64_clients_hangs_up(tiny: ServerProcess) -> None:
    answers = asyncio.run(all_at_once(tiny.url, tokens=40))
    gauges = tiny.wait_until_idle()
    assert gauges['leftfold:kv_pages{use="free"}'] + gauges['leftfold:kv_pages{use="cached"}'] == 1024
    staying = [i for i in range(COUNT) if i % 3]
    assert {i: answers[i] for i in staying} == asyncio.run(one_by_one(tiny.url, staying, tokens=40))
    assert "Traceback" not in tiny.stderr


def test_a_second_engine_on_the_same_log_is_one_line_and_code_2(tiny: ServerProcess, folder: Path) -> None:
    second = [*COMMAND, "serve", str(folder), "--port", "0", "--log-dir", str(folder / "log")]
    done = subprocess.run(second, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "log is in use" in line


def test_a_stopped_server_leaves_a_log_that_replays_and_goes_on_with_it(folder: Path, tmp_path: Path) -> None:
    for count in (1, 2):
        with start(tmp_path, str(folder)) as server:
            server.wait_until_ready()
            client = client_of(server)
            client.completions.create(model="tiny", prompt="ab", max_tokens=5, extra_body={"ignore_eos": True})
            assert server.interrupt() == 0
        verdict = verify(EventLog.read(tmp_path / "log"))
        assert verdict.divergence is None
        assert verdict.tokens == 5 * count


@pytest.mark.parametrize(("arguments", "words"), [
    (["--kv-tokens", "8"], "less than one page"),
    (["--max-model-len", "100000"], "--max-model-len 100000"),
])  # fmt: skip
def test_options_that_cannot_be_met_are_one_line_and_code_2(
    folder: Path, tmp_path: Path, arguments: list[str], words: str
) -> None:
    with start(tmp_path, str(folder), *arguments) as server:
        assert server.process.wait(timeout=PATIENCE) == 2
        (line,) = server.stderr.splitlines()
        assert words in line and line.startswith("leftfold: ")
    assert not (tmp_path / "log").exists()


def test_an_unreadable_gguf_is_one_line_and_code_2(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF, or is it?" * 10)
    with start(tmp_path, str(broken)) as server:
        assert server.process.wait(timeout=PATIENCE) == 2
        (line,) = server.stderr.splitlines()
        assert "broken.gguf" in line
    assert not (tmp_path / "log").exists()


@pytest.mark.slow
def test_the_default_model_knows_the_capital_of_france(tmp_path: Path) -> None:
    resolve(progress=False)  # so that the server need not fetch it against the clock
    with start(tmp_path) as server:
        client = client_of(server.wait_until_ready())
        asked: dict[str, Any] = {"model": "smollm2", "messages": FRANCE, "temperature": 0}
        whole = client.chat.completions.create(**asked)
        text = whole.choices[0].message.content or ""
        stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        chunks = list(stream)
        assert "Paris" in text and whole.choices[0].finish_reason == "stop"
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
        assert whole.usage is not None and chunks[-1].usage is not None
        prompt = httpx.post(f"{server.url}/tokenize", json={"messages": FRANCE}).json()
        answer = httpx.post(f"{server.url}/tokenize", json={"prompt": text}).json()
        for usage in (whole.usage, chunks[-1].usage):
            assert usage.prompt_tokens == prompt["count"]
            assert usage.completion_tokens == answer["count"] + 1  # and the token that ended it
        assert server.interrupt() == 0
        replay = [*COMMAND, "replay", "verify", str(tmp_path / "log"), "--json"]
        done = subprocess.run(replay, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["divergence"] is None


def resident_of_engine(server: ServerProcess) -> int:
    """Bytes of main memory of the server's largest child, which is the engine."""
    tasks = Path(f"/proc/{server.process.pid}/task").glob("*/children")
    children = [child for task in tasks for child in task.read_text().split()]
    pages = [int(Path(f"/proc/{child}/statm").read_text().split()[1]) for child in children]
    return max(pages) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_the_default_model_sleeps_and_wakes_as_it_was(tmp_path: Path) -> None:
    resolve(progress=False)  # so that the server need not fetch it against the clock
    with start(tmp_path, "--kv-tokens", "8192") as server:
        client = client_of(server.wait_until_ready())

        def ask() -> Any:
            answer = client.completions.create(
                model="smollm2", prompt="The capital of France is", max_tokens=6, temperature=0, logprobs=2, echo=True
            )
            return answer.choices[0]

        before, awake = ask(), resident_of_engine(server)
        assert "Paris" in before.text and before.logprobs.tokens[:3] == ["The", " capital", " of"]
        best = max(before.logprobs.top_logprobs[5], key=before.logprobs.top_logprobs[5].get)
        assert best == before.logprobs.tokens[5]  # greedy
        assert httpx.post(f"{server.url}/sleep?level=2", timeout=PATIENCE).status_code == 200
        assert awake - resident_of_engine(server) > 130 << 20  # 135 million weights of a byte
        assert httpx.post(f"{server.url}/wake_up", timeout=PATIENCE).status_code == 200
        assert ask() == before
        assert server.interrupt() == 0
    verdict = verify(EventLog.read(tmp_path / "log"))
    assert verdict.divergence is None
