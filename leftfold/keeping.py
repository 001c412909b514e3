"""How events are kept, as the engine sees it: not at all, in place, or by a thread of their own (events/writer.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from leftfold.events import Event, EventLog, ForwardDone, Record, Tick, encode
from leftfold.events.writer import Failure


class Keeper(Protocol):
    """What the engine needs of whoever keeps its events.

    `safe`: the sequence number up to which what the events led to may leave. `strict`: whether that is what is durable.
    `failure`: why nothing is kept now. `behind`, `full`: so much waits that nothing more should be admitted, or
    planned.
    """

    @property
    def strict(self) -> bool: ...

    @property
    def safe(self) -> int: ...

    @property
    def failure(self) -> Failure | None: ...

    @property
    def behind(self) -> bool: ...

    @property
    def full(self) -> bool: ...

    def append(self, event: Event) -> int:
        """Take an event; its number. TypeError or ValueError: it cannot be kept, and nothing happened."""

    def commit(self) -> None:
        """Everything up to here is to become safe. Raises `OSError`, `LogError`."""

    def listen(self, news: Callable[[], None]) -> None:
        """Call `news`, in any thread, when `safe` or `failure` has changed otherwise than by `commit`."""

    def abandon(self, reason: str) -> None:
        """Keep nothing any more."""

    def figures(self) -> Mapping[str, Any]:
        """Gauges and counters for metrics."""

    def close(self, timeout: float | None = None) -> None:
        """Keep the rest and let go. Raises `OSError`, `LogError` when something may be lost."""

    def __iter__(self) -> Iterator[Record]:
        """What was kept before."""


class _AtOnce:
    """What has no thread is never behind, and what fails raises at once."""

    strict = False
    failure: Failure | None = None
    behind = full = False

    def listen(self, news: Callable[[], None]) -> None:
        pass  # `commit` says it all

    def abandon(self, reason: str) -> None:
        pass  # nothing is tried again


class NoLog(_AtOnce):
    """Numbers events and keeps none of them (`durability` "off"); what a log could not hold is refused all the same.

    `why`: what is wrong with the log that was asked for.
    """

    def __init__(self, why: str = "") -> None:
        self.safe = 0
        self.failure = Failure(why, lasting=True) if why else None

    def append(self, event: Event) -> int:
        if not isinstance(event, Tick | ForwardDone):
            encode(event)
        self.safe += 1
        return self.safe

    def commit(self) -> None:
        pass  # nobody waits for anything

    def figures(self) -> Mapping[str, Any]:
        return {} if self.failure is None else {"log_failures": 1, "log_failure": self.failure.reason}

    def close(self, timeout: float | None = None) -> None:
        pass  # nothing is kept

    def __iter__(self) -> Iterator[Record]:
        return iter(())


class InPlace(_AtOnce):
    """Writes in the thread that appends; for logs in memory, and where a failing disk should stop everything."""

    def __init__(self, log: EventLog) -> None:
        self.safe = log.next_seq - 1
        self._log = log

    def append(self, event: Event) -> int:
        return self._log.append(event)

    def commit(self) -> None:
        self.safe = self._log.flush()

    def figures(self) -> Mapping[str, Any]:
        return {"log_seq": self._log.next_seq - 1}

    def close(self, timeout: float | None = None) -> None:
        self._log.close()
        self.safe = self._log.next_seq - 1

    def __iter__(self) -> Iterator[Record]:
        return iter(self._log)


def keeper(log: EventLog | Keeper) -> Keeper:
    """`log` as the engine takes it."""
    return InPlace(log) if isinstance(log, EventLog) else log


__all__ = ["InPlace", "Keeper", "NoLog", "keeper"]
