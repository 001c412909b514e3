"""The invariants of one state, checked page by page and row by row; those that cost more are in fsm/audit.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leftfold.fsm.audit import audit
from leftfold.fsm.errors import InvariantViolation
from leftfold.fsm.lifecycle import DECODING, PREEMPTED, PREFILLING, STOPPING, WAITING
from leftfold.fsm.limits import MAX_DEPTH, demand

if TYPE_CHECKING:
    from leftfold.fsm.request import Seat
    from leftfold.fsm.state import State


def check(state: State, thorough: bool = True) -> None:
    """Raises `InvariantViolation`, which says what is wrong and where.

    Not `thorough`: only what costs less than an event, so that it can be looked at after every one. Hence whole lists
    are compared where that can tell that nothing is wrong, and single pages are looked for only to say which.
    """
    seats, in_flight = state.decoding.seats, state.in_flight
    if state.prefilling or state.stopping:
        seats = [*seats, *state.prefilling.values(), *state.stopping]
    _check_pages(state, _check_slots(state, seats))
    if seats:
        _check_rows(state)
    elif state.at_edge or state.resting:
        raise InvariantViolation(f"nobody runs, but {state.at_edge} and {state.resting} are noted")
    _check_requests(state)
    if in_flight or state.stopping:
        _check_in_flight(state)
    if thorough:
        audit(state)


def _check_slots(state: State, seats: list[Seat]) -> list[int]:
    """Slots are free or held once, by the seat that a request has; the pages of all seats."""
    by_slot, slots, held = state.by_slot, state.free_slots.copy(), []
    for seat in seats:
        slot = seat.slot
        slots.append(slot)
        held += seat.pages
        if by_slot[slot] is not seat:
            raise InvariantViolation(f"slot {slot} does not lead to its seat")
        if seat.request.seat is not seat:
            raise InvariantViolation(f"request {seat.request.rid!r} does not hold its seat")
    slots.sort()
    if slots != [*range(len(by_slot))]:
        raise InvariantViolation(f"slots are not each free or held once: {slots}")
    return held


def _check_pages(state: State, held: list[int]) -> None:
    """free + cached + held = pool, page by page; keys and published pages are one to one."""
    pool = state.pool
    free, cached, refs, keys, published = pool.free, pool.cached, pool.refs, pool.keys, pool.published
    count, key_of = len(held), keys.__getitem__
    unheld = refs.count(0)
    alone = unheld + count == len(refs) == unheld + len({*held})
    if not alone or [*map(refs.__getitem__, held)].count(1) != count:
        _check_counts(held, refs)  # pages are shared, or refs are wrong
    if len(free) + len(cached) != unheld:
        raise InvariantViolation(f"{len(free)} free + {len(cached)} cached pages, {unheld} are not held")
    if not free.keys().isdisjoint(held) or (cached and not cached.keys().isdisjoint(held)):
        raise InvariantViolation(f"held pages {[page for page in held if page in free or page in cached]} are unheld")
    keyed = len(keys) - keys.count(None)
    if keyed != len(published) or (keyed and [*map(key_of, published.values())] != [*published]):
        wrong = [page for key, page in published.items() if keys[page] != key]
        raise InvariantViolation(f"{keyed} pages have keys, {len(published)} are published, {wrong} under other keys")
    if cached and None in map(key_of, cached):
        raise InvariantViolation(f"cached pages {[page for page in cached if keys[page] is None]} are not findable")
    if keyed and any(map(key_of, free)):
        raise InvariantViolation(f"free pages {[page for page in free if keys[page] is not None]} are findable")


def _check_counts(held: list[int], refs: list[int]) -> None:
    counts = [0] * len(refs)
    for page in held:
        counts[page] += 1
    if counts != refs:
        wrong = [page for page, count in enumerate(counts) if count != refs[page]]
        raise InvariantViolation(f"pages {wrong} are held {[counts[p] for p in wrong]} times, not as refs say")


def _check_rows(state: State) -> None:
    """Rows are in join order, within their pages, and write only to pages that are theirs alone."""
    columns, size, last = state.columns, state.config.page_size, -1
    computed_column, planned_column = columns.computed.tolist(), columns.planned.tolist()
    bases, runways = columns.base.tolist(), columns.runway.tolist()
    refs, keys, depth = state.pool.refs, state.pool.keys, len(state.in_flight)
    edge, resting = [], []
    for seat in state.decoding.seats:
        slot, request, pages, end = seat.slot, seat.request, seat.pages, seat.last
        computed, planned = computed_column[slot], planned_column[slot]
        held = len(pages)
        reach = held * size
        if planned >= end:
            resting.append(slot)
        elif planned == reach:
            edge.append(slot)
        if seat.order <= last:
            raise InvariantViolation(f"row {request.rid!r} is out of order")
        last = seat.order
        if reach > end:
            reach = end
        if not computed <= planned <= reach == runways[slot]:
            raise InvariantViolation(f"row {request.rid!r}: {computed} computed, {planned} planned, {pages}")
        if computed < seat.target:
            if request.phase is not PREFILLING or planned < seat.target or not depth:
                raise InvariantViolation(f"row {request.rid!r} is {request.phase}: {planned} of {seat.target} planned")
            continue
        if request.phase is not DECODING or planned - computed > depth:
            raise InvariantViolation(f"row {request.rid!r} is {request.phase} or planned too far ahead")
        number, within = divmod(computed, size)
        if held * size < computed or held > -(-(computed + MAX_DEPTH + 1) // size) or seat.edge != (number + 1) * size:
            raise InvariantViolation(f"row {request.rid!r}: computed {computed}, edge {seat.edge}, {pages}")
        if computed + 1 >= request.limit:
            raise InvariantViolation(f"row {request.rid!r} is at its limit {request.limit} and runs on")
        if number < held:
            page = pages[number]
            if bases[slot] + computed != page * size + within:
                raise InvariantViolation(f"row {request.rid!r} writes to {bases[slot] + computed}, not {page}")
            if refs[page] != 1 or keys[page] is not None or number + 1 < held:
                _check_private(state, seat, number)
    noted, rested = state.at_edge, state.resting
    if (edge != noted and sorted(edge) != sorted(noted)) or (resting != rested and sorted(resting) != sorted(rested)):
        raise InvariantViolation(f"at the end of their pages are {edge}, of their limits {resting}; noted are others")
    for slot, seat in state.prefilling.items():
        computed, planned, request = computed_column[slot], planned_column[slot], seat.request
        if request.phase is not PREFILLING or not computed <= planned < seat.target == len(request.tokens):
            raise InvariantViolation(f"row {request.rid!r} is {request.phase}: {computed} of {seat.target}")
        most = demand(seat.target + MAX_DEPTH, size)  # a failed step may have planned so far
        if not demand(seat.target, size) <= len(seat.pages) <= most:
            raise InvariantViolation(f"row {request.rid!r}: {seat.pages} for {seat.target} tokens")
        _check_private(state, seat, computed // size)


def _check_private(state: State, seat: Seat, first: int) -> None:
    """Pages that a row has yet to write are its own and not findable."""
    pool = state.pool
    for page in seat.pages[first:]:
        if pool.refs[page] != 1 or pool.keys[page] is not None:
            raise InvariantViolation(f"row {seat.request.rid!r} will write to page {page}, which is shared")


def _check_requests(state: State) -> None:
    """Live requests are seated or in line, each once."""
    live, line = state.live, state.waiting
    waiting = tokens = 0
    for request in live.values():
        if request.seat is None:
            waiting += 1
            tokens += len(request.tokens)
            if request.phase is not WAITING and request.phase is not PREEMPTED:
                raise InvariantViolation(f"request {request.key} has no seat and is {request.phase}")
    if waiting != len(line) or tokens != line.tokens:
        noted = f"{len(line)} requests with {line.tokens} tokens are in line"
        raise InvariantViolation(f"{noted}, {waiting} with {tokens} have no seat")
    rows = len(state.decoding.seats) + len(state.prefilling)
    if rows + waiting != len(live) or rows > state.config.rows:
        raise InvariantViolation(f"{rows} rows (at most {state.config.rows}) and {waiting} waiting: {[*live]}")
    if state.suspects and not state.suspects.keys() <= live.keys():
        raise InvariantViolation(f"some of the suspects {list(state.suspects)} do not live")
    for seat in state.stopping:
        if seat.request.phase is not STOPPING:
            raise InvariantViolation(f"request {seat.request.rid!r} is stopping and {seat.request.phase}")


def _check_in_flight(state: State) -> None:
    """No more steps in flight than allowed; what they name keeps its slot, and nothing else is stopping."""
    by_slot, in_flight = state.by_slot, state.in_flight
    if len(in_flight) > state.config.pipeline_depth + 1:
        raise InvariantViolation(f"{len(in_flight)} steps are in flight at depth {state.config.pipeline_depth}")
    for step in in_flight:
        for seat in step.rows.decode.seats:
            if by_slot[seat.slot] is not seat:
                raise InvariantViolation(f"a step in flight names slot {seat.slot}, which was given on")
    for seat in state.stopping:
        if not any(seat.slot in step.ended for step in in_flight):
            raise InvariantViolation(f"stopping request {seat.request.rid!r} is named by no step in flight")
