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
from leftfold.events.framing import PREFIX, REST, check_header, damage
from leftfold.events.shapes import is_integer
from leftfold.events.stores import segment_name, segment_number


class Readable(Protocol):
    """The part of a store that reading needs."""

    def segments(self) -> list[str]: ...

    def open(self, name: str) -> BinaryIO: ...


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

    `segment`: number of the segment (0: none yet); `name`: its file; `size`: bytes of whole lines in it; `crc`: of
    the last line; `last`: the last event's line; `dropped`: the torn tail, once the walk came to it.
    """

    segment: int = 0
    name: str = ""
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


def walk(store: Readable, tail: Tail) -> Iterator[bytes]:
    """Every event's line (newline included), in order, headers checked and left out.

    `tail` is right once the walk is exhausted. Raises `LogDamaged`, `LogSchemaUnknown`.
    """
    names = store.segments()
    for name in names:
        if segment_number(name) != tail.segment + 1:
            raise LogDamaged(segment_name(tail.segment + 1), 1, 0, f"the segment is missing; {name} comes next")
        tail.segment, tail.name, tail.size = tail.segment + 1, name, 0
        with store.open(name) as file:
            yield from _walk_segment(file, tail, may_be_torn=name is names[-1] and not name.endswith(".zst"))


def _walk_segment(file: BinaryIO, tail: Tail, may_be_torn: bool) -> Iterator[bytes]:
    name, crc, seq = tail.name, tail.crc, tail.next_seq
    number = offset = 0
    line = b""
    try:
        for line in file:
            number += 1
            if line[-1] != 10:
                if not may_be_torn:
                    raise LogDamaged(name, number, offset, "the segment ends in the middle of a record")
                tail.dropped = Dropped(name, number, offset, len(line))
                break
            if number == 1:
                crc = check_header(line, seq, crc, name)
            else:
                checked = extend(crc, line[REST:-1])
                if line[:REST] != PREFIX % checked or not line.startswith(b'"seq":%d,' % seq, REST):
                    raise damage(line, seq, crc, name, number, offset)
                crc = checked
                seq += 1
                yield line
                tail.last = line
            offset += len(line)
    except (zstandard.ZstdError, OSError) as error:
        raise LogDamaged(name, number + 1, offset, f"cannot be read: {error}") from error
    if number == 0 and not may_be_torn:
        raise LogDamaged(name, 1, 0, "the segment is empty")
    tail.size, tail.crc, tail.next_seq = offset, crc, seq


def scan(store: Readable) -> Tail:
    """Check a whole log and say where it ends. Raises `LogDamaged`, `LogSchemaUnknown`."""
    tail = Tail()
    deque(walk(store, tail), maxlen=0)
    return tail
