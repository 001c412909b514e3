"""The server's side of the engine: requests in, outputs out, gauges on demand, over ZMQ."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import zmq
import zmq.asyncio

from leftfold.events import Abort, Admit, Event
from leftfold.server.wire import (
    Answered,
    Failed,
    Message,
    Output,
    Outputs,
    Ready,
    Stats,
    StatsRequest,
    Status,
    Stop,
    Submit,
    WireError,
    from_frames,
    to_frames,
)

_log = logging.getLogger("leftfold.server")


class EngineGone(Exception):
    """The engine's process has ended; nothing can be answered any more."""


class EngineStopping(EngineGone):
    """The engine was told to stop; what it has not answered by then is not answered any more."""


class Group:
    """The choices of one HTTP request. Iterate for `(index, output)`; `close` aborts what has not ended."""

    def __init__(self, client: EngineClient, rids: Sequence[str]) -> None:
        self._client = client
        self._index = {rid: i for i, rid in enumerate(rids)}
        self._open = dict.fromkeys(rids)
        self._live = set(rids)
        self._stopped: set[str] = set()  # by a stop string; what comes yet is the end, with its counts
        self._arrived: deque[Output | EngineGone] = deque()
        self._news = asyncio.Event()
        self._ended = asyncio.Event()

    def put(self, item: Output | EngineGone) -> None:
        """Takes what the engine says about one of the choices."""
        self._arrived.append(item)
        self._news.set()
        if isinstance(item, EngineGone):
            self._ended.set()
        elif item.finish_reason is not None:
            self._end(item.rid)

    async def ended(self) -> None:
        """Waits until every choice has ended, whether or not somebody has read that already."""
        await self._ended.wait()

    def abort(self, reason: str) -> None:
        """Ends what has not ended; unlike `close`, those who iterate hear the end."""
        for rid in [rid for rid in self._open if rid not in self._stopped]:
            self._client.submit(Abort(t=0, rid=rid, reason=reason))

    async def first(self) -> Output | None:
        """Waits for the first output and leaves it in its place; None if the engine is gone."""
        await self._news.wait()
        return item if self._arrived and isinstance(item := self._arrived[0], Output) else None

    async def __aiter__(self) -> AsyncIterator[tuple[int, Output]]:
        while self._open:
            while not self._arrived:
                self._news.clear()
                await self._news.wait()
            output = self._arrived.popleft()
            if isinstance(output, EngineGone):
                self._open.clear()
                raise output
            if output.rid not in self._open:
                continue
            if output.finish_reason is not None:
                self._forget(output.rid)
            elif output.rid in self._stopped:
                continue
            yield self._index[output.rid], output

    def stop(self, output: Output, keep: int) -> None:
        """Ends a choice at its `keep`-th output token because its text met a stop string; its end is still heard."""
        if output.rid in self._open and output.rid not in self._stopped:
            self._stopped.add(output.rid)
            self._client.submit(Abort(t=0, rid=output.rid, reason="stop_string", keep=keep))

    def close(self) -> int:
        """Aborts the choices that have not ended (the client is gone, or the request failed); how many those are."""
        live = [rid for rid in self._open if rid in self._live and rid not in self._stopped]
        for rid in list(self._open):
            self._forget(rid)
        for rid in live:
            self._client.submit(Abort(t=0, rid=rid, reason="client_gone"))
        return len(live)

    def _forget(self, rid: str) -> None:
        del self._open[rid]
        self._end(rid)
        self._client.forget(rid)

    def _end(self, rid: str) -> None:
        self._live.discard(rid)
        if not self._live:
            self._ended.set()


class EngineClient:
    """One engine. `commands` and `outputs` are ZMQ addresses that this side binds."""

    def __init__(self, commands: str, outputs: str) -> None:
        self._context = zmq.asyncio.Context()
        self._commands = self._bind(zmq.PUSH, commands)
        self._outputs = self._bind(zmq.PULL, outputs)
        self._groups: dict[str, Group] = {}
        self._calls: dict[int, asyncio.Future[Mapping[str, Any]]] = {}
        self._controls: dict[str, asyncio.Future[Answered]] = {}
        self._numbers = itertools.count(1)
        self._base = secrets.token_hex(8)  # a log may still owe answers to the calls of an earlier server
        self._gone: EngineGone | None = None
        self.status = Status("running")
        self.ready: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def _bind(self, kind: int, address: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.bind(address)
        return socket

    async def run(self) -> None:
        """Hands out what the engine sends, until cancelled."""
        while True:
            frames = await self._outputs.recv_multipart()
            try:
                self._take(from_frames(frames))
            except WireError as error:
                _log.error("ignored a message from the engine: %s", error)

    def _take(self, message: Message) -> None:
        match message:
            case Outputs(rows):
                for row in rows:
                    group = self._groups.get(row.rid)
                    if group is not None:  # else: an answer nobody waits for any more
                        group.put(row)
            case Stats(call, values):
                future = self._calls.pop(call, None)
                if future is not None and not future.done():
                    future.set_result(values)
            case Answered(call):
                waiting = self._controls.pop(call, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)
            case Status():
                self.status = message
            case Ready(info) if not self.ready.done():
                self.ready.set_result(info)
            case Failed(text):
                if not self.ready.done():
                    self.ready.set_exception(EngineGone(text))
                elif not self.failed.done():
                    self.failed.set_result(text)

    def admit(self, requests: Sequence[Mapping[str, Any]]) -> Group:
        """Admits one request per mapping of `Admit` fields, under ids of our own. Raises EngineGone."""
        if self._gone is not None:
            raise EngineGone(str(self._gone))
        base = secrets.token_hex(12)
        rids = [f"{base}-{i}" for i in range(len(requests))]
        group = Group(self, rids)
        for rid, fields in zip(rids, requests, strict=True):
            self._groups[rid] = group
            self.submit(Admit(t=0, rid=rid, **fields))
        return group

    def submit(self, event: Event) -> None:
        """Puts an event into the engine's inbox; nothing happens once the engine is gone."""
        self._send(Submit(event))

    def forget(self, rid: str) -> None:
        """No more outputs of `rid` are wanted."""
        self._groups.pop(rid, None)

    async def stats(self, patience: float = 5.0) -> Mapping[str, Any]:
        """The engine's gauges, as its state has them, within `patience` seconds. Raises EngineGone, TimeoutError."""
        if self._gone is not None:
            raise EngineGone(str(self._gone))
        call = next(self._numbers)
        future = self._calls[call] = asyncio.get_running_loop().create_future()
        self._send(StatsRequest(call))
        try:
            return await asyncio.wait_for(future, patience)
        finally:
            self._calls.pop(call, None)

    async def control(self, kind: type[Event], patience: float | None = None, **fields: Any) -> Answered:
        """Makes a control call, an event of `kind`, and waits for its answer, for `patience` seconds at most.

        The call is the engine's once it is sent: whoever stops waiting does not take it back. Raises EngineGone,
        TimeoutError.
        """
        if self._gone is not None:
            raise EngineGone(str(self._gone))
        call = f"{self._base}-{next(self._numbers)}"
        future = self._controls[call] = asyncio.get_running_loop().create_future()
        self.submit(kind(t=0, call=call, **fields))
        try:
            return await asyncio.wait_for(future, patience)
        finally:
            self._controls.pop(call, None)

    def stop(self) -> None:
        """Asks the engine's process to end, and tells everybody who still waits for it."""
        self._send(Stop())
        self._tell(EngineStopping("the server is stopping"))

    def gone(self, why: str) -> None:
        """The engine's process has ended: everybody who waits is told."""
        self._tell(EngineGone(why))
        if not self.ready.done():
            self.ready.set_exception(EngineGone(why))

    def _tell(self, why: EngineGone) -> None:
        """Nothing more comes from the engine, and nothing more goes there."""
        self._gone = why
        for group in set(self._groups.values()):
            group.put(why)
        self._groups.clear()
        for future in (*self._calls.values(), *self._controls.values()):
            if not future.done():
                future.set_exception(why)

    def close(self) -> None:
        self._commands.close()
        self._outputs.close()
        self._context.term()

    def _send(self, message: Message) -> None:
        if self._gone is None:
            # The queue has no limit and so never blocks; the future that pyzmq returns is done at once.
            self._commands.send_multipart(to_frames(message))
