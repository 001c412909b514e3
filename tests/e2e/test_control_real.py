"""`leftfold serve` under control: a real model is paused, put to sleep and given other weights, and says the same."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from leftfold.events import EventLog
from leftfold.replay.verify import verify
from tests import tiny_models
from tests.e2e.servers import PATIENCE, ServerProcess, free_port
from tests.tiny_folder import VOCAB_SIZE, write_tokenizer

COMMAND = [sys.executable, "-c", "import sys; from leftfold.cli import main; sys.exit(main())"]
ADMIN = {"Authorization": "Bearer boss"}
PROMPTS = [f"prompt number {i}, " + "and so on " * i for i in range(6)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two folders with models of one shape and different weights."""
    folders = [tmp_path_factory.mktemp("models") / name for name in ("one", "two")]
    torch.set_num_threads(1)
    for folder, kind in zip(folders, ("text", "other-text"), strict=True):  # the length of the name is the seed
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(tiny_models.KINDS, kind, ("Llama", {"vocab_size": VOCAB_SIZE}))
            tiny_models.make(kind, folder)
        write_tokenizer(folder)
    return folders


def start(model: Path, log: Path, *arguments: str) -> ServerProcess:
    port = free_port()
    flags = ["--port", str(port), "--threads", "1", "--kv-tokens", "4096", "--log-dir", str(log)]
    command = [*COMMAND, "serve", str(model), *flags, "--admin-api-key", "boss", *arguments]
    return ServerProcess(command, port, log.parent / f"{log.name}.stderr", None)


async def texts(client: httpx.AsyncClient, max_tokens: int = 120) -> list[str]:
    async def ask(prompt: str) -> str:
        body = {"prompt": prompt, "max_tokens": max_tokens, "seed": 5, "ignore_eos": True}
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    return await asyncio.gather(*(ask(prompt) for prompt in PROMPTS))


async def control(client: httpx.AsyncClient, path: str, **request: Any) -> Any:
    answer = await client.post(path, headers=ADMIN, **request)
    assert answer.status_code == 200, answer.text
    return answer.json()["info"]


@pytest.mark.parametrize("depth", ["0", "1"])
def test_the_same_prompts_give_the_same_text_whatever_is_done_to_the_engine(
    models: list[Path], tmp_path: Path, depth: str
) -> None:
    async def scenario(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
            alone = await texts(client)

            async def disturbed(*calls: str) -> None:
                asked = asyncio.create_task(texts(client))
                while not (await client.get("/load")).json()["num_requests_running"]:
                    assert not asked.done()
                for call in calls:
                    await control(client, call)
                assert await asked == alone, calls

            await disturbed("/pause?mode=keep", "/resume")
            await disturbed("/pause?mode=wait", "/resume")
            await disturbed("/sleep?level=1", "/wake_up")
            await disturbed("/flush_cache", "/sleep?level=2", "/wake_up?tags=weights", "/wake_up?tags=kv")
            await disturbed("/pause?mode=keep", "/sleep?level=2", "/wake_up", "/resume")
            await control(client, "/update_weights", json={"source": str(models[1]), "version": "two"})
            other = await texts(client)
            assert all(a != b for a, b in zip(alone, other, strict=True))
            await control(client, "/sleep?level=2")
            await control(client, "/wake_up")
            assert await texts(client) == other
            wrong = await client.post("/update_weights", headers=ADMIN, json={"source": "/nowhere", "version": "three"})
            assert wrong.status_code == 409 and "nowhere" in wrong.json()["error"]["message"]
            assert await texts(client) == other
            await control(client, "/update_weights", json={"source": str(models[0]), "version": "one"})
            assert await texts(client) == alone
            assert (await client.post("/resume")).status_code == 401

    log = tmp_path / "log"
    with start(models[0], log, "--pipeline-depth", depth) as server:
        server.wait_until_ready()
        asyncio.run(scenario(server.url))
        assert server.interrupt() == 0
        assert "Traceback" not in server.stderr
    verdict = verify(EventLog.read(log))
    assert verdict.clean, verdict.describe()
