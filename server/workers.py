"""Work that would hold up the event loop, in a few threads of its own; what waits for them is bounded."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from leftfold.server.errors import unavailable

T = TypeVar("T")
_IDLE_SECONDS = 5.0


class Workers:
    """At most `count` threads while there is work. They don't keep the process from ending.

    Beyond `most` pieces of work that have not ended, more is refused with a 503.
    """

    def __init__(self, name: str, count: int, most: int) -> None:
        self._name = name
        self._count = count
        self._most = most
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._news = threading.Condition()
        self._threads = 0
        self._open = 0

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work`; work whose caller is gone before it begins is dropped. Raises ApiError when full."""
        future: Future[T] = Future()
        with self._news:
            if self._open >= self._most:
                raise unavailable(f"too much {self._name} is waiting to be read; try again")
            self._open += 1
            self._waiting.append((future, work))
            if self._threads < min(self._count, self._open):
                self._threads += 1
                threading.Thread(target=self._serve, name=self._name, daemon=True).start()
            self._news.notify()
        return await asyncio.wrap_future(future)

    def _serve(self) -> None:
        while (task := self._next()) is not None:
            future, work = task
            try:
                if future.set_running_or_notify_cancel():
                    future.set_result(work())
            except BaseException as error:  # carried over to the one who waits
                future.set_exception(error)
            finally:
                with self._news:
                    self._open -= 1
            del task, future, work  # nothing is kept while waiting

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        with self._news:
            while not self._waiting:
                if not self._news.wait(_IDLE_SECONDS) and not self._waiting:
                    self._threads -= 1
                    return None
            return self._waiting.popleft()
