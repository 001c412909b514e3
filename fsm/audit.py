"""The invariants of one state that cost more than an event to check: tokens, keys, deadlines, steps in flight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from leftfold.events.plan import as_list
from leftfold.fsm.columns import COLUMNS
from leftfold.fsm.errors import InvariantViolation
from leftfold.fsm.lifecycle import Phase
from leftfold.fsm.prefix import extend_keys, page_key
from leftfold.fsm.request import NEVER_LOOKED

if TYPE_CHECKING:
    from leftfold.fsm.request import Request, Seat
    from leftfold.fsm.state import InFlight, State


def audit(state: State) -> None:
    """Raises `InvariantViolation`, which says what is wrong and where."""
    running = state.running()
    _check_lines(state)
    _check_deadlines(state)
    _check_order(state)
    _check_columns(state, running)
    _check_watch(state, [*running, *state.stopping])
    for seat in (*running, *state.stopping):
        _check_mirror(state, seat)
        _check_chain(state, seat)
    _check_keys(state)
    _check_seen(state)
    _check_steps(state)
    _check_widths(state, running)
    _check_controls(state)


def _fail(what: str) -> None:
    raise InvariantViolation(what)


def _check_lines(state: State) -> None:
    """What is live is found by rid, waits in both orders if it has no seat, and counts for its tenant."""
    by_rid: dict[str, list[Request]] = {}
    tenants: dict[str, int] = {}
    for key, request in state.live.items():
        seat = request.seat
        if request.key != key:
            _fail(f"live request {key} is {request.key}")
        if seat is not None and (state.by_slot[seat.slot] is not seat or seat in state.stopping):
            _fail(f"live request {key} has a seat that is not in the rows")
        by_rid.setdefault(request.rid, []).append(request)
        tenants[request.tenant] = tenants.get(request.tenant, 0) + 1
        if request.phase is Phase.WAITING and len(request.tokens) > request.prompt_len:
            _fail(f"live request {key} waits as if it had never run, and has tokens")
        newest = state.requests.get(request.rid)
        if newest is None or newest.rid != request.rid:
            _fail(f"live request {request.key} is not found under its rid, but {newest and newest.key}")
    if by_rid != state.by_rid:
        _fail(f"live by rid: {[*by_rid]}, noted are {[*state.by_rid]}, or other requests of them")
    waiting = [request for request in state.live.values() if request.seat is None]
    if [*state.waiting.by_arrival()] != sorted(waiting, key=lambda request: request.arrival):
        _fail("the line by arrival holds not those that have no seat")
    if [*state.waiting] != sorted(waiting, key=lambda request: request.rank):
        _fail("the line by rank holds not those that have no seat, or not in order")
    if tenants != dict(state.tenants.live):
        _fail(f"tenants have {tenants} live requests, noted are {dict(state.tenants.live)}")


def _check_deadlines(state: State) -> None:
    """Each live request is noted for each deadline that it has; who has joined once has none for the queue."""
    wanted = []
    for request in state.live.values():
        if request.deadline_at:
            wanted.append((request.deadline_at, request.arrival, 0))
        if request.queue_deadline_at:
            wanted.append((request.queue_deadline_at, request.arrival, 1))
            if request.seat is not None or request.cached >= 0:
                _fail(f"request {request.key} has joined, and still has a deadline for that")
    noted = [key for key, _ in state.deadlines.items()]
    if sorted(wanted) != noted:
        _fail(f"deadlines {noted} are noted, {sorted(wanted)} are of live requests")
    for key, request in state.deadlines.items():
        if request.arrival != key[1] or state.live.get(request.key) is not request:
            _fail(f"deadline {key} leads to {request.key}")


def _check_order(state: State) -> None:
    resting = [seat.slot for seat in state.resting.values()]
    if resting != [*state.resting]:
        _fail(f"resting rows {[*state.resting]} are in slots {resting}")
    orders = [seat.order for seat in state.prefilling.values()]
    if orders != sorted(orders) or [seat.slot for seat in state.prefilling.values()] != [*state.prefilling]:
        _fail(f"prefilling rows {[*state.prefilling]} are not in the order they joined ({orders})")
    seated = [seat.slot for seat in state.decoding.seats]
    if state.decoding.slots.tolist() != seated:
        _fail(f"decoding rows are in slots {seated}, their column says {state.decoding.slots.tolist()}")
    running = [*state.prefilling, *state.resting, *seated]
    if len({*state.left}) != len(state.left) or any(slot in running for slot in state.left):
        _fail(f"slots {state.left} left the rows, {running} run")


def _check_columns(state: State, running: Sequence[Seat]) -> None:
    columns = state.columns.cells
    apart = [name for name in COLUMNS if getattr(columns, name).obj is not getattr(state.columns, name)]
    if apart:
        _fail(f"columns {apart} and their views are not the same memory")
    for seat in running:
        slot, request = seat.slot, seat.request
        if not seat.last == request.limit - 1 == columns.limit[slot]:
            _fail(f"row {request.rid!r}: limit {request.limit}, last {seat.last}, column {columns.limit[slot]}")
        if columns.computed[slot] < seat.target:
            continue
        final = seat.last if len(request.watched) == len(request.stops) else 0
        if seat.final != final or columns.alarm[slot] != min(seat.edge, final):
            _fail(f"row {request.rid!r}: final {seat.final}, edge {seat.edge}, alarm {columns.alarm[slot]}")
        if columns.last[slot] < 0:
            _fail(f"row {request.rid!r} has {columns.last[slot]} for its newest token")


def _check_watch(state: State, seats: Sequence[Seat]) -> None:
    columns = state.columns
    counts: dict[int, int] = {}
    for seat in seats:
        for token in seat.request.watched:
            counts[token] = counts.get(token, 0) + 1
    noted = columns.watch.nonzero()[0].tolist()
    if columns.watchers != counts or noted != sorted(counts) or columns.watch[-1]:
        _fail(f"stop ids {noted} are watched (for {columns.watchers}), rows have {counts}")


def _check_mirror(state: State, seat: Seat) -> None:
    """Pages hold the request's own tokens, as far as it has them beside its pages."""
    raw, width = state.pool.raw, state.config.page_size * 4
    known = seat.request.tokens[: state.columns.cells.computed[seat.slot]]
    held = b"".join([raw[page * width : (page + 1) * width] for page in seat.pages])[: len(known) * 4]
    if held != known.tobytes():
        found = np.frombuffer(held, np.int32).tolist()
        _fail(f"pages {seat.pages} of {seat.request.rid!r} are noted to hold {found}, not {known.tolist()}")


def _check_chain(state: State, seat: Seat) -> None:
    """A page that the prefix cache can find has the key of the tokens that lead to it, and of its own."""
    pool, size, key = state.pool, state.config.page_size, seat.request.root
    computed, width = state.columns.cells.computed[seat.slot], size * 4
    for number in range(computed // size):
        page = seat.pages[number]
        key = page_key(key, pool.raw[page * width : (page + 1) * width])
        if pool.keys[page] is not None and pool.keys[page] != key:
            _fail(f"page {page} of {seat.request.rid!r} has a key that is not that of its tokens")
    if seat.publishes and not seat.request.publishes:
        _fail(f"row {seat.request.rid!r} publishes its pages, which its request does not")
    if seat.slot in state.prefilling or computed < seat.target:
        return
    if seat.parent != (key if seat.publishes else None):
        _fail(f"row {seat.request.rid!r} would publish its next page under a key that is not that of its tokens")


def _check_keys(state: State) -> None:
    """Keys that requests have at hand are those of their tokens."""
    size = state.config.page_size
    for request in state.live.values():
        keys: list[bytes] = []
        extend_keys(keys, request.root, request.tokens, len(request.tokens) // size, size)
        if request.keys != keys[: len(request.keys)]:
            _fail(f"request {request.key} has keys that are not those of its tokens")


def _check_seen(state: State) -> None:
    """Where nothing was published since a request was looked up, it finds no more pages than then; a count of them that
    is remembered is what counting gives.
    """
    published, ever, size = state.pool.published, state.pool.published_ever, state.config.page_size
    for request in state.waiting:
        bound = request.seen[0] if request.seen is not None and request.seen[1] == ever else None
        remembers = request.reads_cache and request.looked != NEVER_LOOKED
        if bound is None and not remembers:
            continue
        count = state.cached_pages(request) if remembers else 0
        keys = request.keys[: (len(request.tokens) - 1) // size]
        found = next((number for number, key in enumerate(keys) if key not in published), len(keys))
        if bound is not None and found > bound:
            _fail(f"request {request.key} finds {found} pages, noted is that it finds {bound} at most")
        if remembers and found != count:
            _fail(f"request {request.key} finds {found} pages, remembered are {count}")


def _check_steps(state: State) -> None:
    """Steps in flight follow one on another, and expect a token for each row that samples."""
    steps = [step.step for step in state.in_flight]
    if steps != [*range(state.next_step - len(steps), state.next_step)]:
        _fail(f"steps {steps} are in flight, {state.next_step} is next")
    stopping = [seat.slot for seat in state.stopping]
    for step in state.in_flight:
        named = _named(step)
        for seat, _, _ in named:
            if state.by_slot[seat.slot] is not seat:
                _fail(f"step {step.step} names slot {seat.slot}, which was given on")
        slots, noted = [seat.slot for seat, _, _ in named], step.rows.decode.slots.tolist()
        if len({*slots}) != len(slots) or noted != slots[: len(step.rows.decode)]:
            _fail(f"step {step.step} names slots {slots}, its column says {noted}")
        if len({*step.ended}) != len(step.ended):
            _fail(f"step {step.step} notes twice that a row ended: {step.ended}")
        if any(slot not in stopping or slot not in slots for slot in step.ended):
            _fail(f"step {step.step} with rows in {slots} notes that {step.ended} ended, {stopping} are stopping")
        gone = [slot for slot in slots if slot in stopping and slot not in step.ended]
        if gone:
            _fail(f"step {step.step} does not know that the rows in {gone} ended")
        sampling = len(step.rows.decode) + sum(chunk.samples for chunk in step.rows.chunks)
        if step.expected != sampling:
            _fail(f"step {step.step} expects {step.expected} tokens of {sampling} rows")


def _named(step: InFlight) -> list[tuple[Seat, int, int]]:
    """What a step computes, in its rows' order: seat, first position, width."""
    decode = [(seat, start, 1) for seat, start in zip(step.rows.decode.seats, step.rows.starts, strict=True)]
    return decode + [(chunk.seat, chunk.start, chunk.length) for chunk in step.rows.chunks if chunk.length]


def _check_widths(state: State, running: Sequence[Seat]) -> None:
    """Steps in flight go on where what is committed ends, without a gap, up to what is planned."""
    columns = state.columns.cells
    reached = {seat: columns.computed[seat.slot] for seat in running}
    for step in state.in_flight:
        for seat, start, width in _named(step):
            if seat in reached:
                if start != reached[seat]:
                    _fail(f"step {step.step} computes {seat.request.rid!r} from {start}, not {reached[seat]}")
                reached[seat] = start + width
        inputs = step.rows.inputs
        if inputs is not None:
            for seat, token in zip(step.rows.decode.seats, as_list(inputs), strict=True):
                if seat in reached and columns.last[seat.slot] != token:
                    _fail(f"step {step.step} feeds {token} to {seat.request.rid!r}, not {columns.last[seat.slot]}")
    for seat in running:
        if reached[seat] != columns.planned[seat.slot]:
            what = f"{columns.planned[seat.slot]} planned, {reached[seat]} computed or in flight"
            _fail(f"row {seat.request.rid!r}: {what}")


def _check_controls(state: State) -> None:
    """Only the call at the head has an operation, and each operation was started once."""
    ops = [call.op for call in state.controls]
    started = [op for step in state.in_flight for op in step.ops]
    if any(op is not None for op in ops[1:]) or len({*started}) != len(started):
        _fail(f"control calls have operations {ops}, {started} are in flight")
    if any(op is not None and not 0 < op < state.next_op for op in (*ops, *started)):
        _fail(f"operations {ops} and {started} are known, {state.next_op} is next")
