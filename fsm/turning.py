"""Pages that decoding rows fill and get: those of many by column, since a few cost less one by one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from leftfold.events.plan import IntArray
from leftfold.fsm.pages import Entry
from leftfold.fsm.prefix import page_key
from leftfold.fsm.request import Seat
from leftfold.fsm.state import State

Flags = npt.NDArray[np.bool_]

MANY = 32
"""So many rows at once are worth the dearer start. The result is the same: the fuzzer runs both ways."""


def turn_pages(
    state: State,
    seats: Sequence[Seat],
    slots: IntArray,
    computed: IntArray,
    indices: IntArray,
    quiet: Flags | None,
    full: dict[int, Entry],
) -> IntArray:
    """Of the rows at `indices` those that did nothing but fill a page go on with the next one, if that is granted yet;
    the indices of the others, nothing of which is done.

    `slots`, `computed`: int64, a row each; `quiet`: whether a row's token stops nobody (None: no token does). What is
    to be published is put into `full`, by the row's index.
    """
    columns, size = state.columns, state.config.page_size
    at, where = computed[indices], slots[indices]
    limit = columns.limit[where]
    turning = (columns.alarm[where] == at) & (at < limit)
    if quiet is not None:
        turning &= quiet[indices]
    picked, at, where = indices[turning], at[turning], where[turning]
    columns.alarm[where] = np.minimum(at + size, limit[turning])
    raw, base, width = state.pool.raw, columns.cells.base, size * 4
    for index, end in zip(picked.tolist(), at.tolist(), strict=True):
        seat = seats[index]
        pages, parent, number = seat.pages, seat.parent, end // size
        if parent is not None:
            page = pages[number - 1]
            begin = page * width
            seat.parent = key = page_key(parent, raw[begin : begin + width])
            full[index] = (page, key, parent if number > 1 else None)
        seat.edge = end + size
        if number < len(pages):
            base[seat.slot] = pages[number] * size - end
    others: IntArray = indices[~turning]
    return others


def grow_pages(state: State, slots: Sequence[int], pages: Sequence[int]) -> None:
    """Append one page to each row, once in `page_size` of its steps; all of them had none left to plan on."""
    state.pool.grant(pages)
    if len(slots) >= MANY:
        _grow_many(state, slots, pages)
    else:
        _grow_few(state, slots, pages)
    state.at_edge = [slot for slot in state.at_edge if slot not in slots] if len(slots) < len(state.at_edge) else []


def _grow_few(state: State, slots: Sequence[int], pages: Sequence[int]) -> None:
    cells, size, by_slot = state.columns.cells, state.config.page_size, state.by_slot
    base, runway = cells.base, cells.runway
    for slot, page in zip(slots, pages, strict=True):
        seat = by_slot[slot]
        assert seat is not None
        held = seat.pages
        held.append(page)
        reach, last = len(held) * size, seat.last
        runway[slot] = reach if reach < last else last
        if seat.edge == reach:  # all before is committed; otherwise the commit that fills the page before turns to this
            base[slot] = page * size - reach + size


def _grow_many(state: State, slots: Sequence[int], pages: Sequence[int]) -> None:
    columns, size, by_slot = state.columns, state.config.page_size, state.by_slot
    for slot, page in zip(slots, pages, strict=True):
        seat = by_slot[slot]
        assert seat is not None
        seat.pages.append(page)
    where = np.array(slots)
    begin = columns.runway[where]
    columns.runway[where] = np.minimum(begin + size, columns.limit[where])
    here = columns.computed[where] >= begin  # as above
    columns.base[where[here]] = (np.array(pages) * size - begin)[here]
