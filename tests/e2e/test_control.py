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

from leftfold.events import Admit, EventLog, Resume, Tick
from leftfold.replay.verify import verify
from tests.e2e.servers import PATIENCE, ServerProcess
from tests.tiny_folder import write_tokenizer

STREAMS = 16
TOKENS = 60
HELD_AT = 25


class Stream:
    """One streamed completion: its text so far, how it ended, and the task that reads it."""

    def __init__(self, client: httpx.AsyncClient, index: int, max_tokens: int) -> None:
        self.id = self.text = self.end = self.version = ""
        self.prompt = f"stream {index}:"
        body = {"prompt": self.prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        self.task = asyncio.create_task(self._read(client, body))

    @property
    def position(self) -> int:
        """Of its last token; every character is a token here."""
        return len(self.prompt) + len(self.text) - 1

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
    """A server, a client for it, and streams. `hold` lets no row go beyond a position, until `release`."""

    def __init__(self, server: ServerProcess, client: httpx.AsyncClient, hold: Path) -> None:
        self.server, self.client = server, client
        self._hold = hold

    def hold(self, position: int) -> None:
        self._hold.write_text(str(position))

    def release(self) -> None:
        self._hold.unlink()

    def stream(self, index: int, max_tokens: int = TOKENS) -> Stream:
        return Stream(self.client, index, max_tokens)

    async def held(self, count: int) -> list[Stream]:
        """Streams that have said something and cannot go on."""
        self.hold(0)
        streams = [self.stream(index) for index in range(count)]
        await self.until_load(server_load=count)
        self.hold(HELD_AT)
        await self.until(lambda: all_heard_one_held(streams))
        return streams

    async def pausing(self, mode: str) -> asyncio.Task[Any]:
        """A pause that drains: what is held back has to be released before it can end."""
        call = asyncio.create_task(self.control(f"/pause?mode={mode}"))
        await self.until_gate("draining")
        return call

    async def kept(self, count: int) -> list[Stream]:
        """Streams in the middle of their answers, in a paused engine."""
        streams = await self.held(count)
        call = await self.pausing("keep")
        self.release()
        assert await call == {"ok": True, "info": {"mode": "keep"}}
        return streams

    async def control(self, path: str, status: int = 200, **request: Any) -> Any:
        answer = await self.client.post(path, **request)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def get(self, path: str) -> Any:
        return (await self.client.get(path)).json()

    async def engine(self) -> Any:
        """The engine's figures, from its state."""
        return (await self.get("/server_info"))["engine"]

    async def gauges(self) -> dict[str, float]:
        return await asyncio.to_thread(self.server.gauges)

    async def until(self, check: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not await check():
                await asyncio.sleep(0.01)

    async def until_gate(self, gate: str) -> None:
        async def stands() -> bool:
            return bool((await self.get("/is_paused"))["gate"] == gate)

        await self.until(stands)

    async def until_load(self, **wanted: int) -> None:
        async def reached() -> bool:
            load = await self.get("/load")
            return {name: load[name] for name in wanted} == wanted

        await self.until(reached)

    async def texts(self, streams: list[Stream]) -> list[str]:
        async with asyncio.timeout(PATIENCE):
            return await asyncio.gather(*(stream.task for stream in streams))

    async def undisturbed(self, count: int) -> list[str]:
        """What the streams say when nothing interferes."""
        return await self.texts([self.stream(index) for index in range(count)])


async def all_heard_one_held(streams: list[Stream]) -> bool:
    """One has the token of the last position that is allowed, so the step that it is in now cannot end."""
    return all(stream.text for stream in streams) and any(stream.position == HELD_AT for stream in streams)


@asynccontextmanager
async def lab(folder: Path, **options: Any) -> AsyncIterator[Lab]:
    settings = {"log_dir": str(folder / "log"), "max_num_seqs": STREAMS, "disable_access_log": True, **options}
    hold = folder / "hold"
    with ServerProcess.toy(folder, {"TOY_HOLD": str(hold)}, **settings) as server:
        await asyncio.to_thread(server.wait_until_ready)
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE, limits=limits) as client:
            yield Lab(server, client, hold)
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
            alone = await toy.undisturbed(STREAMS + 4)
            streams = await toy.held(STREAMS)
            call = await toy.pausing("wait")
            late = []
            for index in range(STREAMS, STREAMS + 4):
                late.append(toy.stream(index))
                await toy.until_load(num_requests_running=STREAMS, num_requests_waiting=len(late))
            assert not call.done()
            toy.release()
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
            alone = await toy.undisturbed(STREAMS)
            streams = await toy.kept(STREAMS)
            before = await toy.engine()
            assert before["running"] == STREAMS and before["in_flight"] == 0
            late = toy.stream(0)
            await toy.until_load(num_requests_running=STREAMS, num_requests_waiting=1)
            after = await toy.engine()
            assert after["steps"] == before["steps"] and after["generation_tokens"] == before["generation_tokens"]
            assert not any(stream.task.done() for stream in streams)
            await toy.control("/resume")
            assert await toy.texts([*streams, late]) == [*alone, alone[0]]

    asyncio.run(scenario())


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_pause_abort_gives_every_stream_its_end(folder: Path, depth: int) -> None:
    async def scenario() -> None:
        async with lab(folder, pipeline_depth=depth) as toy:
            alone = await toy.undisturbed(STREAMS)
            streams = await toy.held(STREAMS)
            call = await toy.pausing("abort")
            texts = await toy.texts(streams)  # their ends do not wait for the step in flight
            toy.release()
            assert (await call)["info"] == {"mode": "abort"}
            assert {stream.end for stream in streams} == {"length"}
            assert all(whole.startswith(text) and text != whole for text, whole in zip(texts, alone, strict=True))
            assert (await toy.engine())["live"] == 0
            await toy.control("/resume")
            assert await toy.undisturbed(1) == alone[:1]

    asyncio.run(scenario())


def test_a_resume_supersedes_a_pause_that_still_drains(folder: Path) -> None:
    async def scenario() -> None:
        async with lab(folder) as toy:
            streams = await toy.held(2)
            slow = await toy.control("/pause?mode=wait&timeout=0.01", status=504)
            assert slow["error"]["code"] == "still_pending"
            await toy.until_gate("draining")
            assert (await toy.control("/resume"))["ok"]
            call = await toy.pausing("wait")
            assert (await toy.control("/resume"))["ok"]
            with pytest.raises(AssertionError, match="superseded"):
                await call
            toy.release()
            assert len((await toy.texts(streams))[0]) == TOKENS

    asyncio.run(scenario())


def test_a_client_that_hangs_up_does_not_take_its_pause_back(folder: Path) -> None:
    async def scenario() -> None:
        async with lab(folder) as toy:
            streams = await toy.held(2)
            with pytest.raises(httpx.ReadTimeout):
                await toy.client.post("/pause?mode=wait", timeout=httpx.Timeout(PATIENCE, read=0.2))
            await toy.until_gate("draining")
            late = toy.stream(2, 3)
            await toy.until_load(num_requests_running=2, num_requests_waiting=1)
            toy.release()
            await toy.texts(streams)
            await toy.until_gate("paused")
            assert not late.text
            await toy.control("/resume")
            assert len((await toy.texts([late]))[0]) == 3

    asyncio.run(scenario())


def test_sleep_holds_back_what_comes_and_wake_gives_the_same_text(folder: Path) -> None:
    async def scenario() -> None:
        async with lab(folder) as toy:
            text = (await toy.undisturbed(1))[0]
            running = await toy.kept(1)
            assert (await toy.control("/sleep?level=2"))["ok"]
            assert await toy.get("/is_sleeping") == {"is_sleeping": True, "asleep": ["weights", "kv"]}
            late = toy.stream(0)
            await toy.until_load(num_requests_running=0, num_requests_waiting=2)
            gauges = await toy.gauges()
            assert gauges['leftfold:engine_asleep{part="weights"}'] == gauges['leftfold:engine_asleep{part="kv"}'] == 1
            assert gauges['leftfold:num_requests_waiting_by_reason{reason="asleep"}'] == 2
            assert "wake first" in (await toy.control("/resume", status=409))["error"]["message"]
            early = await toy.control("/wake_up?tags=kv", status=409)
            assert "wake them first" in early["error"]["message"]
            assert (await toy.control("/wake_up"))["ok"]
            assert not (await toy.get("/is_sleeping"))["is_sleeping"]
            await toy.control("/resume")
            assert await toy.texts([*running, late]) == [text, text]

    asyncio.run(scenario())


def test_c60_after_an_abort_and_a_sleep_a_request_waits_with_its_deadline(folder: Path) -> None:
    async def scenario() -> None:
        async with lab(folder) as toy:
            await toy.control("/pause?mode=abort")
            await toy.control("/sleep?level=1")
            body = {"prompt": "late", "max_tokens": 3, "timeout": 0.2}
            answer = await toy.client.post("/v1/completions", json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
            waiting = toy.stream(1, max_tokens=3)
            await toy.until_load(num_requests_running=0, num_requests_waiting=1)
            await toy.control("/wake_up")
            await toy.control("/resume")
            assert len((await toy.texts([waiting]))[0]) == 3

    asyncio.run(scenario())


def test_c60_told_to_refuse_the_server_says_when_to_come_back(folder: Path) -> None:
    async def refused(toy: Lab, state: str) -> None:
        for answer in (await toy.client.post("/v1/completions", json={"prompt": "a"}), await toy.client.get("/ready")):
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.headers["x-leftfold-state"] == state

    async def scenario() -> None:
        async with lab(folder, sleep_policy="refuse") as toy:
            await toy.control("/pause?mode=abort")
            await refused(toy, "paused")
            await toy.control("/sleep")
            await refused(toy, "asleep")
            await toy.control("/wake_up")
            await refused(toy, "paused")
            await toy.control("/resume")
            assert await toy.texts([toy.stream(0, 3)])
            assert (await toy.gauges())['leftfold:admission_rejections_total{reason="paused"}'] == 2

    asyncio.run(scenario())


def test_other_weights_give_other_text_and_name_themselves(folder: Path) -> None:
    async def scenario() -> None:
        async with lab(folder) as toy:
            first = toy.stream(0)
            text = (await toy.texts([first]))[0]
            assert first.version == ""
            body = {"source": "somewhere", "version": "step-100"}
            assert (await toy.control("/update_weights", json=body))["ok"]
            second = toy.stream(0)
            assert (await toy.texts([second]))[0] != text
            assert second.version == "step-100"
            whole = await toy.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
            assert whole.json()["system_fingerprint"] == "step-100"

    asyncio.run(scenario())


def test_answers_are_aborted_by_the_ids_that_clients_see(folder: Path) -> None:
    async def scenario() -> None:
        async with lab(folder) as toy:
            alone = await toy.undisturbed(3)
            streams = await toy.held(3)
            body = {"request_ids": [streams[1].id, "chatcmpl-unknown"]}
            done = await toy.control("/abort_requests", json=body)
            assert done["info"] == {"aborted": [streams[1].id], "unknown": ["chatcmpl-unknown"]}
            text = (await toy.texts(streams[1:2]))[0]
            assert alone[1].startswith(text) and text != alone[1]
            done = await toy.control("/abort_requests", json={"request_ids": []})
            assert sorted(done["info"]["aborted"]) == sorted([streams[0].id, streams[2].id])
            assert (await toy.engine())["live"] == 0
            toy.release()
            assert all(whole.startswith(text) for text, whole in zip(await toy.texts(streams), alone, strict=True))

    asyncio.run(scenario())


def test_limits_change_while_streams_run_and_the_cache_is_forgotten(folder: Path) -> None:
    async def scenario() -> None:
        async with lab(folder) as toy:
            alone = await toy.undisturbed(4)
            streams = await toy.kept(4)
            assert (await toy.control("/reconfigure", json={"set": {"max_running": 2}}))["ok"]
            assert (await toy.get("/server_info"))["config"]["max_running"] == 2
            await toy.until_load(num_requests_running=2, num_requests_waiting=2)
            wrong = await toy.control("/reconfigure", status=409, json={"set": {"max_running": 9, "page_size": 8}})
            assert "page_size cannot be changed" in wrong["error"]["message"]
            await toy.control("/resume")
            assert await toy.texts(streams) == alone
            hits = (await toy.engine())["prefix_hits"]
            assert (await toy.control("/flush_cache"))["ok"]
            await toy.texts([toy.stream(0)])
            assert (await toy.engine())["prefix_hits"] == hits

    asyncio.run(scenario())


def test_a_wait_after_a_keep_says_that_answers_stand_unfinished(folder: Path) -> None:
    async def scenario() -> None:
        async with lab(folder) as toy:
            alone = await toy.undisturbed(2)
            streams = await toy.kept(2)
            for _ in range(2):
                info = (await toy.control("/pause?mode=wait"))["info"]
                assert info["mode"] == "keep" and "POST /resume and then /pause?mode=wait" in info["note"]
            await toy.until_load(num_requests_running=2)
            assert not any(stream.task.done() for stream in streams)
            await toy.control("/resume")
            assert (await toy.control("/pause?mode=wait"))["info"] == {"mode": "wait"}
            assert await toy.texts(streams) == alone

    asyncio.run(scenario())


def test_a_paused_engine_is_paused_after_a_restart(folder: Path) -> None:
    async def scenario() -> None:
        async with lab(folder) as toy:
            await toy.control("/pause?mode=keep")
        async with lab(folder) as toy:
            assert (await toy.get("/is_paused"))["is_paused"]
            stream = toy.stream(0, 3)
            await toy.until_load(num_requests_running=0, num_requests_waiting=1)
            await toy.control("/resume")
            assert len((await toy.texts([stream]))[0]) == 3

    asyncio.run(scenario())
