"""Reading a log from its first line to its last whole one, every line checked against the one before."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple, Protocol

import orjson
import zstandard
from google_crc32c import extend

from leftfold.events.errors import LogDamaged, LogUnreadable
from leftfold.events.framing import PREFIX, REST, SCHEMA, Header, check_follows, damage, read_header
from leftfold.events.shapes import is_integer
from leftfold.events.stores import segment_name, segment_number


class Readable(Protocol):
    """The part of a store that reading needs."""

    def segments(self) -> list[str]: ...

    def open(self, name: str) -> BinaryIO: ...

    def snapshots(self) -> list[int]: ...

    def read_snapshot(self, seq: int) -> bytes: ...


class Dropped(NamedTuple):
    """A torn tail: the `size` bytes from `offset` on, on line `line` of the last segment, hold no whole record."""

    segment: str
    line: int
    offset: int
    size: int

    def as_dict(self) -> dict[str, Any]:
        """The place and the size as plain data."""
        return {"segment": self.segment, "line": self.line, "byte": self.offset, "size": self.size}


@dataclass(slots=True)
class Tail:
    """Where a walk stands after the lines it has passed.

    `first_seq`, `prev`: number of the first record walked to and checksum of the line before it, known once the first
    header is read. `segment`: number of the segment (0: none yet); `name`: its file; `schema`: its schema; `size`:
    bytes of whole lines in it; `crc`: of the last line; `last`: the last event's line; `dropped`: the torn tail, once
    the walk came to it.
    """

    first_seq: int = 0
    prev: int = 0
    segment: int = 0
    name: str = ""
    schema: int = SCHEMA
    size: int = 0
    crc: int = 0
    next_seq: int = 1
    last: bytes = b""
    dropped: Dropped | None = None

    @property
    def last_t(self) -> int:
        """`t` of the last event, 0 when there is none. Raises `LogUnreadable`."""
        if not self.last:
            return 0
        try:
            t = orjson.loads(self.last).get("t")
        except ValueError as error:
            raise LogUnreadable(f"record {self.next_seq - 1}: {error}") from error
        if not is_integer(t):
            raise LogUnreadable(f"record {self.next_seq - 1}: t {t!r} is not an integer")
        return int(t)


def walk(store: Readable, tail: Tail, holding: int = 0) -> Iterator[bytes]:
    """Every event's line (newline included), in order, headers checked and left out.

    `holding`: begin with the segment that holds the record of this number; 0: with the first that is there. What lies
    before it is not looked at. `tail` is right once the walk is exhausted. Raises `LogDamaged`, `LogSchemaUnknown`.
    """
    names = store.segments()
    if holding:
        names = names[_segment_of(store, names, holding) :]
    for at, name in enumerate(names):
        if at and segment_number(name) != tail.segment + 1:
            raise LogDamaged(segment_name(tail.segment + 1), 1, 0, f"the segment is missing; {name} comes next")
        tail.segment, tail.name, tail.size = segment_number(name), name, 0
        with _opened(store, name) as file:
            yield from _walk_segment(file, tail, may_be_torn=name is names[-1] and not name.endswith(".zst"))
    if tail.segment > 1 and not tail.first_seq:
        raise LogDamaged(tail.name, 1, 0, "the segment has no header, and no segment stands before it")


def header_of(store: Readable, name: str) -> Header | None:
    """What a segment's first line says; None if that is torn. Raises `LogDamaged`, `LogSchemaUnknown`."""
    try:
        with _opened(store, name) as file:
            line = file.readline()
    except (zstandard.ZstdError, OSError) as error:
        raise LogDamaged(name, 1, 0, f"cannot be read: {error}") from error
    return read_header(line, name) if line.endswith(b"\n") else None


def _opened(store: Readable, name: str) -> BinaryIO:
    try:
        return store.open(name)
    except FileNotFoundError as error:
        raise LogDamaged(name, 1, 0, "the segment was removed while the log was read") from error
    except OSError as error:
        raise LogDamaged(name, 1, 0, f"cannot be read: {error}") from error


def _segment_of(store: Readable, names: list[str], seq: int) -> int:
    """Index of the segment that holds `seq`, or would: the last one that does not begin after it."""
    for at in range(len(names) - 1, 0, -1):
        found = header_of(store, names[at])
        if found is not None and found.first_seq <= seq:
            return at
    return 0


def _walk_segment(file: BinaryIO, tail: Tail, may_be_torn: bool) -> Iterator[bytes]:
    try:
        line = file.readline()
    except (zstandard.ZstdError, OSError) as error:
        raise LogDamaged(tail.name, 1, 0, f"cannot be read: {error}") from error
    if not line:
        if not may_be_torn:
            raise LogDamaged(tail.name, 1, 0, "the segment is empty")
    elif line[-1] != 10:
        _tear(tail, 1, 0, line, may_be_torn)
    else:
        tail.crc, tail.next_seq = _enter(line, tail)
        tail.size = len(line)
        yield from walk_lines(file, tail, 2, may_be_torn)


def _tear(tail: Tail, number: int, offset: int, line: bytes, may_be_torn: bool) -> None:
    if not may_be_torn:
        raise LogDamaged(tail.name, number, offset, "the segment ends in the middle of a record")
    tail.dropped = Dropped(tail.name, number, offset, len(line))


def walk_lines(file: BinaryIO, tail: Tail, number: int, may_be_torn: bool) -> Iterator[bytes]:
    """The events' lines from line `number` on; `tail` stands at the end of the line before. Raises `LogDamaged`."""
    name, crc, seq, offset = tail.name, tail.crc, tail.next_seq, tail.size
    try:
        for line in file:
            if line[-1] != 10:
                _tear(tail, number, offset, line, may_be_torn)
                break
            checked = extend(crc, line[REST:-1])
            if line[:REST] != PREFIX % checked or not line.startswith(b'"seq":%d,' % seq, REST):
                raise damage(line, seq, crc, name, number, offset)
            crc = checked
            seq += 1
            yield line
            tail.last = line
            offset += len(line)
            number += 1
    except (zstandard.ZstdError, OSError) as error:
        raise LogDamaged(name, number, offset, f"cannot be read: {error}") from error
    tail.size, tail.crc, tail.next_seq = offset, crc, seq


def _enter(line: bytes, tail: Tail) -> tuple[int, int]:
    """The header of the segment that the walk has come to: its checksum, and the number of its first record."""
    found = read_header(line, tail.name)
    if tail.first_seq:
        check_follows(found, tail.next_seq, tail.crc, tail.name)
    elif tail.segment == 1:
        check_follows(found, 1, 0, tail.name)
    else:
        tail.crc, tail.next_seq = found.prev, found.first_seq
    if not tail.first_seq:
        tail.first_seq, tail.prev = found.first_seq, found.prev
    tail.schema = found.schema
    return found.crc, found.first_seq


def scan(store: Readable, holding: int = 0) -> Tail:
    """Check a log (see `walk`) and say where it ends. Raises `LogDamaged`, `LogSchemaUnknown`."""
    tail = Tail()
    deque(walk(store, tail, holding), maxlen=0)
    return tail
