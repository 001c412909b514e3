"""64 chats for a server to answer, and clients that hang up."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.e2e.servers import PATIENCE

COUNT = 64


def body(i: int, tokens: int, **more: Any) -> dict[str, Any]:
    """The i-th chat; its answer has at most `tokens + i` tokens."""
    content = f"chat number {i}: " + "tell me more. " * (i % 7)
    return {"messages": [{"role": "user", "content": content}], "max_tokens": tokens + i, "temperature": 0, **more}


async def whole(client: httpx.AsyncClient, i: int, tokens: int) -> str:
    answer = await client.post("/v1/chat/completions", json=body(i, tokens))
    assert answer.status_code == 200
    return str(answer.json()["choices"][0]["message"]["content"])


async def streamed(client: httpx.AsyncClient, i: int, tokens: int, frames: int | None = None) -> str:
    """The streamed text; with `frames`, the client hangs up after so many."""
    text = ""
    async with client.stream("POST", "/v1/chat/completions", json=body(i, tokens, stream=True)) as answer:
        lines = (line async for line in answer.aiter_lines() if line.startswith("data: {"))
        seen = 0
        async for line in lines:
            text += httpx.Response(200, content=line[6:]).json()["choices"][0]["delta"].get("content", "")
            seen += 1
            if seen == frames:
                return text
    return text


async def hang_up_without_a_stream(client: httpx.AsyncClient, i: int, tokens: int) -> str:
    with pytest.raises(httpx.ReadTimeout):
        await client.post("/v1/chat/completions", json=body(i, tokens), timeout=httpx.Timeout(PATIENCE, read=0.05))
    return ""


async def all_at_once(url: str, tokens: int) -> list[str]:
    """What each of 64 clients heard; every third hangs up, half of those without having asked for a stream."""
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=httpx.Limits(max_connections=COUNT)) as client:
        kinds = [
            hang_up_without_a_stream(client, i, tokens) if i % 6 == 0
            else streamed(client, i, tokens, frames=2 + i) if i % 3 == 0
            else streamed(client, i, tokens) if i % 3 == 1
            else whole(client, i, tokens)
            for i in range(COUNT)
        ]  # fmt: skip
        return await asyncio.gather(*kinds)


async def one_by_one(url: str, which: list[int], tokens: int) -> dict[int, str]:
    """What each of the chats in `which` gets when it is alone."""
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
        return {i: await whole(client, i, tokens) for i in which}
