"""The invariants of one state, checked page by page and row by row; those that cost more are in fsm/audit.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from leftfold.fsm.audit import audit
from leftfold.fsm.errors import InvariantViolation
from leftfold.fsm.lifecycle import DECODING, PREEMPTED, PREFILLING, STOPPING, WAITING
from leftfold.fsm.limits import MAX_DEPTH, demand

if TYPE_CHECKING:
    from collections.abc import Sequence

    from leftfold.fsm.request import Seat
    from leftfold.fsm.state import State

Bounds = tuple[int, int, int, int, int, int]
"""Of a row that was found right and whose prompt is planned: its slot, the least that may be computed and what must not
be, its runway, its base, and where it rests.
"""


def check(state: State, thorough: bool = True) -> None:
    """Raises `InvariantViolation`, which says what is wrong and where.

    Not `thorough`: only what costs less than an event, so that it can be looked at after every one. Hence whole lists
    are compared where that can tell that nothing is wrong, and single pages are looked for only to say which.
    """
    Checker().check(state, thorough)


class Checker:
    """`check` for who looks after every event: most events change nothing but how far rows are planned and computed.

    What was last found right is remembered as it was (`_seen`), and what each row whose prompt is planned may move
    within (`_bounds`). Where all of that is as it was, slots, pages and these rows are right again; else each is looked
    at.
    """

    __slots__ = ("_bounds", "_seen")

    def __init__(self) -> None:
        self._seen: list[Any] | None = None
        self._bounds: list[Bounds] = []

    def check(self, state: State, thorough: bool = True) -> None:
        """As `check`, whatever was checked before."""
        seats = state.decoding.seats
        resting = state.resting
        if resting or state.prefilling or state.stopping:
            seats = [*seats, *resting.values(), *state.prefilling.values(), *state.stopping]
        seen = _see(state, seats)
        if seen != self._seen or not _within(state, self._bounds):
            self._seen = None  # what is found wrong is not remembered
            _check_pages(state, _check_slots(state, seats))
            self._bounds = _check_decoding(state)
            self._seen = [part.copy() for part in seen]
        if state.prefilling:
            _check_prefilling(state)
        _check_requests(state)
        if state.in_flight or state.stopping:
            _check_in_flight(state)
        if thorough:
            audit(state)


def _see(state: State, seats: list[Seat]) -> list[Any]:
    """All that says whether slots, pages and decoding rows are right, but what moves within the rows' bounds."""
    pool = state.pool
    rows = [
        (seat.slot, seat.order, seat.target, seat.edge, seat.last, [*seat.pages], asked.seat, asked.phase, asked.limit)
        for seat in seats
        for asked in (seat.request,)
    ]
    fixed = [len(state.decoding.seats), state.config.page_size, *state.resting]
    return [
        rows, [*pool.free], [*pool.cached], pool.refs, pool.keys, pool.published, seats, state.by_slot,
        state.free_slots, fixed,
    ]  # fmt: skip


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
    if cached and not all(map(key_of, cached)):
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


def _within(state: State, bounds: Sequence[Bounds]) -> bool:
    """Whether rows whose prompt is planned, of which nothing else has changed, are where they may be, and noted where
    they wait.
    """
    if not bounds:
        return not state.at_edge
    cells, depth, resting = state.columns.cells, len(state.in_flight), state.resting
    computed_at, planned_at, runways, bases = cells.computed, cells.planned, cells.runway, cells.base
    edge: list[int] = []
    rest = len(resting)
    for slot, least, most, runway, base, end in bounds:
        computed, planned = computed_at[slot], planned_at[slot]
        if not least <= computed < most or not computed <= planned <= runway or planned - computed > depth:
            return False
        if runways[slot] != runway or bases[slot] != base:
            return False
        if planned == runway:
            if runway != end:
                edge.append(slot)
            elif slot in resting:
                rest -= 1
            else:
                return False
    return not rest and edge == state.at_edge


def _check_decoding(state: State) -> list[Bounds]:
    """Rows whose prompt is planned rest once they are planned up to their limit, and only then; the others are in join
    order, and noted where they need a page to be planned on. All are within their pages, and write only to pages that
    are theirs alone.
    """
    cells, size, last, resting = state.columns.cells, state.config.page_size, -1, state.resting
    computed_at, planned_at, runways, bases = cells.computed, cells.planned, cells.runway, cells.base
    refs, keys, depth = state.pool.refs, state.pool.keys, len(state.in_flight)
    edge, bounds = [], []
    ahead = size + MAX_DEPTH  # so far beyond what is computed do pages reach at most
    for seat in [*state.decoding.seats, *resting.values()] if resting else state.decoding.seats:
        slot, request, pages, end = seat.slot, seat.request, seat.pages, seat.last
        computed, planned, runway = computed_at[slot], planned_at[slot], runways[slot]
        reach = len(pages) * size
        if planned >= end:
            if slot not in resting:
                raise InvariantViolation(f"row {request.rid!r} is planned up to its limit and does not rest")
        elif seat.order <= last or slot in resting:
            raise InvariantViolation(f"row {request.rid!r} is out of order, or rests before its limit")
        else:
            last = seat.order
            if planned == reach:
                edge.append(slot)
        if not computed <= planned <= runway == (reach if reach < end else end):
            raise InvariantViolation(f"row {request.rid!r}: {computed} computed, {planned} planned, {pages}")
        if computed < seat.target:
            if request.phase is not PREFILLING or planned < seat.target or not depth:
                raise InvariantViolation(f"row {request.rid!r} is {request.phase}: {planned} of {seat.target} planned")
            bounds.append((slot, 0, 0, 0, 0, 0))  # it is looked at until its prompt is computed
            continue
        if request.phase is not DECODING or planned - computed > depth:
            raise InvariantViolation(f"row {request.rid!r} is {request.phase} or planned too far ahead")
        number = computed // size
        begin = number * size
        if reach - computed > ahead or seat.edge != begin + size:
            raise InvariantViolation(f"row {request.rid!r}: computed {computed}, edge {seat.edge}, {pages}")
        final = request.limit - 1
        if computed >= final:
            raise InvariantViolation(f"row {request.rid!r} is at its limit {request.limit} and runs on")
        base = bases[slot]
        if begin < reach:
            page = pages[number]
            if base != page * size - begin:
                raise InvariantViolation(f"row {request.rid!r} writes to {base + computed}, not {page}")
            if refs[page] != 1 or keys[page] is not None or seat.edge < reach:
                _check_private(state, seat, number)
        bounds.append((slot, computed, seat.edge if seat.edge < final else final, runway, base, end))
    if edge != state.at_edge and sorted(edge) != sorted(state.at_edge):
        raise InvariantViolation(f"at the end of their pages are {edge}, noted are {state.at_edge}")
    return bounds


def _check_prefilling(state: State) -> None:
    """Rows with prompt left to plan have the pages for all of it, and those that they write to are theirs alone."""
    size, cells = state.config.page_size, state.columns.cells
    for slot, seat in state.prefilling.items():
        computed, planned, request = cells.computed[slot], cells.planned[slot], seat.request
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
    live, line, tokens = state.live, state.waiting, 0
    waiting = [request.seat for request in live.values()].count(None)
    if waiting:
        for request in live.values():
            if request.seat is None:
                tokens += len(request.tokens)
                if request.phase is not WAITING and request.phase is not PREEMPTED:
                    raise InvariantViolation(f"request {request.key} has no seat and is {request.phase}")
    if not waiting == len(line) == len(line.keys) or tokens != line.tokens:
        noted = f"{len(line)} requests with {line.tokens} tokens are in line"
        raise InvariantViolation(f"{noted}, {waiting} with {tokens} have no seat")
    rows = state.row_count
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
        decode = step.rows.decode
        if decode is not state.decoding:  # whose slots have been looked at
            for seat in decode.seats:
                if by_slot[seat.slot] is not seat:
                    raise InvariantViolation(f"a step in flight names slot {seat.slot}, which was given on")
    for seat in state.stopping:
        if not any(seat.slot in step.ended for step in in_flight):
            raise InvariantViolation(f"stopping request {seat.request.rid!r} is named by no step in flight")
