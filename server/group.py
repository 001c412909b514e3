"""The choices of one HTTP request: what the engine says of them, for the one who drives it and for all who listen."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from leftfold.events import Abort
from leftfold.server.choices import DIVERGED, Choice
from leftfold.server.wire import Output


class EngineGone(Exception):
    """The engine's process has ended; nothing can be answered any more."""


class EngineStopping(EngineGone):
    """The engine was told to stop; what it has not answered by then is not answered any more."""


class EngineAway(EngineGone):
    """The engine's process has ended and another is being started."""


class Asked(Protocol):
    """What a group needs of the engine's client."""

    def end(self, abort: Abort) -> None:
        """Ends a request."""

    def ask_again(self, choice: Choice) -> None:
        """Something of a choice has not come."""

    def forget(self, rid: str) -> None:
        """No more outputs of `rid` are wanted."""


class Group:
    """The choices of one HTTP request. Iterate for `(index, output)`; `close` aborts what has not ended.

    `choices` has all that has come of each, which is what those who join later read.
    """

    def __init__(self, client: Asked, choices: Sequence[Choice]) -> None:
        self._client = client
        self.choices = list(choices)
        self._index = {choice.rid: i for i, choice in enumerate(choices)}
        self._open = dict.fromkeys(self._index)
        self._live = {choice.rid for choice in choices if choice.end is None}
        self._stopped: set[str] = set()  # by a stop string; what comes yet is the end, with its counts
        self._arrived: deque[Output | EngineGone] = deque()
        self._news = asyncio.Event()
        self._ended = asyncio.Event()
        self.gone: EngineGone | None = None
        self.aborted = False
        self.listeners: list[Callable[[], None]] = []
        """Called whenever something has come."""
        self.on_end: Callable[[], None] = lambda: None
        """Called when the last choice has ended."""
        if not self._live:
            self._ended.set()

    def choice(self, rid: str) -> Choice:
        """The choice that the engine knows by `rid`."""
        return self.choices[self._index[rid]]

    def put(self, item: Output | EngineGone) -> None:
        """Takes what the engine says about one of the choices; what is not new is dropped."""
        if isinstance(item, EngineGone):
            self.gone = item
            self._arrived.append(item)
            self._ended.set()
        else:
            choice = self.choice(item.rid)
            if choice.lacks(item):
                self._client.ask_again(choice)
                return
            new = choice.take(item)
            if new is None:
                return
            if new.error is not None and new.error.get("code") == DIVERGED:
                self._client.end(Abort(t=0, rid=item.rid, reason=DIVERGED))
            self._arrived.append(new)
            if new.finish_reason is not None:
                self._end(item.rid)
        self._news.set()
        for listener in self.listeners:
            listener()

    @property
    def over(self) -> bool:
        """Whether every choice has ended, or the engine is gone."""
        return self._ended.is_set()

    async def ended(self) -> None:
        """Waits until every choice has ended, whether or not somebody has read that already."""
        await self._ended.wait()

    async def begun(self) -> None:
        """Waits until something of a choice is there, whoever has read it already."""
        if self.gone is not None or any(choice.tokens or choice.end is not None for choice in self.choices):
            return
        news = asyncio.Event()
        self.listeners.append(news.set)
        try:
            await news.wait()
        finally:
            self.listeners.remove(news.set)

    def abort(self, reason: str) -> None:
        """Ends what has not ended; unlike `close`, those who iterate hear the end."""
        for rid in [rid for rid in self._open if rid not in self._stopped]:
            self.aborted = True
            self._client.end(Abort(t=0, rid=rid, reason=reason))

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
            self._client.end(Abort(t=0, rid=output.rid, reason="stop_string", keep=keep))

    def close(self) -> int:
        """Aborts the choices that have not ended (the client is gone, or the request failed); how many those are."""
        live = [rid for rid in self._open if rid in self._live and rid not in self._stopped]
        for choice in self.choices:
            choice.cut()
        for rid in list(self._open):
            self._forget(rid)
        for rid in live:
            self._client.end(Abort(t=0, rid=rid, reason="client_gone"))
        return len(live)

    def _forget(self, rid: str) -> None:
        del self._open[rid]
        self._end(rid)
        self._client.forget(rid)

    def _end(self, rid: str) -> None:
        self._live.discard(rid)
        if not self._live and not self._ended.is_set():
            self._ended.set()
            self.on_end()


__all__ = ["EngineAway", "EngineGone", "EngineStopping", "Group"]
