"""Control calls to a server that is answering: pauses of each kind, sleep, other weights, aborts; the log replays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from leftfold.events import Admit, EventLog, Pause, Resume, Tick
from leftfold.replay.verify import verify
from tests.e2e.servers import PATIENCE, ServerProcess
from tests.tiny_folder import write_tokenizer

STREAMS = 16
TOKENS = 150


class Stream:
    """One streamed completion: its text so far, how it ended, and the task that reads it."""

    def __init__(self, client: httpx.AsyncClient, index: int, max_tokens: int) -> None:
        self.id = self.text = self.end = self.version = ""
        body = {"prompt": f"stream {index}:", "max_tokens": max_tokens, "temperature": 0, "stream": True}
        self.task = asyncio.create_task(self._read(client, body))

    async def _read(self, client: httpx.AsyncClient, body: Any) -> str:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            lines = [line async for line in self._lines(answer)]
        assert lines[-1] == "[DONE]"
        return self.text

    async def _lines(self, answer: httpx.Response) -> AsyncIterator[str]:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                chunk = orjson.loads(line[6:])
                (choice,) = chunk["choices"]
                self.id = chunk["id"]
                self.text += choice["text"]
                self.end = choice["finish_reason"] or ""
                self.version = chunk.get("system_fingerprint", "")
            if line:
                yield line[6:]


class Lab:
    """A server, a client for it, and streams."""

    def __init__(self, server: ServerProcess, client: httpx.AsyncClient) -> None:
        self.server, self.client = server, client

    def stream(self, index: int, max_tokens: int = TOKENS) -> Stream:
        return Stream(self.client, index, max_tokens)

    async def control(self, path: str, status: int = 200, **request: Any) -> Any:
        answer = await self.client.post(path, **request)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def get(self, path: str) -> Any:
        return (await self.client.get(path)).json()

    async def gauges(self) -> dict[str, float]:
        return await asyncio.to_thread(self.server.gauges)

    async def until(self, check: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not await check():
                await asyncio.sleep(0.01)

    async def until_running(self, running: int, waiting: int = 0) -> None:
        async def reached() -> bool:
            load = await self.get("/load")
            return (load["num_requests_running"], load["num_requests_waiting"]) == (running, waiting)

        await self.until(reached)

    async def until_heard(self, streams: list[Stream]) -> None:
        async def heard() -> bool:
            return all(stream.text for stream in streams)

        await self.until(heard)

    async def texts(self, streams: list[Stream]) -> list[str]:
        async with asyncio.timeout(PATIENCE):
            return await asyncio.gather(*(stream.task for stream in streams))

    async def alone(self, count: int, max_tokens: int = TOKENS) -> list[str]:
        """What each stream says when it is alone."""
        return [(await self.texts([self.stream(index, max_tokens)]))[0] for index in range(count)]


@asynccontextmanager
async def lab(folder: Path, step: str = "0.004", **options: Any) -> AsyncIterator[Lab]:
    settings = {"log_dir": str(folder / "log"), "max_num_seqs": STREAMS, "disable_access_log": True, **options}
    with ServerProcess.toy(folder, {"TOY_STEP_SECONDS": step}, **settings) as server:
        await asyncio.to_thread(server.wait_until_ready)
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE, limits=limits) as client:
            yield Lab(server, client)
        assert await asyncio.to_thread(server.interrupt) == 0
        assert "Traceback" not in server.stderr
    verdict = verify(EventLog.read(folder / "log"))
    assert verdict.clean, verdict.describe()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path, {})


def events(folder: Path) -> list[Any]:
    return [record.event for record in EventLog.read(folder / "log")]


def joined_after(folder: Path, kind: type) -> list[str]:
    """Ids in the order in which they joined after the last event of `kind`."""
    happened = events(folder)
    last = max(i for i, event in enumerate(happened) if isinstance(event, kind))
    plans = [event.plan for event in happened[last:] if isinstance(event, Tick) and event.plan is not None]
    return [join.rid for plan in plans for join in plan.join]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_pause_wait_lets_streams_finish_and_resume_releases_those_who_came_in_order(folder: Path, depth: int) -> None:
    async def scenario() -> None:
        async with lab(folder, pipeline_depth=depth) as toy:
            alone = await toy.alone(STREAMS + 4)
            streams = [toy.stream(index) for index in range(STREAMS)]
            await toy.until_running(STREAMS)
            call = asyncio.create_task(toy.control("/pause?mode=wait"))

            async def draining() -> bool:
                return (await toy.get("/is_paused"))["gate"] == "draining"

            await toy.until(draining)
            late = []
            for index in range(STREAMS, STREAMS + 4):
                late.append(toy.stream(index))
                await toy.until_running(STREAMS, len(late))
            assert not call.done()
            assert await call == {"ok": True, "info": {"mode": "wait"}}
            assert await toy.get("/is_paused") == {"is_paused": True, "gate": "paused"}
            gauges = await toy.gauges()
            assert gauges["leftfold:num_requests_running"] == 0
            assert gauges['leftfold:num_requests_waiting_by_reason{reason="paused"}'] == 4
            assert gauges['leftfold:engine_gate{gate="paused"}'] == 1
            assert await toy.texts(streams) == alone[:STREAMS]
            assert {stream.end for stream in streams} == {"length"}
            assert not any(stream.text or stream.task.done() for stream in late)
            assert (await toy.control("/resume"))["ok"]
            assert await toy.texts(late) == alone[STREAMS:]

    asyncio.run(scenario())
    admitted = [event.rid for event in events(folder) if isinstance(event, Admit)]
    assert joined_after(folder, Resume) == admitted[-4:]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_pause_keep_stops_streams_where_they_are_and_resume_goes_on(folder: Path, depth: int) -> None:
    async def scenario() -> None:
        async with lab(folder, pipeline_depth=depth) as toy:
            alone = await toy.alone(STREAMS)
            streams = [toy.stream(index) for index in range(STREAMS)]
            await toy.until_heard(streams)
            assert (await toy.control("/pause?mode=keep"))["info"] == {"mode": "keep"}
            before = (await toy.get("/server_info"))["engine"]
            assert before["running"] == STREAMS and before["in_flight"] == 0
            late = toy.stream(0)
            await toy.until_running(STREAMS, 1)
            after = (await toy.get("/server_info"))["engine"]
            assert after["steps"] == before["steps"] and after["generation_tokens"] == before["generation_tokens"]
            assert not any(stream.task.done() for stream in streams)
            await toy.control("/resume")
            assert await toy.texts([*streams, late]) == [*alone, alone[0]]

    asyncio.run(scenario())


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_pause_abort_gives_every_stream_its_end(folder: Path, depth: int) -> None:
    async def scenario() -> None:
        async with lab(folder, pipeline_depth=depth) as toy:
            alone = await toy.alone(STREAMS)
            streams = [toy.stream(index) for index in range(STREAMS)]
            await toy.until_heard(streams)
            assert (await toy.control("/pause?mode=abort"))["info"] == {"mode": "abort"}
            texts = await toy.texts(streams)
            assert {stream.end for stream in streams} == {"length"}
            assert all(whole.startswith(text) and text != whole for text, whole in zip(texts, alone, strict=True))
            assert not (await toy.server_idle())["running"]
            await toy.control("/resume")
            assert await toy.alone(1) == alone[:1]

    Lab.server_idle = lambda toy: _engine(toy)  # type: ignore[attr-defined]
    asyncio.run(scenario())


async def _engine(toy: Lab) -> Any:
    return (await toy.get("/server_info"))["engine"]
