"""Plans that look as good as any, and that a certain state cannot apply: each gives or takes one thing too many."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from leftfold.events import Chunk, Join, Plan
from leftfold.events.plan import Grow, as_list
from leftfold.fsm import State


def _held_page(plan: Plan, state: State) -> int | None:
    """A page of a row that stays."""
    ending = [(end.rid, end.epoch, end.choice) for end in plan.ends]
    stay = [seat for seat in state.running() if seat.slot not in plan.preempt and seat.request.key not in ending]
    return stay[-1].pages[-1] if stay else None


def _with_pages(join: Join, pages: list[int]) -> Join:
    return join._replace(pages=[pages])


def taken_slot(plan: Plan, state: State) -> Plan | None:
    """A request joins the slot of a row that stays."""
    taken = [seat.slot for seat in state.running() if seat.slot not in plan.preempt]
    if not plan.join or not taken or plan.ends:
        return None
    old, slot = plan.join[0].slot, taken[-1]
    named = [Chunk(slot, chunk.length, chunk.samples) if chunk.slot == old else chunk for chunk in plan.chunks]
    chunks = [chunk for at, chunk in enumerate(named) if chunk.slot != slot or plan.chunks[at].slot == old]
    return replace(plan, join=[plan.join[0]._replace(slot=slot), *plan.join[1:]], chunks=chunks)


def held_page(plan: Plan, state: State) -> Plan | None:
    """A page that a row holds is granted to another."""
    page = _held_page(plan, state)
    if page is None:
        return None
    if plan.grow:
        return replace(plan, grow=(Grow(plan.grow[0].slots, [*as_list(plan.grow[0].pages)[:-1], page]),))
    if not plan.join:
        return None
    *others, last = plan.join
    return replace(plan, join=[*others, _with_pages(last, [*as_list(last.pages[0])[:-1], page])])


def page_twice(plan: Plan, state: State) -> Plan | None:
    """One page is granted to two rows, or twice to one."""
    if plan.grow and len(plan.grow[0].pages) > 1:
        pages = as_list(plan.grow[0].pages)
        return replace(plan, grow=(Grow(plan.grow[0].slots, [*pages[:-1], pages[0]]),))
    for at, join in enumerate(plan.join):
        pages = as_list(join.pages[0])
        if len(pages) - join.start // state.config.page_size > 1:
            doubled = _with_pages(join, [*pages[:-1], pages[-2]])
            return replace(plan, join=[*plan.join[:at], doubled, *plan.join[at + 1 :]])
    return None


def found_too_much(plan: Plan, state: State) -> Plan | None:
    """A join counts a page as found that holds nothing of it."""
    size = state.config.page_size
    for at, join in enumerate(plan.join):
        tokens = state.live[join.rid, join.epoch, join.choice].tokens
        chunk = next(chunk for chunk in plan.chunks if chunk.slot == join.slot)
        if join.start + size < len(tokens) and chunk.length > size:
            shorter = chunk._replace(length=chunk.length - size)
            chunks = [shorter if other is chunk else other for other in plan.chunks]
            joins = [*plan.join[:at], join._replace(start=join.start + size), *plan.join[at + 1 :]]
            return replace(plan, join=joins, chunks=chunks)
    return None


def found_elsewhere(plan: Plan, state: State) -> Plan | None:
    """A join finds a page that holds its tokens, and is not known to hold them in its context."""
    pool, size = state.pool, state.config.page_size
    for at, join in enumerate(plan.join):
        request, pages = state.live[join.rid, join.epoch, join.choice], as_list(join.pages[0])
        chunk = next(chunk for chunk in plan.chunks if chunk.slot == join.slot)
        if not request.reads_cache or chunk.length <= size:
            continue
        equal = (pool.tokens == request.tokens[join.start : join.start + size]).all(axis=1).nonzero()[0].tolist()
        taken = [page for other in plan.join for page in as_list(other.pages[0])]
        others = [page for page in equal if page not in taken and pool.keys[page] is None]
        if others:
            shared = join.start // size
            longer = join._replace(start=join.start + size)
            found = _with_pages(longer, [*pages[:shared], others[0], *pages[shared + 1 :]])
            shorter = chunk._replace(length=chunk.length - size)
            chunks = [shorter if other is chunk else other for other in plan.chunks]
            return replace(plan, join=[*plan.join[:at], found, *plan.join[at + 1 :]], chunks=chunks)
    return None


def chunk_too_long(plan: Plan, state: State) -> Plan | None:
    """A row computes one token more than it has left."""
    for at, chunk in enumerate(plan.chunks):
        room = state.config.max_batch_tokens - _tokens(plan, state)
        if chunk.samples and chunk.length < state.config.chunk and room > 0:
            longer = chunk._replace(length=chunk.length + 1, samples=False)
            return replace(plan, chunks=[*plan.chunks[:at], longer, *plan.chunks[at + 1 :]])
    return None


def chunk_left_out(plan: Plan, state: State) -> Plan | None:
    """A row that prefills is not named."""
    named = [chunk for chunk in plan.chunks if chunk.length and chunk.slot in state.prefilling]
    if not named or (len(plan.chunks) == 1 and not state.decoding.seats):
        return None
    return replace(plan, chunks=[chunk for chunk in plan.chunks if chunk is not named[-1]])


def over_budget(plan: Plan, state: State) -> Plan | None:
    """A chunk computes all that is left of it, whatever the step may hold."""
    targets = {seat.slot: seat.target for seat in state.prefilling.values()}
    begun = {slot: int(state.columns.planned[slot]) for slot in targets}
    for join in plan.join:
        targets[join.slot], begun[join.slot] = len(state.live[join.rid, join.epoch, join.choice].tokens), join.start
    for at, chunk in enumerate(plan.chunks):
        if chunk.slot in targets:
            left = targets[chunk.slot] - begun[chunk.slot]
            most = min(left, state.config.chunk)
            if _tokens(plan, state) + most - chunk.length > state.config.max_batch_tokens:
                longer = Chunk(chunk.slot, most, most == left)
                return replace(plan, chunks=[*plan.chunks[:at], longer, *plan.chunks[at + 1 :]])
    return None


def _tokens(plan: Plan, state: State) -> int:
    """Tokens that a plan computes."""
    idle = [chunk.slot for chunk in plan.chunks if not chunk.length]
    ending = [state.live[rid, epoch, choice].seat for rid, choice, _, epoch in plan.ends]
    away = {*plan.preempt, *idle, *(seat.slot for seat in ending if seat is not None)}
    decoding = [seat for seat in state.decoding.seats if seat.slot not in away]
    return len(decoding) + sum(chunk.length for chunk in plan.chunks)


def victim_twice(plan: Plan, state: State) -> Plan | None:
    return replace(plan, preempt=[*plan.preempt, plan.preempt[0]]) if len(plan.preempt) else None


def end_twice(plan: Plan, state: State) -> Plan | None:
    return replace(plan, ends=[*plan.ends, plan.ends[0]]) if plan.ends else None


def no_growth(plan: Plan, state: State) -> Plan | None:
    """Rows at the end of their pages are planned on without a new one."""
    return replace(plan, grow=()) if plan.grow else None


TAMPERINGS: Mapping[str, Callable[[Plan, State], Plan | None]] = {
    "taken slot": taken_slot, "held page": held_page, "page twice": page_twice, "found too much": found_too_much,
    "found elsewhere": found_elsewhere, "chunk too long": chunk_too_long, "chunk left out": chunk_left_out,
    "over budget": over_budget, "victim twice": victim_twice, "end twice": end_twice, "no growth": no_growth,
}  # fmt: skip
"""By name; None where a plan and a state give no occasion."""
