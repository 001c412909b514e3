"""A log with a thread of its own: who appends hands records over, and never waits for a disk.

The thread encodes, checksums, writes and syncs whatever has come together meanwhile, so that a slow disk makes its
groups larger and nothing else. Two marks say how far it is: `written` (with the operating system: outlives this
process) and `durable` (on disk: outlives the machine). `safe` is that one of them up to which effects may be told.

What fails is never hidden. A write that fails has lost nothing and is tried again until it succeeds. A sync that fails
says that what was written since the last one may be lost, and that asking again proves nothing (the system forgets what
it could not write: "Can Applications Recover from fsync Failures?", Rebello et al., USENIX ATC 2020): it ends the log
at a place that is known, and nothing after it ever counts as durable.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from leftfold.events.codec import encode, is_plain
from leftfold.events.errors import LogClosed, LogError, TimeReversed
from leftfold.events.gaps import Gap
from leftfold.events.log import EventLog
from leftfold.events.reader import Record
from leftfold.events.types import Event, ForwardDone, Tick

logger = logging.getLogger("leftfold.log")

SYNC_SECONDS = 0.5
"""How long a record waits for its sync at most, where effects do not wait for it; longer where a sync takes longer."""
RETRY_SECONDS = 0.25
"""How long after a write that failed the next one is tried."""
NOTE_SECONDS = 5.0
"""How long after a note of a gap could not be written it is tried again."""


class Bounds(NamedTuple):
    """How much may wait for the disk, in records and in bytes (estimated before a record is encoded)."""

    records: int
    size: int

    def below(self, records: int, size: int) -> bool:
        """Whether so much is more than that."""
        return records > self.records or size > self.size


BEHIND = Bounds(1 << 14, 4 << 20)
"""Beyond it nothing new is admitted until the disk has caught up."""
FULL = Bounds(1 << 17, 64 << 20)
"""Beyond it no step is planned either: what is in flight still ends, and then the engine waits."""


class Failure(NamedTuple):
    """Why the log is not written now. `lasting`: it has ended and is not tried again."""

    reason: str
    lasting: bool


class LogWriter:
    """Around an `EventLog`, which belongs to the thread from the first `append` on until `close` is through.

    `append`, `commit` and `abandon` are for one thread; everything else may come from any. `strict`: effects wait until
    their record is durable, else until it is written. `seconds`: see `SYNC_SECONDS`. `note` leaves word in the log's
    folder of a log that ended while its engine went on. `news` is called in the writer's thread whenever `safe` or
    `failure` has changed.
    """

    def __init__(
        self,
        log: EventLog,
        *,
        strict: bool = False,
        seconds: float = SYNC_SECONDS,
        retry: float = RETRY_SECONDS,
        behind: Bounds = BEHIND,
        full: Bounds = FULL,
        note: Callable[[Gap], None] | None = None,
    ) -> None:
        self.strict = strict
        self.failure: Failure | None = None
        self.failures = 0
        self.syncs = 0
        self.sync_seconds = 0.0
        self.written = self.durable = log.next_seq - 1
        self._log = log
        self._seconds = seconds
        self._retry = retry
        self._behind = behind
        self._full = full
        self._leave_note = note
        self._news: Callable[[], None] = lambda: None
        self._queue: deque[tuple[Event | Callable[[int, int], None], int]] = deque()
        self._marks: deque[tuple[int, int, Callable[[int, int], None]]] = deque()
        self._next_seq, self._last_t = log.next_seq, log.last_t
        self._taken = self._handed = self._kept = 0  # weights: appended, given to the log, safe
        self._synced_at = 0.0
        self._unheard = False
        self._closing = False
        self._abandoned = ""
        self._ended = self._noted = False
        self._lost: Exception | None = None
        self._wake = threading.Lock()  # free: there is something to do; a call cheaper than an `Event`'s
        self._wake.acquire()
        self._thread: threading.Thread | None = None

    # Who appends

    def append(self, event: Event) -> int:
        """Hand an event over; its sequence number. Raises `TimeReversed`, `LogClosed`, and what `encode` raises."""
        if event.t < self._last_t or self._closing:
            self._refuse(event)
        if type(event) is Tick:
            weight = 512
        elif type(event) is ForwardDone and is_plain(event):
            weight = 256 + 6 * len(event.tokens)
        else:  # what came from outside, and may be what no record can hold, is refused here and not in the thread
            weight = len(encode(event))
        seq = self._next_seq
        if not self._ended:
            self._queue.append((event, weight))
            self._taken += weight
        self._last_t = event.t
        self._next_seq = seq + 1
        self._unheard = True
        return seq

    def _refuse(self, event: Event) -> None:
        if self._closing:
            raise LogClosed("the log was closed")
        raise TimeReversed(
            f"{type(event).__name__} has t {event.t}, but the event logged before it has {self._last_t}: give t ≥ that"
        )

    def commit(self) -> None:
        """Let the thread write what was appended; returns at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="leftfold-log", daemon=True)
            self._thread.start()
        if self._unheard:
            self._unheard = False
            self._rouse()

    def _rouse(self) -> None:
        try:
            self._wake.release()
        except RuntimeError:
            pass  # it is free already

    def when_durable(self, then: Callable[[int, int], None]) -> None:
        """Call `then`, in the writer's thread, once all that was appended by now is on disk; never if it will not be.

        It gets the number and the checksum of the last record appended, which is what a snapshot is tied to.
        """
        if not self._ended:
            self._queue.append((then, 0))
            self._unheard = True

    def listen(self, news: Callable[[], None]) -> None:
        """Call `news` from now on, in the writer's thread."""
        self._news = news

    def abandon(self, reason: str) -> None:
        """End the log, as soon as its thread hears of it: nothing that waits is handed to it any more."""
        self._abandoned = self._abandoned or reason
        self._rouse()

    def __iter__(self) -> Iterator[Record]:
        """The records that were there at the opening; before the first `append` only."""
        return iter(self._log)

    def close(self, timeout: float | None = None) -> None:
        """Write and sync the rest, and close the log; returns after `timeout` seconds at the latest.

        Raises `OSError` or `LogError` if not everything is durable then.
        """
        if not self._closing:
            self._closing = True
            self.commit()
            self._rouse()
        assert self._thread is not None
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise LogError(f"the disk does not answer; what came after record {self.durable} may be lost")
        if self._lost is not None:
            raise self._lost

    # How far it is

    @property
    def safe(self) -> int:
        """The sequence number up to which what the events led to may be told."""
        return self.durable if self.strict else self.written

    @property
    def appended(self) -> int:
        """The sequence number of the last event handed over."""
        return self._next_seq - 1

    @property
    def missing(self) -> int:
        """How many events the log has ended without."""
        return self.appended - self.written if self._ended else 0

    @property
    def behind(self) -> bool:
        """Whether so much waits that nothing more should be admitted."""
        return not self._ended and self._behind.below(self.appended - self.safe, self._taken - self._kept)

    @property
    def full(self) -> bool:
        """Whether so much waits that nothing more should be planned."""
        return not self._ended and self._full.below(self.appended - self.safe, self._taken - self._kept)

    def figures(self) -> Mapping[str, Any]:
        """Gauges and counters for metrics."""
        failure = self.failure
        return {
            "log_seq": self.appended,
            "log_durable_seq": self.durable,
            "log_waiting_bytes": 0 if self._ended else self._taken - self._kept,
            "log_syncs": self.syncs,
            "log_sync_seconds": self.sync_seconds,
            "log_failures": self.failures,
            "log_failure": "" if failure is None else failure.reason,
        }

    # The thread

    def _run(self) -> None:
        while not self._closing:
            self._wake.acquire(timeout=self._patience())
            self._turn()
        self._turn(last=True)
        self._last_words()
        try:
            self._log.close()
        except Exception as error:  # `close` raises it where it is heard
            self._lost = error
            return
        if self.failure is not None and (self._ended or self._queue):
            self._lost = LogError(f"what came after record {self.durable} may be lost: {self.failure.reason}")
        else:
            self.written = self.durable = self.appended
            self._news()

    def _last_words(self) -> None:
        """What else is to be done while the log is still ours, once all is written."""

    def _patience(self) -> float:
        """How many seconds there is nothing to do unless something is appended; -1: for ever."""
        if self._ended:
            return -1 if self._noted or not self.missing else NOTE_SECONDS
        if self.failure is not None:
            return self._retry
        if self.durable < self.written:
            return max(0.0, self._synced_at + self._seconds - time.monotonic())
        return -1

    def _turn(self, last: bool = False) -> None:
        """Write what waits, and sync it when that is due."""
        if self._abandoned:
            self._end(self._abandoned)
        if self._ended:
            self._queue.clear()
            self._note()
            return
        before = self.safe
        try:
            self._write()
            if self.durable < self.written and (self.strict or last or self._marks or self._due()):
                self._sync()
            self._reach_marks()
        except OSError as error:
            if self._log.broken:
                self._end(f"what was written could not be made durable: {error.strerror or error}")
            else:
                self._failed(error.strerror or str(error))
        except Exception as error:  # a programmer's error: nothing after this record can be written
            logger.exception("record %d cannot be written", self._log.next_seq)
            self._end(f"record {self._log.next_seq} cannot be written: {type(error).__name__}: {error}")
        else:
            if self.failure is not None and not self._ended:
                logger.warning("the log is written again, up to record %d", self.written)
                self.failure = None
                self._news()
                return
        if self.safe != before:
            self._news()

    def _due(self) -> bool:
        return time.monotonic() - self._synced_at >= self._seconds

    def _write(self) -> None:
        queue = self._queue
        while queue:
            item, weight = queue[0]
            if callable(item):
                self._marks.append((*self._log.mark, item))
            else:
                self._log.append(item)  # raises before it takes the event, so that the next try goes on with it
            queue.popleft()
            self._handed += weight
        handed = self._handed
        self.written = self._log.flush()
        if not self.strict:
            self._kept = handed

    def _sync(self) -> None:
        handed, begun = self._handed, time.monotonic()
        self.durable = self._log.sync()
        self._synced_at = time.monotonic()
        self.sync_seconds += self._synced_at - begun
        self.syncs += 1
        if self.strict:
            self._kept = handed

    def _reach_marks(self) -> None:
        while self._marks and self._marks[0][0] <= self.durable:
            seq, crc, then = self._marks.popleft()
            try:
                then(seq, crc)
            except Exception:  # the boundary: whoever waits for a mark does not stop the log
                logger.exception("what was to happen after record %d failed", seq)

    def _failed(self, reason: str) -> None:
        """A write failed; what waits will be tried again."""
        if self.failure is None or self.failure.reason != reason:
            logger.error("the log cannot be written, trying again: %s", reason)
            self.failures += 1
            self.failure = Failure(reason, lasting=False)
            self._news()

    def _end(self, reason: str) -> None:
        if self._ended:
            return
        self._ended = True
        self.failures += 1
        self.failure = Failure(reason, lasting=True)
        logger.error("the log ends: record %d is the last that is surely on disk: %s", self.durable, reason)
        self._news()

    def _note(self) -> None:
        """Leave word of what is missing, as soon as the disk lets us."""
        if self._noted or not self.missing or self.failure is None:
            return
        try:
            if self._leave_note is not None:
                self._leave_note(Gap(self.durable, self.failure.reason))
        except OSError as error:
            logger.debug("no note of the gap after record %d yet: %s", self.durable, error)
        else:
            self._noted = True


__all__ = ["BEHIND", "FULL", "Bounds", "Failure", "LogWriter"]
