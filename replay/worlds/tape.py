"""Records by number: kept as compressed blocks of lines, decoded where they are looked at."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import orjson
import zstandard

from leftfold.events import Event, Record, decode, encode

BLOCK = 512
"""Records of a block: decoding one takes some milliseconds."""
KEPT = 24
"""So many decoded blocks are kept."""


class Tape:
    """Append-only; record `first` comes first. One thread appends, any may read what was appended before."""

    def __init__(self, first: int = 1) -> None:
        self.first = first
        self._blocks: list[bytes] = []
        self._open: list[bytes] = []
        self._decoded: OrderedDict[int, list[Event]] = OrderedDict()
        self._lock = threading.Lock()
        self._pack = zstandard.ZstdCompressor(level=3).compress

    @property
    def last(self) -> int:
        """The number of the newest record, `first - 1` when there is none."""
        return self.first - 1 + len(self._blocks) * BLOCK + len(self._open)

    def append(self, event: Event) -> int:
        """Keep a record; its number."""
        seq = self.last + 1
        line = encode(event, seq)
        with self._lock:
            self._open.append(line)
            if len(self._open) == BLOCK:
                self._blocks.append(self._pack(b"\n".join(self._open)))
                self._open = []
        return seq

    def until(self, seq: int) -> Tape:
        """A tape with the records up to `seq`, their blocks shared. Raises `IndexError`."""
        twin = Tape(self.first)
        if seq < self.first:
            return twin
        block, at = self._place(seq)
        with self._lock:
            twin._blocks = self._blocks[:block]
            lines = self._open if block == len(self._blocks) else self._lines(block)
            twin._open = lines[: at + 1]
        if len(twin._open) == BLOCK:
            twin._blocks.append(self._pack(b"\n".join(twin._open)))
            twin._open = []
        return twin

    def raw(self, seq: int) -> dict[str, Any]:
        """The record as its line in a log has it. Raises `IndexError`."""
        found: dict[str, Any] = orjson.loads(self._line(seq))
        return found

    def event(self, seq: int) -> Event:
        """The record's event. Raises `IndexError`."""
        block, at = self._place(seq)
        with self._lock:
            if block == len(self._blocks):
                line = self._open[at]
            else:
                return self._events(block)[at]
        return decode(orjson.loads(line))

    def between(self, first: int, last: int) -> Iterator[Record]:
        """Records `first` … `last`, both included."""
        for seq in range(first, last + 1):
            yield Record(seq, self.event(seq))

    def _place(self, seq: int) -> tuple[int, int]:
        if not self.first <= seq <= self.last:
            raise IndexError(f"there is no record {seq}; there are {self.first} to {self.last}")
        return divmod(seq - self.first, BLOCK)

    def _line(self, seq: int) -> bytes:
        block, at = self._place(seq)
        with self._lock:
            return self._open[at] if block == len(self._blocks) else self._lines(block)[at]

    def _lines(self, block: int) -> list[bytes]:
        return zstandard.ZstdDecompressor().decompress(self._blocks[block]).split(b"\n")

    def _events(self, block: int) -> list[Event]:
        found = self._decoded.get(block)
        if found is None:
            found = self._decoded[block] = [decode(orjson.loads(line)) for line in self._lines(block)]
            if len(self._decoded) > KEPT:
                self._decoded.popitem(last=False)
        else:
            self._decoded.move_to_end(block)
        return found


__all__ = ["BLOCK", "Tape"]
