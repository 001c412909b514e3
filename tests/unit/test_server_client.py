"""The engine's client: every request hears its own outputs, in order, under ids that the server made."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from leftfold.events import Abort, Admit, FlushCache, Pause, Resume
from leftfold.server.client import EngineClient
from leftfold.server.group import EngineAway, EngineGone, Group
from leftfold.server.throughput import line
from leftfold.server.wire import (
    Answered,
    Ask,
    Failed,
    Output,
    Outputs,
    Ready,
    Stats,
    StatsRequest,
    Status,
    Stop,
    Submit,
    from_frames,
    to_frames,
)


class Peer:
    """The engine's end of the sockets."""

    def __init__(self, commands: str, outputs: str) -> None:
        self.context = zmq.asyncio.Context()
        self.commands, self.outputs = self.context.socket(zmq.PULL), self.context.socket(zmq.PUSH)
        self.commands.connect(commands)
        self.outputs.connect(outputs)

    async def heard(self) -> Any:
        return from_frames(await asyncio.wait_for(self.commands.recv_multipart(), 20))

    async def say(self, message: Any) -> None:
        await self.outputs.send_multipart(to_frames(message))

    def close(self) -> None:
        self.context.destroy(linger=0)


@asynccontextmanager
async def joined(folder: Path) -> AsyncIterator[tuple[EngineClient, Peer]]:
    addresses = [f"ipc://{folder}/c", f"ipc://{folder}/o"]
    client, peer = EngineClient(*addresses), Peer(*addresses)
    running = asyncio.create_task(client.run())
    try:
        yield client, peer
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        peer.close()
        client.close()


def run(folder: Path, scenario: Callable[[EngineClient, Peer], Awaitable[None]]) -> None:
    async def main() -> None:
        async with joined(folder) as (client, peer):
            await asyncio.wait_for(scenario(client, peer), 60)

    asyncio.run(main())


async def take(group: Group, count: int) -> list[tuple[int, Output]]:
    items = []
    async for item in group:
        items.append(item)
        if len(items) == count:
            break
    return items


def row(rid: str, token: int, end: str | None = None, at: int = 1) -> Output:
    """Prompts have one token here, so the first that is generated is at position 1."""
    return Output(rid, 0, at, [token], end, None, None)


def test_each_choice_hears_its_own_outputs_in_order(tmp_path: Path) -> None:
    async def scenario(client: EngineClient, peer: Peer) -> None:
        group = client.admit([{"prompt": [1]}, {"prompt": [2]}])
        other = client.admit([{"prompt": [3]}])
        rids = [(await peer.heard()).event.rid for _ in range(3)]
        assert len(set(rids)) == 3
        a, b, c = rids
        await peer.say(Outputs([row(b, 1), row("somebody else", 9), row(c, 2), row(a, 3)]))
        await peer.say(Outputs([row(b, 4, "length", 2), row(a, 5, at=2), row(a, 6, "stop", 3), row(c, 7, "length", 2)]))
        assert [(i, o.tokens) for i, o in await take(group, 9)] == [(1, [1]), (0, [3]), (1, [4]), (0, [5]), (0, [6])]
        assert [(i, o.tokens) for i, o in await take(other, 9)] == [(0, [2]), (0, [7])]

    run(tmp_path, scenario)


def test_closing_aborts_only_what_has_not_ended(tmp_path: Path) -> None:
    async def scenario(client: EngineClient, peer: Peer) -> None:
        group = client.admit([{"prompt": [1]}] * 3)
        a, b, c = [(await peer.heard()).event.rid for _ in range(3)]
        await peer.say(Outputs([row(a, 1, "length"), row(b, 1)]))
        (_, _), (_, second) = await take(group, 2)
        group.stop(second, keep=1)
        group.stop(second, keep=1)
        group.close()
        group.close()
        stop, gone = (await peer.heard()).event, (await peer.heard()).event
        assert isinstance(stop, Abort) and isinstance(gone, Abort)
        assert (stop.rid, stop.reason, stop.keep) == (b, "stop_string", 1)
        assert (gone.rid, gone.reason) == (c, "client_gone")
        client.stop()
        assert await peer.heard() == Stop()

    run(tmp_path, scenario)


def test_after_a_stop_string_the_end_alone_is_heard(tmp_path: Path) -> None:
    async def scenario(client: EngineClient, peer: Peer) -> None:
        group = client.admit([{"prompt": [1]}])
        rid = (await peer.heard()).event.rid
        await peer.say(Outputs([row(rid, 1), row(rid, 2, at=2), row(rid, 3, "length", 3)]))
        heard = []
        async for _, output in group:
            heard.append(output.tokens)
            group.stop(output, keep=1)
        assert heard == [[1], [3]]

    run(tmp_path, scenario)


def test_statistics_answer_their_own_call(tmp_path: Path) -> None:
    async def scenario(client: EngineClient, peer: Peer) -> None:
        first, second = asyncio.create_task(client.stats()), asyncio.create_task(client.stats())
        calls = [await peer.heard(), await peer.heard()]
        assert all(isinstance(call, StatsRequest) for call in calls)
        await peer.say(Stats(calls[1].call, {"n": 2}))
        await peer.say(Stats(99, {"n": 99}))
        await peer.say(Stats(calls[0].call, {"n": 1}))
        assert (await first, await second) == ({"n": 1}, {"n": 2})
        with pytest.raises(TimeoutError):
            await client.stats(patience=0.01)

    run(tmp_path, scenario)


def test_control_calls_are_answered_by_their_own_answers(tmp_path: Path) -> None:
    async def scenario(client: EngineClient, peer: Peer) -> None:
        first = asyncio.create_task(client.control(Pause, mode="wait"))
        second = asyncio.create_task(client.control(Resume))
        events = [(await peer.heard()).event, (await peer.heard()).event]
        pause, resume = sorted(events, key=lambda event: type(event).__name__)
        assert isinstance(pause, Pause) and isinstance(resume, Resume) and pause.mode == "wait"
        assert pause.call and resume.call and pause.call != resume.call
        await peer.say(Status("draining", []))
        await peer.say(Answered("of somebody else", True))
        await peer.say(Answered(resume.call, True, None))
        await peer.say(Answered(pause.call, False, "superseded by a resume"))
        assert (await first).info == "superseded by a resume" and not (await first).ok
        assert (await second).ok
        assert client.status == Status("draining", [])

    run(tmp_path, scenario)


def test_who_stops_waiting_takes_no_control_call_back(tmp_path: Path) -> None:
    async def scenario(client: EngineClient, peer: Peer) -> None:
        task = asyncio.create_task(client.control(Pause, mode="wait"))
        call = (await peer.heard()).event.call
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        with pytest.raises(TimeoutError):
            await client.control(Resume, patience=0.01)
        assert isinstance((await peer.heard()).event, Resume)  # and nothing in between
        await peer.say(Answered(call, True))
        other = asyncio.create_task(client.control(FlushCache))
        await peer.say(Answered((await peer.heard()).event.call, True))
        assert (await other).ok

    run(tmp_path, scenario)


def test_a_group_knows_its_end_before_anybody_reads_it(tmp_path: Path) -> None:
    async def scenario(client: EngineClient, peer: Peer) -> None:
        group = client.admit([{"prompt": [1]}, {"prompt": [2]}])
        a, b = [(await peer.heard()).event.rid for _ in range(2)]
        ended = asyncio.create_task(group.ended())
        group.abort("abort_requests")
        assert [(await peer.heard()).event.rid for _ in range(2)] == [a, b]
        await peer.say(Outputs([row(a, 1, "abort")]))
        await peer.say(Outputs([row(b, 1), row(b, 2, "length", 2)]))
        await ended
        assert [(i, o.finish_reason) for i, o in await take(group, 9)] == [(0, "abort"), (1, None), (1, "length")]

    run(tmp_path, scenario)


def test_everybody_who_waits_hears_that_the_engine_is_gone(tmp_path: Path) -> None:
    async def scenario(client: EngineClient, peer: Peer) -> None:
        group = client.admit([{"prompt": [1]}])
        calls = (client.stats(), client.control(Resume))
        waiting = [asyncio.create_task(take(group, 1)), *(asyncio.create_task(call) for call in calls)]
        await peer.heard()
        await peer.heard()
        client.gone("it fell")
        for task in waiting:
            with pytest.raises(EngineGone, match="it fell"):
                await task
        await group.ended()
        with pytest.raises(EngineGone):
            await client.control(Resume)
        with pytest.raises(EngineGone):
            client.admit([{"prompt": [1]}])
        with pytest.raises(EngineGone):
            await client.stats()
        with pytest.raises(EngineGone):
            await client.ready
        client.submit(Admit(t=0, rid="x"))
        group.close()

    run(tmp_path, scenario)


def test_an_engine_may_end_where_nobody_waits_for_it(tmp_path: Path) -> None:
    complaints: list[Any] = []

    async def scenario(client: EngineClient, peer: Peer) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        await peer.say(Failed("no such model"))
        await asyncio.wait({client.ready})
        client.connect(f"ipc://{tmp_path}/c2", f"ipc://{tmp_path}/o2")
        client.gone("it fell")
        with pytest.raises(EngineGone, match="it fell"):
            client.ready.result()
        del client.ready
        gc.collect()

    run(tmp_path, scenario)
    assert complaints == []


async def next_process(folder: Path, client: EngineClient, old: Peer) -> tuple[Peer, asyncio.Task[None]]:
    """The engine's process is lost, and another one listens."""
    client.lost("it fell")
    old.close()
    addresses = [f"ipc://{folder}/c2", f"ipc://{folder}/o2"]
    client.connect(*addresses)
    return Peer(*addresses), asyncio.create_task(client.run())


def test_a_new_process_is_asked_for_the_rest_and_told_what_it_does_not_know(tmp_path: Path) -> None:
    async def scenario(client: EngineClient, old: Peer) -> None:
        group = client.admit([{"prompt": [1]}, {"prompt": [2]}, {"prompt": [3]}])
        left = client.admit([{"prompt": [4]}, {"prompt": [5]}])
        a, b, c, d, e = [(await old.heard()).event.rid for _ in range(5)]
        await old.say(Outputs([row(a, 7), row(a, 8, at=2), row(c, 9, "length")]))
        assert len(await take(group, 3)) == 3
        left.close()
        assert {(await old.heard()).event.rid for _ in range(2)} == {d, e}
        waiting = asyncio.create_task(client.control(Pause, mode="wait"))
        call = (await old.heard()).event.call
        stats = asyncio.create_task(client.stats())
        await old.heard()
        peer, running = await next_process(tmp_path, client, old)
        with pytest.raises(EngineAway):
            await stats
        with pytest.raises(EngineAway):
            await client.control(Resume)
        late = client.admit([{"prompt": [6]}])  # goes there when it is known to be there
        catching_up = asyncio.create_task(client.catch_up())
        asked = await peer.heard()
        assert isinstance(asked, Ask) and asked.calls == [call]
        (f,) = [choice.rid for choice in late.choices]
        assert [[rid, at] for rid, _, _, at in asked.wanted[:3]] == [[a, 3], [b, 1], [f, 1]]
        assert [rid for rid, *_ in asked.wanted[3:]] == [d, e]
        await peer.say(Outputs([row(a, 11, at=5)]))  # drawn before the question came: what lies between is on its way
        await peer.say(Outputs([Output(a, 0, 3, [9, 10, 11], None, None, None)]))
        unknown = [[rid, 0, 0] for rid in (b, f, e)]
        await peer.say(Answered(asked.call, True, {"unknown": unknown, "calls": [call]}))
        await catching_up
        again = [(await peer.heard()).event for _ in range(3)]
        assert [(type(event), event.rid) for event in again] == [(Admit, b), (Admit, f), (Abort, d)]
        with pytest.raises(EngineAway, match="open"):
            await waiting
        await peer.say(Outputs([row(a, 12, "length", 6), row(b, 1, "length")]))
        heard = [(i, o.position, o.tokens) for i, o in await take(group, 3)]
        assert heard == [(0, 3, [9, 10, 11]), (0, 6, [12]), (1, 1, [1])]
        running.cancel()
        peer.close()

    run(tmp_path, scenario)


def test_what_is_drawn_again_is_dropped_when_the_same_and_ends_the_choice_when_not(tmp_path: Path) -> None:
    async def scenario(client: EngineClient, peer: Peer) -> None:
        group = client.admit([{"prompt": [1]}, {"prompt": [2]}])
        a, b = [(await peer.heard()).event.rid for _ in range(2)]
        await peer.say(Outputs([Output(r, 0, 1, [5, 6, 7], None, None, None) for r in (a, b)]))
        await peer.say(Outputs([Output(a, 0, 1, [5, 6], None, None, None), row(a, 7, at=3), row(a, 8, "length", 4)]))
        await peer.say(Outputs([Output(b, 0, 1, [5, 9, 7, 8], None, None, None), row(b, 8, "length", 4)]))
        heard = await take(group, 9)
        assert [(i, o.tokens, o.finish_reason) for i, o in heard] == [
            (0, [5, 6, 7], None), (1, [5, 6, 7], None), (0, [8], "length"), (1, [], "error"),
        ]  # fmt: skip
        error = heard[-1][1].error
        assert error is not None and error["code"] == "diverged" and "position 2" in error["text"]
        ended = (await peer.heard()).event
        assert (ended.rid, ended.reason) == (b, "diverged")

    run(tmp_path, scenario)


def test_a_hole_is_asked_for_once(tmp_path: Path) -> None:
    async def scenario(client: EngineClient, peer: Peer) -> None:
        group = client.admit([{"prompt": [1]}])
        rid = (await peer.heard()).event.rid
        await peer.say(Outputs([row(rid, 5), row(rid, 7, at=3), row(rid, 8, "length", 4)]))
        assert await peer.heard() == Ask("", [[rid, 0, 0, 2]], [])
        await peer.say(Outputs([Output(rid, 0, 2, [6, 7, 8], "length", None, None)]))
        assert [o.tokens for _, o in await take(group, 9)] == [[5], [6, 7, 8]]
        client.stop()
        assert await peer.heard() == Stop()

    run(tmp_path, scenario)


def test_noise_on_the_wire_hurts_nobody(tmp_path: Path) -> None:
    async def scenario(client: EngineClient, peer: Peer) -> None:
        await peer.outputs.send_multipart([b"?", b"noise"])
        await peer.say(Ready({"max_model_len": 1}))
        await peer.say(Failed("too late"))
        assert (await client.ready)["max_model_len"] == 1
        client.submit(Abort(t=0))
        assert isinstance(await peer.heard(), Submit)

    run(tmp_path, scenario)


def test_the_line_of_throughput() -> None:
    before = {"prompt_tokens": 10, "generation_tokens": 0, "prefix_queries": 0, "prefix_hits": 0}
    now = {
        "prompt_tokens": 110, "generation_tokens": 45, "prefix_queries": 8, "prefix_hits": 2, "running": 3,
        "waiting": 1, "num_pages": 8, "pages_held": 2,
    }  # fmt: skip
    assert line(before, now, 10.0) == (
        "prompt throughput 10.0 tokens/s, generation throughput 4.5 tokens/s, running 3, waiting 1, "
        "KV cache usage 25.0%, prefix cache hit rate 25.0%"
    )
    assert "0.0%" in line({}, {}, 10.0)
