"""The server's side of the engine: requests in, outputs out, gauges on demand, over ZMQ."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import zmq
import zmq.asyncio

from leftfold.events import Abort, Admit, Event
from leftfold.server.choices import Choice
from leftfold.server.group import EngineAway, EngineGone, EngineStopping, Group
from leftfold.server.wire import (
    Answered,
    Ask,
    Failed,
    Message,
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
_BEYOND = 2**53
"""No position: asks only whether a request is known, and how it ended."""


class EngineClient:
    """One engine, in one process after the other. `commands` and `outputs` are ZMQ addresses that this side binds.

    When a process has ended, `lost` says so; `connect` is for the next one, and `catch_up` finds out what it knows:
    every request goes on from what has been heard of it, and what never arrived is sent again under the same id.
    """

    def __init__(self, commands: str, outputs: str) -> None:
        self._context = zmq.asyncio.Context()
        self._sockets: tuple[zmq.asyncio.Socket, zmq.asyncio.Socket] | None = None
        self._aborts: dict[str, Abort] = {}  # of what has not been heard to end
        self._asked: set[str] = set()
        self._away = False
        self._groups: dict[str, Group] = {}
        self._calls: dict[int, asyncio.Future[Mapping[str, Any]]] = {}
        self._controls: dict[str, asyncio.Future[Answered]] = {}
        self._numbers = itertools.count(1)
        self._base = secrets.token_hex(8)  # a log may still owe answers to the calls of an earlier server
        self._gone: EngineGone | None = None
        self.connect(commands, outputs)

    def connect(self, commands: str, outputs: str) -> None:
        """New sockets, for a new process. Until `catch_up` only calls go there."""
        self._close_sockets()
        self._sockets = (self._bind(zmq.PUSH, commands), self._bind(zmq.PULL, outputs))
        self.status = Status("running")
        self.ready: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self.ready.add_done_callback(_seen)
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def _bind(self, kind: int, address: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.bind(address)
        return socket

    @property
    def was_ready(self) -> bool:
        """Whether this process has said that it takes work."""
        return self.ready.done() and self.ready.exception() is None

    async def run(self) -> None:
        """Hands out what the engine sends, until cancelled."""
        assert self._sockets is not None, "closed"
        _, outputs = self._sockets
        while True:
            frames = await outputs.recv_multipart()
            try:
                self._take(from_frames(frames))
            except WireError as error:
                _log.error("ignored a message from the engine: %s", error)

    def _take(self, message: Message) -> None:
        match message:
            case Outputs(rows):
                for row in rows:
                    if row.finish_reason is not None:
                        self._aborts.pop(row.rid, None)
                    group = self._groups.get(row.rid)
                    if group is not None:  # else: an answer nobody waits for any more
                        if self._asked and not group.choice(row.rid).lacks(row):
                            self._asked.discard(row.rid)
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

    def admit(self, requests: Sequence[Mapping[str, Any]], base: str | None = None) -> Group:
        """Admits one request per mapping of `Admit` fields, as `base`-0, `base`-1, …. Raises EngineGone."""
        if self._gone is not None:
            raise EngineGone(str(self._gone))
        base = base or secrets.token_hex(12)
        admits = [Admit(t=0, rid=f"{base}-{i}", **fields) for i, fields in enumerate(requests)]
        group = Group(self, [Choice(admit.rid, len(admit.prompt), admit) for admit in admits])
        for admit in admits:
            self._groups[admit.rid] = group
            self.submit(admit)
        return group

    def adopt(self, choices: Sequence[Choice]) -> Group:
        """Takes up what the engine's log has of an earlier server's requests; `catch_up` brings it."""
        group = Group(self, choices)
        self._groups |= {choice.rid: group for choice in choices}
        return group

    async def confirm(self, group: Group) -> None:
        """Returns once the engine has logged the requests of `group`. Raises EngineGone."""
        call = f"{self._base}-{next(self._numbers)}"
        future = self._controls[call] = asyncio.get_running_loop().create_future()
        if not self._away:  # else it is among what the next process is told, or has
            self._send(Ask(call, [[choice.rid, 0, 0, choice.expected] for choice in group.choices]))
        try:
            await future
        except EngineAway:
            pass  # the request itself was sent again, or is in the log
        finally:
            self._controls.pop(call, None)

    def end(self, abort: Abort) -> None:
        """Ends a request; said again to an engine that was started meanwhile."""
        assert abort.rid is not None
        self._aborts[abort.rid] = abort
        self.submit(abort)

    def submit(self, event: Event) -> None:
        """Puts an event into the engine's inbox; nothing happens once the engine is gone."""
        if not self._away:
            self._send(Submit(event))

    def ask_again(self, choice: Choice) -> None:
        """Something of a choice has not come: the engine says it again, everything from there on."""
        if not self._away and choice.rid not in self._asked:
            self._asked.add(choice.rid)
            self._send(Ask("", [[choice.rid, 0, 0, choice.expected]]))

    def lost(self, why: str) -> None:
        """The engine's process has ended and there will be another: who asked how it stands hears so, others wait."""
        self._away = True
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineAway(why))

    async def catch_up(self, patience: float | None = None) -> None:
        """Hears from a new process all that its log has of the open requests, and tells it what it does not know.

        Control calls that it does not know either took effect or never arrived: who waits for them is told so. Raises
        EngineGone, TimeoutError.
        """
        open_choices = {rid: group.choice(rid) for rid, group in self._groups.items()}
        wanted = [[rid, 0, 0, choice.expected] for rid, choice in open_choices.items() if choice.end is None]
        wanted += [[rid, 0, 0, _BEYOND] for rid in self._aborts if rid not in open_choices]
        calls = [call for call, future in self._controls.items() if not future.done()]
        call = f"{self._base}-{next(self._numbers)}"
        future = self._controls[call] = asyncio.get_running_loop().create_future()
        self._send(Ask(call, wanted, calls))
        try:
            answer = await asyncio.wait_for(future, patience)
        finally:
            self._controls.pop(call, None)
        info = answer.info if answer.ok else {}
        self._away = False
        self._asked.clear()
        for rid, *_ in info.get("unknown", ()):
            self._send_again(rid)
        for abort in list(self._aborts.values()):
            self.submit(abort)
        for call in info.get("calls", ()):
            waiting = self._controls.get(call)
            if waiting is not None and not waiting.done():
                waiting.set_exception(EngineAway("its process was started again, and whether this took effect is open"))

    def _send_again(self, rid: str) -> None:
        group = self._groups.get(rid)
        if group is None:
            self._aborts.pop(rid, None)
        elif (admit := group.choice(rid).admit) is not None:
            self.submit(admit)
        else:
            group.put(EngineGone("its log does not hold this request"))

    def forget(self, rid: str) -> None:
        """No more outputs of `rid` are wanted."""
        self._groups.pop(rid, None)

    async def stats(self, patience: float = 5.0) -> Mapping[str, Any]:
        """The engine's gauges, as its state has them, within `patience` seconds. Raises EngineGone, TimeoutError."""
        self._check_there()
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
        self._check_there()
        call = f"{self._base}-{next(self._numbers)}"
        future = self._controls[call] = asyncio.get_running_loop().create_future()
        self.submit(kind(t=0, call=call, **fields))
        try:
            return await asyncio.wait_for(future, patience)
        finally:
            self._controls.pop(call, None)

    def _check_there(self) -> None:
        if self._gone is not None:
            raise EngineGone(str(self._gone))
        if self._away:
            raise EngineAway("its process has ended and is being started again")

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
        self._close_sockets()
        self._context.term()

    def _close_sockets(self) -> None:
        for socket in self._sockets or ():
            socket.close()
        self._sockets = None

    def _send(self, message: Message) -> None:
        if self._gone is None and self._sockets is not None:
            # The queue has no limit and so never blocks; the future that pyzmq returns is done at once.
            self._sockets[0].send_multipart(to_frames(message))


def _seen(future: asyncio.Future[Any]) -> None:
    """An engine can end where nobody waits any more for it to be ready; whoever ends it says why."""
    if not future.cancelled():
        future.exception()
