"""The durable log of events as one process appends to it, in memory or in a directory (see docs/log-format.md)."""

from __future__ import annotations

import os
import warnings
from collections import deque
from collections.abc import Iterator
from itertools import islice
from threading import Lock
from types import TracebackType
from typing import Self

from leftfold.events.codec import encode
from leftfold.events.errors import LogBroken, LogClosed, SnapshotPassedOver, TimeReversed
from leftfold.events.framing import REST, SCHEMA, frame, header
from leftfold.events.reader import LogReader, Record, begins_at, records_after, records_of, warn_torn
from leftfold.events.snapshots import Snapshot, load_snapshot
from leftfold.events.stores import DirectoryStore, MemoryStore, Store, existing, snapshot_name
from leftfold.events.types import Event
from leftfold.events.walk import Dropped, Tail, scan, walk

SEGMENT_BYTES = 64 << 20
FLUSH_BYTES = 1 << 18  # an append writes the records before it out once so much waits
STALL_BYTES = 1 << 24  # … and waits for a writer that is busy once so much waits


class EventLog:
    """A log that is appended to by one thread; `flush` and `sync` may come from another.

    Sequence numbers start at 1 and have no gaps. `append` only queues the record: it is with the operating system
    after `flush` and durable after `sync`. A write that fails (a full disk) raises `OSError` and loses nothing: what
    could not be written stays queued, in order, and the next `flush` goes on where the disk stopped. `append` may
    raise it as well, and has then not taken its event.
    """

    dropped: Dropped | None

    def __init__(
        self, directory: str | os.PathLike[str] | None = None, *, segment_bytes: int = SEGMENT_BYTES,
        store: Store | None = None,
    ) -> None:  # fmt: skip
        """Open the log in `directory` for appending (see `open`), or the one in `store`."""
        if (directory is None) == (store is None):
            raise TypeError("give a directory or a store")
        if segment_bytes < 1:
            raise ValueError(f"segment_bytes is {segment_bytes}, must be positive")
        self._store: Store = store if store is not None else DirectoryStore(directory or "")
        self._segment_bytes = segment_bytes
        self._io = Lock()
        self._queue: deque[bytes | int] = deque()  # lines; a number starts that segment
        self._half = memoryview(b"")  # the rest of a write that was cut short
        self._broken: OSError | None = None
        self._closed = False
        self._taken = self._written = 0  # bytes, so that the difference waits
        try:
            self._resume()
        except BaseException:
            self._store.close()
            raise

    @classmethod
    def memory(cls, *, segment_bytes: int = SEGMENT_BYTES) -> Self:
        """A log that lives and dies with this object."""
        return cls(store=MemoryStore(), segment_bytes=segment_bytes)

    @classmethod
    def open(cls, directory: str | os.PathLike[str], *, segment_bytes: int = SEGMENT_BYTES) -> Self:
        """A directory's log, for appending; made when it is not there.

        Every record after the newest snapshot (all, if there is none) is checked to be what was written. A torn tail is
        cut off, with a `TornTail` warning and as `dropped`; a snapshot of what the log has lost is removed. What is
        left is durable when this returns.
        Raises `LogLocked`, `LogDamaged`, `LogSchemaUnknown`, `LogUnreadable`, `OSError`.
        """
        return cls(directory, segment_bytes=segment_bytes)

    @staticmethod
    def read(directory: str | os.PathLike[str]) -> LogReader:
        """A directory's log, for reading; needs no lock and changes nothing. Raises `LogNotFound`."""
        return LogReader(existing(directory))

    def _resume(self) -> None:
        if names := self._store.segments():
            self._store.confirm(names[-1])  # segments before it were synced before it was begun
        snapshots = self._store.snapshots()
        tail = scan(self._store, holding=snapshots[0] if snapshots else 0)
        self._first_seq = begins_at(self._store)  # the last that may fail to be read: from here on the log is changed
        self.dropped = tail.dropped
        if tail.dropped is not None:
            self._store.truncate(tail.name, tail.size)
            warn_torn(tail.dropped, "at the end of the log was cut off")
        self._crc, self._next_seq, self._last_t = tail.crc, tail.next_seq, tail.last_t
        self._segment, self._size = tail.segment, tail.size
        if tail.segment and not tail.size:
            self._segment -= 1  # its header was torn and is written again
        self._drop_ahead(snapshots)
        if tail.size and not tail.name.endswith(".zst") and tail.schema == SCHEMA:
            self._queue.append(self._segment)
        else:
            self._size = self._segment_bytes  # full: the first append opens a segment

    def _drop_ahead(self, snapshots: list[int]) -> None:
        """Records that were lost get other content: no snapshot may remember them."""
        for seq in snapshots:
            if seq >= self._next_seq:
                self._store.remove_snapshot(seq)
                text = f"{snapshot_name(seq)} is ahead of the log, which ends at {self._next_seq - 1}: removed"
                warnings.warn(text, SnapshotPassedOver, stacklevel=3)

    # Appending

    def append(self, event: Event) -> int:
        """Queue an event and give its sequence number. Raises `TimeReversed`, `LogClosed`, `LogBroken`, `OSError`."""
        t = event.t
        if t < self._last_t or self._closed or self._broken:
            self._refuse(event)
        if self._taken - self._written > FLUSH_BYTES:
            self._relieve()
        seq = self._next_seq
        body = encode(event, seq)
        size = len(body) + REST
        if self._size + size > self._segment_bytes:
            self._rotate(seq)
        line, self._crc = frame(body, self._crc)
        self._queue.append(line)
        self._size += size
        self._taken += size
        self._last_t = t
        self._next_seq = seq + 1
        return seq

    def _refuse(self, event: Event) -> None:
        self._check_open()
        kind = type(event).__name__
        raise TimeReversed(f"{kind} has t {event.t}, but the event logged before it has {self._last_t}: give t ≥ that")

    def _check_open(self) -> None:
        if self._broken is not None:
            raise LogBroken(f"an earlier sync failed ({self._broken}); open the log again") from self._broken
        if self._closed:
            raise LogClosed("the log was closed")

    def _rotate(self, seq: int) -> None:
        self._segment += 1
        line, self._crc = header(seq, self._crc)
        self._queue.append(self._segment)
        self._queue.append(line)
        self._size = len(line)
        self._taken += len(line)

    def _relieve(self) -> None:
        """Write the queue out, unless another thread is at it and has not fallen far behind."""
        if self._io.acquire(blocking=self._taken - self._written > STALL_BYTES):
            try:
                self._drain()
            finally:
                self._io.release()

    # Writing

    @property
    def mark(self) -> tuple[int, int]:
        """Number and checksum of the last record appended: what a snapshot of the state after it is tied to."""
        return self._next_seq - 1, self._crc

    def flush(self) -> int:
        """Hand everything queued to the operating system; the last sequence number handed over. Raises `OSError`."""
        self._check_open()
        upto = self._next_seq - 1
        with self._io:
            self._drain()
        return upto

    def sync(self) -> int:
        """Make everything appended so far durable; the last sequence number that is. Raises `OSError`, `LogBroken`.

        A failed sync breaks the log: the system may have dropped what it could not write, so a second try proves
        nothing.
        """
        self._check_open()
        upto = self._next_seq - 1
        with self._io:
            self._drain()
            self._confirm()
        return upto

    def _confirm(self) -> None:
        try:
            self._store.sync()
        except OSError as error:
            self._broken = error
            raise

    def _drain(self) -> None:
        while True:
            while self._half:
                done = self._store.write(self._half)
                self._half = self._half[done:]
                self._written += done
            if not self._queue:
                return
            if isinstance(self._queue[0], int):
                self._confirm()  # no segment may be durable before the one before it
                self._store.start(self._queue[0])
                self._queue.popleft()
            self._half = memoryview(b"".join(self._lines()))

    def _lines(self) -> Iterator[bytes]:
        while self._queue and isinstance(line := self._queue[0], bytes):
            self._queue.popleft()
            yield line

    def close(self) -> None:
        """Write everything out, make it durable and let go of the lock. Raises `OSError` when that fails."""
        if self._closed:
            return
        clean = False
        try:
            if self._broken is None:
                self.sync()
                clean = True
        finally:
            self._closed = True
            self._store.close(clean)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Reading

    def __iter__(self) -> Iterator[Record]:
        """The records appended before iteration began. Raises `LogDamaged`, `LogUnreadable`."""
        if not self._closed and self._broken is None:
            self.flush()
        tail = Tail()
        yield from islice(records_of(walk(self._store, tail), tail), len(self))

    def after(self, snapshot: Snapshot) -> Iterator[Record]:
        """The same, after `snapshot`; what lies before it is not read. Raises `SnapshotBad` for one of another log."""
        if not self._closed and self._broken is None:
            self.flush()
        return islice(records_after(self._store, snapshot, Tail()), max(0, self._next_seq - 1 - snapshot.seq))

    def snapshots(self) -> list[int]:
        """Numbers of the records after which there are snapshots, the newest first."""
        return self._store.snapshots()

    def snapshot(self, seq: int) -> Snapshot:
        """The snapshot after record `seq`, checked to be what was written. Raises `SnapshotBad`."""
        return load_snapshot(self._store, seq)

    @property
    def broken(self) -> bool:
        """Whether a sync has failed, so that nothing more is taken."""
        return self._broken is not None

    def __len__(self) -> int:
        return self._next_seq - self._first_seq

    def __bool__(self) -> bool:
        return True  # a log is not "false" for being empty

    @property
    def first_seq(self) -> int:
        """The number of the first record that was there at the opening: 1, or more when the beginning was removed."""
        return self._first_seq

    @property
    def next_seq(self) -> int:
        """The sequence number of the next event."""
        return self._next_seq

    @property
    def last_t(self) -> int:
        """`t` of the last event in µs, 0 when there is none."""
        return self._last_t


__all__ = ["EventLog"]
