"""Reading a log: records that are checked and decoded, from the beginning or from behind a snapshot."""

from __future__ import annotations

import os
import warnings
from collections import deque
from collections.abc import Iterator
from itertools import chain, islice
from typing import NamedTuple

import orjson

from leftfold.events.codec import CodecError, decode
from leftfold.events.errors import LogUnreadable, SnapshotBad, TornTail
from leftfold.events.framing import REST, SCHEMA
from leftfold.events.snapshots import Snapshot, load_snapshot
from leftfold.events.stores import existing, segment_number, snapshot_name
from leftfold.events.types import Event
from leftfold.events.upcasts import upcast
from leftfold.events.walk import Dropped, Readable, Tail, header_of, scan, walk


class Record(NamedTuple):
    """One event and its sequence number (from 1, without gaps)."""

    seq: int
    event: Event


def _record(line: bytes, seq: int, schema: int) -> Record:
    try:
        raw = orjson.loads(line)
        return Record(seq, decode(raw if schema == SCHEMA else upcast(raw, schema)))
    except (CodecError, orjson.JSONDecodeError) as error:
        raise LogUnreadable(f"record {seq}: {error}") from error


def records_of(lines: Iterator[bytes], tail: Tail, seq: int = 0) -> Iterator[Record]:
    """The records of a walk, the next of which is `seq` (0: the first that is there)."""
    for line in lines:
        seq = seq or tail.first_seq
        yield _record(line, seq, tail.schema)
        seq += 1


def records_after(store: Readable, snapshot: Snapshot, tail: Tail) -> Iterator[Record]:
    """The records after a snapshot that is one of this log. Raises `SnapshotBad` at once, others while reading."""
    lines = walk(store, tail, snapshot.seq + 1)
    first = next(lines, None)
    if tail.first_seq > snapshot.seq + 1:
        raise SnapshotBad(f"{snapshot_name(snapshot.seq)} ends before the log begins, which is at {tail.first_seq}")
    lines = lines if first is None else chain((first,), lines)
    passed = deque(enumerate(islice(lines, snapshot.seq - tail.first_seq + 1), tail.first_seq), maxlen=1)
    seq, last = passed[0] if passed else (tail.first_seq - 1, b"")
    if seq < snapshot.seq:
        raise SnapshotBad(f"{snapshot_name(snapshot.seq)} is ahead of the log, which ends at {max(0, seq)}")
    found = int(last[8:16], 16) if last else tail.prev
    if found != snapshot.chain:
        raise SnapshotBad(f"{snapshot_name(snapshot.seq)} is of another log: record {snapshot.seq} differs")
    return records_of(lines, tail, seq + 1)


def warn_torn(dropped: Dropped, what: str) -> None:
    place = f"{dropped.segment}, line {dropped.line}, byte {dropped.offset}"
    warnings.warn(f"{place}: a torn record of {dropped.size} bytes {what}", TornTail, stacklevel=3)


class LogReader:
    """A log that is only read. Iterating yields `Record`s and raises a `LogError` at the first that is wrong.

    `dropped`: the torn tail that was left out, known once the end was reached (a `TornTail` warning says so, too).
    """

    def __init__(self, store: Readable) -> None:
        self._store = store
        self._tail: Tail | None = None
        self.dropped: Dropped | None = None

    def _end(self, tail: Tail) -> None:
        if tail.dropped is not None and self.dropped is None:
            self.dropped = tail.dropped
            warn_torn(tail.dropped, "at the end of the log was left out")
        self._tail = tail

    def _known(self) -> Tail:
        if self._tail is None:
            self._end(scan(self._store))
        assert self._tail is not None
        return self._tail

    def __iter__(self) -> Iterator[Record]:
        tail = Tail()
        yield from records_of(walk(self._store, tail), tail)
        self._end(tail)

    def after(self, snapshot: Snapshot) -> Iterator[Record]:
        """The records after `snapshot`; what lies before it is not read. Raises `SnapshotBad`."""
        tail = Tail()
        return self._ended(records_after(self._store, snapshot, tail), tail)

    def _ended(self, records: Iterator[Record], tail: Tail) -> Iterator[Record]:
        yield from records
        self._end(tail)

    def lines(self) -> Iterator[bytes]:
        """The records as checked JSON objects, `crc` left out, in order, as they were written: nothing is upcast."""
        tail = Tail()
        for line in walk(self._store, tail):
            yield b"{" + line[REST:-1]
        self._end(tail)

    def snapshots(self) -> list[int]:
        """Numbers of the records after which there are snapshots, the newest first."""
        return self._store.snapshots()

    def snapshot(self, seq: int) -> Snapshot:
        """The snapshot after record `seq`, checked to be what was written. Raises `SnapshotBad`."""
        return load_snapshot(self._store, seq)

    def __len__(self) -> int:
        return self._known().next_seq - self.first_seq

    def __bool__(self) -> bool:
        return True  # a log is not "false" for being empty

    @property
    def first_seq(self) -> int:
        """The number of the first record that is there: 1, or more when the beginning was removed."""
        return begins_at(self._store)

    @property
    def next_seq(self) -> int:
        """The sequence number that the next record would have."""
        return self._known().next_seq

    @property
    def last_t(self) -> int:
        """`t` of the last record in µs, 0 when there is none."""
        return self._known().last_t


def begins_at(store: Readable) -> int:
    names = store.segments()
    if not names or segment_number(names[0]) == 1:
        return 1
    found = header_of(store, names[0])
    return 1 if found is None else found.first_seq


def read_lines(directory: str | os.PathLike[str]) -> Iterator[bytes]:
    """The records of a directory's log as checked JSON objects without `crc`. Raises `LogNotFound`, `LogDamaged`."""
    return LogReader(existing(directory)).lines()


__all__ = ["LogReader", "Record", "begins_at", "read_lines", "records_after", "records_of", "warn_torn"]
