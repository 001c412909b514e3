"""Taking and leaving seats: the one release routine, and the one place where tokens are gathered from pages."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from leftfold.events.plan import TokenArray
from leftfold.fsm.prefix import extend_keys
from leftfold.fsm.request import Request, Seat
from leftfold.fsm.state import State


def take_seat(state: State, request: Request, slot: int, pages: list[int], start: int) -> Seat:
    """Seat `request`; its pages are granted already and hold the K/V of its first `start` tokens."""
    if state.free_slots[-1] == slot:
        state.free_slots.pop()
    else:
        state.free_slots.remove(slot)
    seat = Seat(request, slot, state.next_order, pages)
    state.next_order += 1
    request.seat = seat
    state.by_slot[slot] = seat
    state.columns.computed[slot] = start
    if request.watched:
        state.columns.watch_for(request.watched, 1)
    state.prefilling[slot] = seat
    return seat


def leave_rows(state: State, seats: Sequence[Seat]) -> None:
    """Take seats out of the rows; they keep what they own."""
    rows = state.decoding
    indices: list[int] = []
    for seat in seats:
        if state.prefilling.pop(seat.slot, None) is None:
            indices.append(bisect_left(rows.seats, seat.order, key=lambda other: other.order))
            if seat.slot in state.at_edge:
                state.at_edge.remove(seat.slot)
    if indices:
        indices.sort()
        state.decoding = rows.without(indices)


def release(state: State, seat: Seat) -> None:
    """Give back slot and pages: every way out of a seat ends here."""
    request = seat.request
    request.seat = None
    state.by_slot[seat.slot] = None
    state.pool.release(seat.pages)
    state.free_slots.append(seat.slot)
    if request.watched:
        state.columns.watch_for(request.watched, -1)


def gather(state: State, seat: Seat) -> TokenArray:
    """All tokens of a running request, read from its pages before they are given back (int32)."""
    tokens = seat.request.tokens
    if seat.slot in state.prefilling:
        return tokens
    have, computed = len(tokens), int(state.columns.computed[seat.slot])
    size = state.config.page_size
    first = have // size
    held = state.pool.tokens[seat.pages[first : computed // size + 1]].reshape(-1)
    newer = held[have - first * size : computed - first * size]
    return np.concatenate((tokens, newer, state.columns.last[seat.slot : seat.slot + 1].astype(np.int32)))


def put_back(state: State, seat: Seat) -> None:
    """Seat's request keeps its tokens, loses its seat and waits in line again (its phase is the caller's)."""
    request = seat.request
    request.tokens = gather(state, seat)
    leave_rows(state, (seat,))
    release(state, seat)
    enqueue(state, request)


def enqueue(state: State, request: Request) -> None:
    """Put a request in line by its rank."""
    state.waiting.add(request.rank, request)
    state.queued_tokens += len(request.tokens)


def dequeue(state: State, request: Request) -> None:
    """Take a request out of the line."""
    state.waiting.remove(request.rank)
    state.queued_tokens -= len(request.tokens)


def begin_decoding(state: State, seat: Seat, token: int, computed: int) -> None:
    """Set the columns of a row that has its first token, `computed` positions behind it."""
    columns, size, slot, request = state.columns, state.config.page_size, seat.slot, seat.request
    seat.edge = (computed // size + 1) * size
    seat.final = request.limit - 1 if len(request.watched) == len(request.stops) else 0
    if request.publishes:
        extend_keys(request.keys, request.root, request.tokens, computed // size, size)
        seat.parent = request.keys[computed // size - 1] if computed >= size else request.root
    columns.last[slot] = token
    columns.alarm[slot] = min(seat.edge, seat.final)
    if computed < len(seat.pages) * size:
        columns.base[slot] = (seat.pages[computed // size] - computed // size) * size
    else:
        state.at_edge.append(slot)
