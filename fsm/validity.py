"""Whether a state can apply a plan: everything is looked at before anything is written.

A plan is `Any` here: what a log or a policy made may hold anything, and machine code would take a type at its word.
"""

from __future__ import annotations

from typing import Any

from leftfold.events.codec import same
from leftfold.events.plan import as_list
from leftfold.fsm.controls import gives_back_rows, operation
from leftfold.fsm.effects import FinishReason
from leftfold.fsm.errors import PlanRefused
from leftfold.fsm.gate import STOPPED, may_join, rows_pass
from leftfold.fsm.lifecycle import STOPPING
from leftfold.fsm.limits import demand
from leftfold.fsm.pages import PagePool
from leftfold.fsm.prefix import extend_keys, matching
from leftfold.fsm.request import Request, Seat
from leftfold.fsm.state import State

_REASONS = frozenset([reason.value for reason in FinishReason])
_INT = {int}
MAX_INT = (1 << 62) - 1


def refuse_invalid(state: State, plan: Any) -> None:
    """Raises `PlanRefused`, which names field and value; the state is unchanged."""
    leaving = _ending(state, plan) if plan.ends else []
    if plan.memo is not None and not all(type(value) is int and abs(value) <= MAX_INT for value in plan.memo.values()):
        raise PlanRefused(f"memo: {dict(plan.memo)} holds other than 64-bit integers")
    if plan.step is None:
        if plan.join or plan.preempt or plan.chunks or plan.grow or plan.evict or plan.ops:
            raise PlanRefused("step is missing in a plan that has rows or pages")
        return
    _check_step(state, plan)
    if plan.preempt:
        leaving += _preempted(state, plan, leaving)
    joining = _joining(state, plan) if plan.join else []
    if joining or plan.grow or plan.evict:
        _check_pages(state, plan, leaving, joining)
    if joining or plan.chunks or state.prefilling:
        _check_rows(state, plan, leaving, joining)
    _check_decoding(state, plan, leaving)


def _ending(state: State, plan: Any) -> list[Seat]:
    if state.gate is STOPPED:
        raise PlanRefused("ends: the engine is stopped")
    seats: list[Seat] = []
    told: list[Any] = []
    for rid, choice, reason, epoch in plan.ends:
        request = state.live.get((rid, epoch, choice))
        if request is None or request.key in told:
            raise PlanRefused(f"ends: {rid!r} (epoch {epoch}) is not live")
        if reason not in _REASONS:
            raise PlanRefused(f"ends: {reason!r} is no finish reason")
        told.append(request.key)
        if request.seat is not None:
            seats.append(request.seat)
    return seats


def _check_step(state: State, plan: Any) -> None:
    if plan.step != state.next_step:
        raise PlanRefused(f"step {plan.step} is not the next one ({state.next_step})")
    if len(state.in_flight) > state.config.pipeline_depth:
        raise PlanRefused(f"step {plan.step}: {len(state.in_flight)} steps are in flight")
    if not state.executor_present or state.gate is STOPPED:
        raise PlanRefused(f"step {plan.step}: gate {state.gate.value}, executor present {state.executor_present}")
    if plan.width != 1:
        raise PlanRefused(f"step {plan.step}: widths other than 1 are not supported")
    if plan.ops:
        _check_operation(state, plan)
    if plan.base is not None and plan.base != plan.step - 1:
        raise PlanRefused(f"step {plan.step}: base {plan.base} is not the plan before it")


def _check_operation(state: State, plan: Any) -> None:
    """The one operation is what the control call at the head of the queue needs."""
    wanted = operation(state)
    if wanted is None or len(plan.ops) != 1 or not same(plan.ops[0], wanted):
        raise PlanRefused(f"ops: {plan.ops} are not what the control queue needs ({wanted})")
    if gives_back_rows(wanted, state.controls[0]) and len(plan.preempt) + len(plan.ends) < len(state.running()):
        raise PlanRefused(f"preempt: {wanted.verb} takes the K/V of all rows, and some keep their pages")


def _preempted(state: State, plan: Any, ending: list[Seat]) -> list[Seat]:
    seats: list[Seat] = []
    for slot in plan.preempt:
        seat = _seat(state, slot, "preempt")
        if seat in seats or seat in ending:
            raise PlanRefused(f"preempt: slot {slot} is named twice, or its request ends")
        if state.flies(seat):
            raise PlanRefused(f"preempt: a step in flight names slot {slot}")
        seats.append(seat)
    return seats


def _seat(state: State, slot: Any, field: str) -> Seat:
    seat = state.by_slot[slot] if type(slot) is int and 0 <= slot < len(state.by_slot) else None
    if seat is None or seat in state.stopping:
        raise PlanRefused(f"{field}: slot {slot} is not running")
    return seat


def _joining(state: State, plan: Any) -> list[Request]:
    """The requests that join: each waits, is named once and does not end."""
    found: list[Request] = []
    told = [(rid, epoch, choice) for rid, choice, _, epoch in plan.ends] if plan.ends else []
    for row in plan.join:
        request = state.live.get((row.rid, row.epoch, row.choice))
        if request is None or request.seat is not None or request.key in told or not may_join(state, request):
            raise PlanRefused(f"join: {row.rid!r} (epoch {row.epoch}) is not waiting")
        told.append(request.key)
        found.append(request)
    return found


def _check_pages(state: State, plan: Any, leaving: list[Seat], joining: list[Request]) -> None:
    """Every granted page is usable and granted once; every found page is published."""
    if len(plan.grow) > 1:
        raise PlanRefused(f"grow: {len(plan.grow)} groups, there is one")
    for tier, group, pages in plan.evict:
        if tier != "device" or group != 0:
            raise PlanRefused(f"evict: {pages} of tier {tier!r}, group {group}; there is one group on the device only")
    granted = as_list(plan.grow[0].pages) if plan.grow else []
    evicted = as_list(plan.evict[0].pages) if len(plan.evict) == 1 else [p for row in plan.evict for p in row.pages]
    found: list[int] = []
    if joining:
        granted = granted.copy()
        found = _found(state, plan, joining, granted)
    if leaving or found or not _plainly_usable(state.pool, granted, evicted):
        _check_pages_one_by_one(state, granted, evicted, found, leaving)


def _plainly_usable(pool: PagePool, granted: list[int], evicted: list[int]) -> bool:
    """The common case: free pages, then cached ones that are all evicted, each once."""
    free = len(granted) - len(evicted)
    if evicted is not granted and (free < 0 or granted[free:] != evicted or not set(map(type, evicted)) <= _INT):
        return False
    if not set(map(type, granted)) <= _INT or len(set(granted)) < len(granted):
        return False
    if not all(map(pool.cached.__contains__, evicted)):
        return False
    return not free or all(map(pool.free.__contains__, granted[:free]))


def _found(state: State, plan: Any, joining: list[Request], granted: list[int]) -> list[int]:
    """Pages that joins find in the prefix cache; those that they are granted are added to `granted`."""
    found: list[int] = []
    for row, request in zip(plan.join, joining, strict=True):
        if len(row.pages) != 1:
            raise PlanRefused(f"join: {row.rid!r} gets {row.pages}, pages of {len(row.pages)} groups")
        pages, shared = as_list(row.pages[0]), row.start // state.pool.page_size
        granted += pages[shared:]
        if shared:
            _check_found(state, request, pages[:shared])
            found += pages[:shared]
    return found


def _check_found(state: State, request: Request, pages: list[int]) -> None:
    """Found pages are published under the keys of the request's own tokens."""
    pool = state.pool
    if not request.reads_cache:
        raise PlanRefused(f"join: {request.rid!r} takes nothing from the prefix cache")
    extend_keys(request.keys, request.root, request.tokens, len(request.tokens) // pool.page_size, pool.page_size)
    for index, page in enumerate(pages):
        if not 0 <= page < len(pool) or request.keys[index : index + 1] != [pool.keys[page]]:
            raise PlanRefused(f"join: page {page} of {request.rid!r} is not in the prefix cache for its tokens")
    if matching(pool.tokens[pages], request.tokens) < len(pages):
        raise PlanRefused(f"join: pages {pages} of {request.rid!r} hold other tokens under its keys")


def _check_pages_one_by_one(
    state: State, granted: list[int], evicted: list[int], found: list[int], leaving: list[Seat]
) -> None:
    pool = state.pool
    named: list[Any] = [*granted, *evicted, *found]
    for one in named:
        if type(one) is not int or not 0 <= one < len(pool):
            raise PlanRefused(f"page {one!r} does not exist")
    if repeated := _twice(granted) or _twice(evicted):
        raise PlanRefused(f"pages {repeated} are granted or evicted twice")
    freed: dict[int, int] = {}
    for seat in leaving:
        for page in () if state.flies(seat) else seat.pages:
            freed[page] = freed.get(page, 0) + 1
    shared, dropped = dict.fromkeys(found), dict.fromkeys(evicted)
    for page in (*granted, *evicted):
        if page in shared:
            raise PlanRefused(f"page {page} is found by a join, and granted or evicted")
        if pool.refs[page] != freed.get(page, 0):
            raise PlanRefused(f"page {page} is held")
    for page in evicted:
        if pool.keys[page] is None:
            raise PlanRefused(f"evict: page {page} is not cached")
    for page in granted:
        if pool.keys[page] is not None and page not in dropped:
            raise PlanRefused(f"page {page} is granted without being evicted")


def _twice(pages: list[int]) -> list[int]:
    return [page for page in dict.fromkeys(pages) if pages.count(page) > 1] if len(set(pages)) < len(pages) else []


def _check_rows(state: State, plan: Any, leaving: list[Seat], joining: list[Request]) -> None:
    """Joins take free slots and waiting requests; chunks cover what is left of each prompt and no more."""
    remaining: dict[int, tuple[int, int]] = {}
    for seat in state.prefilling.values():
        remaining[seat.slot] = (state.columns.cells.planned[seat.slot], seat.target)
    away, freed = [], []
    for seat in leaving:
        away.append(seat.slot)
        remaining.pop(seat.slot, None)
        if not state.flies(seat):
            freed.append(seat.slot)
    size, by_slot = state.config.page_size, state.by_slot
    for row, request in zip(plan.join, joining, strict=True):
        slot, start, tokens = row.slot, row.start, len(request.tokens)
        there = type(slot) is int and 0 <= slot < len(by_slot) and slot not in remaining
        if not there or (by_slot[slot] is not None and slot not in freed):
            raise PlanRefused(f"join: slot {slot} is not free")
        if len(row.pages[0]) != demand(tokens, size):
            raise PlanRefused(f"join: {row.rid!r} gets {row.pages} for {tokens} tokens")
        if start % size or not 0 <= start < tokens:
            raise PlanRefused(f"join: start {start} of {row.rid!r}, which has {tokens} tokens")
        remaining[slot] = (start, tokens)
    for slot, length, samples in plan.chunks:
        if type(samples) is not bool:
            raise PlanRefused(f"chunks: slot {slot} samples {samples!r}, neither true nor false")
        if slot not in remaining:
            if length or samples or slot in away or not _decodes(state, slot):
                raise PlanRefused(f"chunks: slot {slot} is not prefilling, or is named twice")
            away.append(slot)  # left out
            continue
        start, target = remaining.pop(slot)
        if length > state.config.chunk:
            raise PlanRefused(f"chunks: {length} tokens of slot {slot} are more than {state.config.chunk} at once")
        if not 0 <= length <= target - start or samples != (length > 0 and start + length == target):
            left = target - start
            raise PlanRefused(f"chunks: {length} tokens (samples {samples}) of slot {slot}, which has {left} left")
    if remaining:
        raise PlanRefused(f"chunks: slots {list(remaining)} are prefilling and not named")


def _decodes(state: State, slot: Any) -> bool:
    seat = state.by_slot[slot] if type(slot) is int and 0 <= slot < len(state.by_slot) else None
    return seat is not None and slot not in state.prefilling and seat.request.phase is not STOPPING


def _check_decoding(state: State, plan: Any, leaving: list[Seat]) -> None:
    """Rows that decode have room for their next token; limits of rows and tokens hold."""
    needing, resting, decoding, chunks = state.at_edge, state.resting, len(state.decoding.seats), plan.chunks
    idle = [slot for slot, length, _ in chunks if not length] if chunks else []
    if leaving or idle != [*resting]:  # more than those that rest are left out
        left = [seat.slot for seat in leaving]
        known = {*state.prefilling, *[row.slot for row in plan.join]}
        left_out = [slot for slot in idle if slot not in known]
        away = {*left, *left_out}
        if not away.isdisjoint(needing):
            needing = [slot for slot in needing if slot not in away]
        decoding -= len([slot for slot in (*left_out, *left) if slot not in state.prefilling and slot not in resting])
        if resting and not away.issuperset(resting):
            raise PlanRefused(f"chunks: slots {[*resting]} are planned up to their limits and not left out")
    grown: list[int] = []
    for slots, pages in plan.grow:  # of which there is at most one
        grown = as_list(slots)
        if len(slots) != len(pages):
            raise PlanRefused(f"grow: {len(slots)} slots get {len(pages)} pages")
    if needing != grown:
        raise PlanRefused(f"grow: slots {grown} get pages, slots {needing} need them")
    config = state.config
    rows, tokens = decoding + len(chunks), decoding
    for _, length, _ in chunks:
        tokens += length
    if rows > config.rows or tokens > config.max_batch_tokens:
        raise PlanRefused(f"step {plan.step}: {rows} rows with {tokens} tokens are over the limits")
    if not tokens and not plan.ops:
        raise PlanRefused(f"step {plan.step}: no row computes anything")
    if tokens and not rows_pass(state):
        raise PlanRefused(f"step {plan.step}: rows may not run: gate {state.gate.value}, asleep {state.asleep}")
