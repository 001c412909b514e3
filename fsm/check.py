"""The invariants of one state, checked page by page and row by row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leftfold.fsm.errors import InvariantViolation
from leftfold.fsm.lifecycle import LIVE, Phase
from leftfold.fsm.limits import demand

if TYPE_CHECKING:
    from leftfold.fsm.request import Seat
    from leftfold.fsm.state import State


def check(state: State) -> None:
    """Raises `InvariantViolation`, which says what is wrong and where."""
    seats = [*state.decoding.seats, *state.prefilling.values(), *state.stopping]
    _check_pages(state, seats)
    _check_slots(state, seats)
    _check_rows(state)
    _check_requests(state)
    _check_in_flight(state)


def _require(condition: bool, text: str, *values: object) -> None:
    if not condition:
        raise InvariantViolation(f"{text}: {', '.join(map(repr, values))}")


def _check_pages(state: State, seats: list[Seat]) -> None:
    """free + cached + held = pool, page by page; what can be found is full, keyed once, and nobody writes to it."""
    pool = state.pool
    counts = [0] * len(pool)
    for seat in seats:
        for page in seat.pages:
            counts[page] += 1
    if counts != pool.refs:
        wrong = [page for page, count in enumerate(counts) if count != pool.refs[page]]
        raise InvariantViolation(f"pages {wrong} are held {[counts[p] for p in wrong]} times, not as refs say")
    unheld = counts.count(0)
    if len(pool.free) + len(pool.cached) != unheld:
        raise InvariantViolation(f"{len(pool.free)} free + {len(pool.cached)} cached pages, {unheld} are not held")
    keys, published = pool.keys, pool.published
    count_of, key_of = counts.__getitem__, keys.__getitem__
    if any(map(count_of, pool.free)) or any(map(key_of, pool.free)):
        wrong = [page for page in pool.free if counts[page] or keys[page] is not None]
        raise InvariantViolation(f"free pages {wrong} are held {[counts[p] for p in wrong]} times, or findable")
    if any(map(count_of, pool.cached)) or not all(map(key_of, pool.cached)):
        wrong = [page for page in pool.cached if counts[page] or keys[page] is None]
        raise InvariantViolation(f"cached pages {wrong} are held {[counts[p] for p in wrong]} times, or not findable")
    if list(map(key_of, published.values())) != list(published):
        wrong = [page for key, page in published.items() if keys[page] != key]
        raise InvariantViolation(f"pages {wrong} are published under keys that are not their own")
    if len(keys) - keys.count(None) != len(published):
        raise InvariantViolation(f"{len(published)} keys are published, not as many as pages have")


def _check_slots(state: State, seats: list[Seat]) -> None:
    by_slot = state.by_slot
    slots = [seat.slot for seat in seats] + state.free_slots
    slots.sort()
    if slots != list(range(len(by_slot))):
        raise InvariantViolation(f"slots are not each free or held once: {slots}")
    for seat in seats:
        if by_slot[seat.slot] is not seat:
            raise InvariantViolation(f"slot {seat.slot} does not lead to its seat")
        if seat.request.seat is not seat:
            raise InvariantViolation(f"request {seat.request.rid!r} does not hold its seat")


def _check_rows(state: State) -> None:
    """Rows are in join order, within their pages, and write only to pages that are theirs alone."""
    columns, pool, size = state.columns, state.pool, state.config.page_size
    computed_column = columns.computed.tolist()
    last = -1
    edge = [seat.slot for seat in state.decoding.seats if computed_column[seat.slot] == len(seat.pages) * size]
    if sorted(edge) != sorted(state.at_edge):
        raise InvariantViolation(f"rows {edge} are at the end of their pages, {state.at_edge} are noted")
    for seat in state.decoding.seats:
        slot, request = seat.slot, seat.request
        computed, capacity = computed_column[slot], len(seat.pages) * size
        if seat.order <= last or request.phase is not Phase.DECODING:
            raise InvariantViolation(f"row {request.rid!r} is out of order or {request.phase}")
        last = seat.order
        if not capacity - size <= computed <= capacity or seat.edge != (computed // size + 1) * size:
            raise InvariantViolation(f"row {request.rid!r}: computed {computed}, capacity {capacity}, {seat.pages}")
        if computed + 1 >= request.limit:
            raise InvariantViolation(f"row {request.rid!r} is at its limit {request.limit} and runs on")
        if computed < capacity:
            page = seat.pages[-1]
            if int(columns.base[slot]) + computed != page * size + computed % size:
                raise InvariantViolation(f"row {request.rid!r} writes to {int(columns.base[slot])}, not page {page}")
            if pool.refs[page] != 1 or pool.keys[page] is not None:
                raise InvariantViolation(f"row {request.rid!r} writes to page {page}, which is shared")
    for slot, seat in state.prefilling.items():
        computed, request = computed_column[slot], seat.request
        if request.phase is not Phase.PREFILLING or not computed < seat.target == len(request.tokens):
            raise InvariantViolation(f"row {request.rid!r} is {request.phase}: {computed} of {seat.target}")
        if len(seat.pages) != demand(seat.target, size):
            raise InvariantViolation(f"row {request.rid!r}: {seat.pages} for {seat.target} tokens")
        for page in seat.pages[computed // size :]:
            if pool.refs[page] != 1 or pool.keys[page] is not None:
                raise InvariantViolation(f"row {request.rid!r} will write to page {page}, which is shared")


def _check_requests(state: State) -> None:
    waiting = 0
    for key, request in state.live.items():
        if (request.rid, request.epoch) != key or request.phase not in LIVE:
            raise InvariantViolation(f"live request {key} is {request.key}, {request.phase}")
        if request.seat is None:
            waiting += 1
            if request.phase not in (Phase.WAITING, Phase.PREEMPTED):
                raise InvariantViolation(f"request {key} has no seat and is {request.phase}")
    _require(waiting == len(state.waiting), "requests wait that are not in line", waiting, len(state.waiting))
    tokens = sum([len(request.tokens) for request in state.waiting])
    _require(tokens == state.queued_tokens, "queued tokens are counted wrong", tokens, state.queued_tokens)
    rows = len(state.decoding) + len(state.prefilling)
    _require(rows + waiting == len(state.live), "live requests are neither seated nor in line", rows, waiting)
    _require(rows <= state.config.rows, "more rows than allowed", rows)
    for seat in state.stopping:
        _require(seat.request.phase is Phase.STOPPING, "stopping seat's request is", seat.request.phase)


def _check_in_flight(state: State) -> None:
    depth = state.config.pipeline_depth
    _require(len(state.in_flight) <= depth + 1, "more steps in flight than depth + 1", len(state.in_flight))
    named = [slot for step in state.in_flight for slot in step.ended]
    for seat in state.stopping:
        _require(seat.slot in named, "stopping row is named by no step in flight", seat.request.rid)
    for step in state.in_flight:
        for seat in step.rows.decode.seats:
            if state.by_slot[seat.slot] is not seat:
                raise InvariantViolation(f"a step in flight names slot {seat.slot}, which was given on")
