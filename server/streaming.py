"""Server-sent events, and clients that hang up: whoever is gone stops costing anything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from leftfold.server.errors import ApiError

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client has hung up; there is nobody to answer."""


def frame(data: Any, name: str | None = None, event: str | None = None) -> bytes:
    """One server-sent event. `name`: its id; `event`: its type."""
    head = b"" if name is None else b"id: %b\n" % name.encode()
    head += b"" if event is None else b"event: %b\n" % event.encode()
    return head + b"data: " + orjson.dumps(data) + b"\n\n"


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, or ClientGone as soon as the client hangs up (`work` is cancelled then)."""
    return await _race(request.receive, work)


async def _race(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_hung_up(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for pending in (task, watch):
            pending.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


class EventStream(Response):
    """Sends the frames of `frames` as they come, then `closed` is called, however it ended."""

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncIterator[bytes], closed: Callable[[], None], last: bytes = DONE) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._frames = frames
        self._closed = closed
        self._last = last

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _race(receive, self._send_all(send))
        except (ClientGone, OSError):
            pass
        finally:
            self._closed()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for piece in with_errors(self._frames, self._last):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def with_errors(frames: AsyncIterator[bytes], last: bytes = DONE) -> AsyncIterator[bytes]:
    """`frames`, and if they fail midway, the error as the last event (the status has long been sent)."""
    try:
        async for piece in frames:
            yield piece
    except ApiError as error:
        yield frame(error.body())
    if last:
        yield last
