"""Taking and leaving seats: the one release routine, and the one place where tokens are gathered from pages."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import numpy as np

from leftfold.events.plan import TokenArray
from leftfold.fsm.prefix import extend_keys
from leftfold.fsm.request import Request, Seat
from leftfold.fsm.rows import EMPTY, RowSet
from leftfold.fsm.state import State

_order = attrgetter("order")


def take_seat(state: State, request: Request, slot: int, pages: list[int], start: int) -> Seat:
    """Seat `request`; its pages are granted already and hold the K/V of its first `start` tokens."""
    if state.free_slots[-1] == slot:
        state.free_slots.pop()
    else:
        state.free_slots.remove(slot)
    seat = Seat(request, slot, state.next_order, pages, start)
    state.next_order += 1
    request.seat = seat
    state.by_slot[slot] = seat
    cells = state.columns.cells
    cells.computed[slot] = cells.planned[slot] = start
    cells.limit[slot] = last = seat.last
    reach = len(pages) * state.config.page_size
    cells.runway[slot] = reach if reach < last else last
    if request.watched:
        state.columns.watch_for(request.watched, 1)
    state.prefilling[slot] = seat
    return seat


def leave_rows(state: State, seats: Sequence[Seat]) -> None:
    """Take seats out of the rows; they keep what they own."""
    rows, cells = state.decoding, state.columns.cells
    indices: list[int] = []
    for seat in seats:
        slot = seat.slot
        if state.prefilling.pop(slot, None) is None and state.resting.pop(slot, None) is None:
            index = rows.find(seat)
            assert index >= 0, f"slot {slot} holds no row"
            indices.append(index)
            if cells.planned[slot] >= cells.runway[slot]:
                state.at_edge.remove(slot)
    if indices:
        indices.sort()
        state.decoding = rows.without(indices)


def planned_through(state: State, decoded: Sequence[Seat], prefilled: list[Seat]) -> None:
    """Rows that are planned up to their limit (`decoded`) rest from now on; those whose last chunk is planned
    (`prefilled`) are planned to decode, if that is not their limit.
    """
    resting, joined = state.resting, []
    for seat in decoded:
        resting[seat.slot] = seat
    if len(prefilled) > 1:
        prefilled.sort(key=_order)
    for seat in prefilled:
        del state.prefilling[seat.slot]
        if seat.target >= seat.last:
            resting[seat.slot] = seat
        else:
            joined.append(seat)
            note_edge(state, seat, seat.target)
    rows = state.decoding
    if decoded or joined:
        state.decoding = rows.without([rows.find(seat) for seat in decoded], joined)


def note_edge(state: State, seat: Seat, planned: int) -> None:
    """Note a row that needs a page to be planned on."""
    if planned >= len(seat.pages) * state.config.page_size:
        state.at_edge.append(seat.slot)


def rewind(state: State) -> None:
    """What was in flight is void: rows are planned from what is committed."""
    cells, running = state.columns.cells, state.running()
    state.at_edge, state.resting, state.prefilling, decoding = [], {}, {}, []
    for seat in running:
        cells.planned[seat.slot] = computed = cells.computed[seat.slot]
        if computed < seat.target:
            state.prefilling[seat.slot] = seat
        else:
            decoding.append(seat)
            note_edge(state, seat, computed)
    state.decoding = RowSet.of(decoding) if decoding else EMPTY


def release(state: State, seat: Seat) -> None:
    """Give back slot and pages: every way out of a seat ends here."""
    request = seat.request
    request.seat = None
    slot = seat.slot
    state.by_slot[slot] = None
    state.tenants.charge(request.tenant, state.columns.cells.computed[slot] - seat.start)
    state.pool.release(seat.pages)
    state.free_slots.append(slot)
    if request.watched:
        state.columns.watch_for(request.watched, -1)


def gather(state: State, seat: Seat) -> TokenArray:
    """All tokens of a running request, read from its pages before they are given back (int32)."""
    tokens = seat.request.tokens
    have, computed = len(tokens), state.columns.cells.computed[seat.slot]
    if computed < have:
        return tokens
    size = state.config.page_size
    first = have // size
    held = state.pool.tokens[seat.pages[first : computed // size + 1]].reshape(-1)
    newer = held[have - first * size : computed - first * size]
    return np.concatenate((tokens, newer, state.columns.last[seat.slot : seat.slot + 1].astype(np.int32)))


def put_back(state: State, seat: Seat) -> None:
    """Seat's request keeps its tokens, loses its seat and waits in line again (its phase is the caller's)."""
    request = seat.request
    request.tokens = gather(state, seat)
    request.seen = None
    leave_rows(state, (seat,))
    release(state, seat)
    enqueue(state, request)


def enqueue(state: State, request: Request) -> None:
    """Put a request in line by its rank."""
    state.waiting.add(request)


def dequeue(state: State, request: Request) -> None:
    """Take a request out of the line."""
    state.waiting.remove(request)


def begin_decoding(state: State, seat: Seat, token: int, computed: int) -> None:
    """Set the columns of a row that has its first token, `computed` positions behind it."""
    cells, size, slot, request = state.columns.cells, state.config.page_size, seat.slot, seat.request
    number = computed // size
    seat.edge = (number + 1) * size
    seat.final = seat.last if len(request.watched) == len(request.stops) else 0
    if seat.publishes:
        if number > len(request.keys):
            extend_keys(request.keys, request.root, request.tokens, number, size)
        seat.parent = request.keys[number - 1] if number else request.root
    cells.last[slot] = token
    cells.alarm[slot] = seat.edge if seat.edge < seat.final else seat.final
    if number < len(seat.pages):
        cells.base[slot] = (seat.pages[number] - number) * size
