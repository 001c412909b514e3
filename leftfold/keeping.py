"""How events are kept, as the engine sees it: not at all, in place, or by a thread of their own (events/writer.py)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from leftfold.events import Event, EventLog, ForwardDone, Record, Tick, encode
from leftfold.events.compaction import Retention
from leftfold.events.gaps import note_gap
from leftfold.events.writer import Failure, LogWriter
from leftfold.replay.fold import Fold
from leftfold.replay.snapshots import begin, capture
from leftfold.upkeep import Upkeep

SNAPSHOT_EVERY = 20_000
"""Events between two snapshots: as many as are folded in about a second."""
KEEP_ALL = Retention()
SAVE_SECONDS = 5.0
"""How long a stop waits for its snapshot; without it the next start folds more of the log."""


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

    def begin(self) -> tuple[Fold, Iterator[Record]]:
        """A fold of what was kept before, as far as a snapshot has it, and the records that are still to be taken."""

    def snapshot_due(self, seq: int) -> bool:
        """Whether `snapshot` should be called after event `seq`."""

    def snapshot(self, fold: Fold) -> None:
        """Keep what the fold is after the last event that was appended, so that a start need not fold all of them."""


class _AtOnce:
    """What has no thread is never behind, and what fails raises at once."""

    strict = False
    failure: Failure | None = None
    behind = full = False

    def listen(self, news: Callable[[], None]) -> None:
        pass  # `commit` says it all

    def abandon(self, reason: str) -> None:
        pass  # nothing is tried again

    def snapshot_due(self, seq: int) -> bool:
        return False

    def snapshot(self, fold: Fold) -> None:
        pass  # all is folded again, if there is anything


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

    def begin(self) -> tuple[Fold, Iterator[Record]]:
        return Fold(), iter(())


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

    def begin(self) -> tuple[Fold, Iterator[Record]]:
        return begin(self._log)


class KeptLog(LogWriter):
    """A log with its own thread, and in a directory all that lies beside it: snapshots, compressed segments, notes.

    `snapshot_every`: events between two snapshots, 0 for none. `options`: those of `LogWriter`.
    """

    def __init__(
        self,
        log: EventLog,
        directory: Path | None = None,
        *,
        snapshot_every: int = SNAPSHOT_EVERY,
        retention: Retention = KEEP_ALL,
        **options: Any,
    ) -> None:
        if directory is not None:
            options.setdefault("note", partial(note_gap, directory))
        super().__init__(log, **options)
        self._every = snapshot_every if directory is not None else 0
        self._upkeep = None if directory is None else Upkeep(directory, retention)
        self._begun: tuple[Fold, Iterator[Record]] | None = None
        self._newest = max(log.snapshots(), default=0)
        self._taken_at = 0
        self._working = False

    def begin(self) -> tuple[Fold, Iterator[Record]]:
        """See `Keeper`; the same each time, until something is appended. Raises `NotStarted`, warns as snapshots do."""
        if self._begun is None:
            self._begun = begin(self._log)
        return self._begun

    def append(self, event: Event) -> int:
        self._begun = None
        return super().append(event)

    def snapshot_due(self, seq: int) -> bool:
        due = 0 < self._every <= seq - self._newest and self.failure is None
        return due and self._upkeep is not None and self._upkeep.done >= self._taken_at  # one at a time

    def snapshot(self, fold: Fold) -> None:
        if not self._every or self.failure is not None or fold.seq <= self._newest:
            return
        taken = capture(fold)
        self._newest = self._taken_at = fold.seq

        def save(seq: int, crc: int) -> None:
            if seq == taken.seq and self._upkeep is not None:  # else the fold stopped short of the log's end
                self._upkeep.save(taken, crc)

        self.when_durable(save)

    def commit(self) -> None:
        if not self._working:
            self._working = True
            if self._upkeep is not None:
                self._upkeep.start()
        super().commit()

    def _last_words(self) -> None:
        if self._upkeep is not None:
            self._upkeep.close(SAVE_SECONDS)


def await_safe(log: Keeper, seq: int, seconds: float = 1.0) -> None:
    """Returns once event `seq` is safe, or after so many seconds, or where the log fails; it was committed before."""
    end = time.monotonic() + seconds
    while log.safe < seq and log.failure is None and time.monotonic() < end:
        time.sleep(0.0002)


def keeper(log: EventLog | Keeper) -> Keeper:
    """`log` as the engine takes it."""
    return InPlace(log) if isinstance(log, EventLog) else log


__all__ = ["SNAPSHOT_EVERY", "InPlace", "Keeper", "KeptLog", "NoLog", "await_safe", "keeper"]
