"""64 concurrent chats, a third of whose clients hang up: the others get what they get alone, all is given back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.servers import PATIENCE, ServerProcess
from tests.tiny_folder import write_tokenizer

COUNT = 64


def body(i: int, **more: Any) -> dict[str, Any]:
    content = f"chat number {i}: " + "tell me more. " * (i % 7)
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 150 + i, "temperature": 0, **more}


async def whole(client: httpx.AsyncClient, i: int) -> str:
    answer = await client.post("/v1/chat/completions", json=body(i))
    assert answer.status_code == 200
    return str(answer.json()["choices"][0]["message"]["content"])


async def streamed(client: httpx.AsyncClient, i: int, frames: int | None = None) -> str:
    """The streamed text; with `frames`, the client hangs up after so many."""
    text = ""
    async with client.stream("POST", "/v1/chat/completions", json=body(i, stream=True)) as answer:
        lines = (line async for line in answer.aiter_lines() if line.startswith("data: {"))
        seen = 0
        async for line in lines:
            text += httpx.Response(200, content=line[6:]).json()["choices"][0]["delta"].get("content", "")
            seen += 1
            if seen == frames:
                return text
    return text


async def hang_up_without_a_stream(client: httpx.AsyncClient, i: int) -> str:
    with pytest.raises(httpx.ReadTimeout):
        await client.post("/v1/chat/completions", json=body(i), timeout=httpx.Timeout(PATIENCE, read=0.05))
    return ""


async def all_at_once(url: str) -> list[str]:
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=httpx.Limits(max_connections=COUNT)) as client:
        kinds = [
            hang_up_without_a_stream(client, i) if i % 6 == 0
            else streamed(client, i, frames=2 + i) if i % 3 == 0
            else streamed(client, i) if i % 3 == 1
            else whole(client, i)
            for i in range(COUNT)
        ]  # fmt: skip
        return await asyncio.gather(*kinds)


async def one_by_one(url: str, which: list[int]) -> dict[int, str]:
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
        return {i: await whole(client, i) for i in which}


def test_a_third_of_64_clients_hangs_up(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, {})
    with ServerProcess.toy(folder, kv_tokens=8192, disable_access_log=True) as server:
        server.wait_until_ready()
        answers = asyncio.run(all_at_once(server.url))
        gauges = server.wait_until_idle()
        assert gauges['leftfold:kv_pages{use="free"}'] + gauges['leftfold:kv_pages{use="cached"}'] == 512
        staying = [i for i in range(COUNT) if i % 3]
        alone = asyncio.run(one_by_one(server.url, staying))
        assert {i: answers[i] for i in staying} == alone
        assert all(len(alone[i]) == 150 + i for i in staying)
        assert gauges['leftfold:request_success_total{finished_reason="length"}'] == len(staying)
        for i in range(3, COUNT, 6):  # what those who hung up had heard is the beginning of the same answer
            assert 0 < len(answers[i]) < 150 + i
        assert "Traceback" not in server.stderr
