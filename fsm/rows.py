"""Rows: sets of seats as columns, and what a plan's rows look like to whoever asks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from leftfold.events.plan import Column, IntArray, Row, RowSource, TokenArray, as_list
from leftfold.fsm.limits import demand
from leftfold.fsm.request import Seat

_order = attrgetter("order")
_SIZE = np.dtype(np.int64).itemsize


def items(column: Column) -> list[int] | memoryview:
    """The column for who looks at single entries of it, which cost half as much from a view as from an array."""
    return column.data if isinstance(column, np.ndarray) else column


class RowSet:
    """Seats in the order they joined, as a list and as an index column. Immutable: edges make a new one, and so does
    a change of ranks.
    """

    __slots__ = ("_last_class", "seats", "slots")

    def __init__(self, seats: list[Seat], slots: IntArray) -> None:
        self.seats = seats
        self.slots = slots
        self._last_class: Any = None

    @classmethod
    def of(cls, seats: list[Seat]) -> RowSet:
        """The set of these seats."""
        return cls(seats, np.array([seat.slot for seat in seats], np.int64))

    def __len__(self) -> int:
        return len(self.seats)

    def last_class(self, least: Any) -> Any:
        """The largest `rank[0]` of all rows, looked for once; `least` where there are none."""
        if not self.seats:
            return least
        if self._last_class is None:
            self._last_class = max([seat.request.rank[0] for seat in self.seats])
        return self._last_class

    def without(self, indices: Sequence[int], joined: Sequence[Seat] = ()) -> RowSet:
        """The set less the rows at `indices` (ascending), with `joined` (ascending by `order`) put in their places."""
        seats, slots = self.seats.copy(), bytearray(self.slots.data)
        for index in reversed(indices):
            del seats[index], slots[index * _SIZE : (index + 1) * _SIZE]
        if joined:
            if seats and joined[0].order < seats[-1].order:
                return RowSet.of(sorted((*seats, *joined), key=_order))
            seats += joined
            slots += np.array([seat.slot for seat in joined], np.int64).data
        return RowSet(seats, np.frombuffer(slots, np.int64))

    def find(self, seat: Seat) -> int:
        """Where `seat` stands, -1 if it does not."""
        at = bisect_left(self.seats, seat.order, key=_order)
        return at if at < len(self.seats) and self.seats[at] is seat else -1

    def indices(self, seats: Iterable[Seat | None]) -> list[int]:
        """Where those of `seats` stand that are in the set, ascending."""
        return sorted([at for seat in seats if seat is not None and (at := self.find(seat)) >= 0])


EMPTY = RowSet.of([])


class ChunkRow(NamedTuple):
    """A row of a plan that computes a chunk of its prompt."""

    seat: Seat
    start: int
    length: int
    samples: bool
    tokens: TokenArray


class StepRows(RowSource):
    """The rows of one plan: decode rows as columns, chunk rows one by one. Holds values only, no state.

    `ends`: the position behind the one that each decode row computes; `inputs`: its input token, or None while an
    earlier step, which brings it, is in flight. int64 columns, or lists where there are few rows.
    """

    __slots__ = ("_rows", "chunks", "decode", "ends", "inputs", "page_size")

    def __init__(
        self, decode: RowSet, ends: Column, inputs: Column | None, chunks: Sequence[ChunkRow], page_size: int
    ) -> None:
        self.decode = decode
        self.ends = ends
        self.inputs = inputs
        self.chunks = chunks
        self.page_size = page_size
        self._rows: tuple[Row, ...] | None = None

    @property
    def starts(self) -> list[int]:
        """The position that each decode row computes."""
        return [end - 1 for end in as_list(self.ends)]

    def names(self, seat: Seat) -> bool:
        """Whether the plan computes anything for `seat`."""
        return self.decode.find(seat) >= 0 or any(chunk.seat is seat and chunk.length for chunk in self.chunks)

    def rows(self) -> Sequence[Row]:
        """Built when first asked for."""
        if self._rows is None:
            self._rows = (*self._decode_rows(), *self._chunk_rows())
        return self._rows

    def _pages(self, seat: Seat, end: int) -> tuple[int, ...]:
        return tuple(seat.pages[: demand(end, self.page_size)])

    def _decode_rows(self) -> Sequence[Row]:
        starts = self.starts
        inputs = [()] * len(starts) if self.inputs is None else [(token,) for token in as_list(self.inputs)]
        return [
            Row(seat.request.rid, seat.request.choice, seat.slot, start, 1, True, tokens, self._pages(seat, start + 1))
            for seat, start, tokens in zip(self.decode.seats, starts, inputs, strict=True)
        ]

    def _chunk_rows(self) -> Sequence[Row]:
        return [
            Row(seat.request.rid, seat.request.choice, seat.slot, start, length, samples, tuple(tokens.tolist()),
                self._pages(seat, start + length))
            for seat, start, length, samples, tokens in self.chunks
            if length
        ]  # fmt: skip
