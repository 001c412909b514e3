"""Who joins: the policy's order, the bound on overtaking, and whether slots, budget and pages allow it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from leftfold.events.plan import Join
from leftfold.fsm.draft import Draft
from leftfold.fsm.gate import DRAINING, may_join
from leftfold.fsm.lifecycle import PREEMPTED, PREFILLING, WAITING
from leftfold.fsm.limits import demand
from leftfold.fsm.policy import LOOKS_AT, MAX_OVERTAKEN, fcfs
from leftfold.fsm.prefix import extend_keys, matching
from leftfold.fsm.request import Request
from leftfold.fsm.sketch import Sketch


def eligible(sketch: Sketch) -> Iterator[Request]:
    """Requests that may join now, by rank."""
    state, overdue = sketch.state, sketch.overdue
    line = state.waiting
    draining = state.gate is DRAINING
    if draining and line.keys and not may_join(state, line.oldest):
        return  # a drain runs what came first, and nothing of that waits
    for request in line if sketch.joining is None else sketch.joining:
        if request.leader is not None and _follows(request):
            continue
        if request not in overdue and (not draining or may_join(state, request)):
            yield request


def _follows(request: Request) -> bool:
    """Whether a choice still waits for the first one to compute the prompt that they share."""
    leader = request.leader
    if leader is None or not request.reads_cache:
        return False
    return leader.phase in (WAITING, PREFILLING) or (
        leader.phase is PREEMPTED and len(leader.tokens) == leader.prompt_len
    )


def admit(sketch: Sketch) -> None:
    """Admit while slots, budget and pages last; who is next and does not fit is not overtaken in this plan."""
    if sketch.trace is None and (sketch.row_count >= sketch.config.rows or sketch.budget <= 0):
        return  # before a policy looks at the whole line for nothing
    reserve = growth_reserve(sketch)
    for request in _in_turn(sketch):
        if sketch.row_count >= sketch.config.rows:
            sketch.why(request, "slots", 1, 0, f"{sketch.row_count} rows run, which is the most")
        elif sketch.budget <= 0:
            sketch.why(request, "budget", 1, 0, "the step's token budget is spent")
        elif _join(sketch, request, reserve):
            continue
        if sketch.trace is not None:
            _explain_order(sketch, request)
        return
    if sketch.trace is not None:
        _explain_order(sketch, None)


def _in_turn(sketch: Sketch) -> Iterator[Request]:
    """The policy's order, but that whoever was overtaken too often comes next. Asked for after each join."""
    policy = sketch.state.policy
    return eligible(sketch) if policy.rank is fcfs and policy.choose is None else _chosen(sketch)


def _chosen(sketch: Sketch) -> Iterator[Request]:
    state, policy = sketch.state, sketch.state.policy
    taken: dict[Request, None] = {}
    by_rank = eligible(sketch)
    while oldest := _longest(sketch, taken, 1):
        beside = sum(other.arrival > oldest[0].arrival for other in taken)
        if state.waiting.overtaken(oldest[0], beside) >= MAX_OVERTAKEN:
            choice = oldest[0]
        elif policy.choose is not None:
            choice = policy.choose(state, _longest(sketch, taken, LOOKS_AT))
        else:
            choice = next(request for request in by_rank if request not in taken)
        taken[choice] = None
        yield choice


def _longest(sketch: Sketch, taken: dict[Request, None], count: int) -> list[Request]:
    """The first `count` by arrival that may join and have not in this plan."""
    state, found = sketch.state, []
    for request in state.waiting.by_arrival() if sketch.joining is None else sketch.joining:
        if not may_join(state, request):
            break
        if request not in taken and request not in sketch.overdue and not _follows(request):
            found.append(request)
            if len(found) == count:
                break
    return found


def need(sketch: Sketch, request: Request, draft: Draft) -> tuple[int, list[int]]:
    """New pages that `request` must be able to get, and the pages that the prefix cache has for it.

    Room for the first new token is included, so that a request is not admitted only to be preempted at once.
    """
    size, tokens = sketch.config.page_size, request.tokens
    found: list[int] = []
    if request.reads_cache:
        count = (len(tokens) - 1) // size
        extend_keys(request.keys, request.root, tokens, count, size)
        found = draft.find(islice(request.keys, count))
        if found:
            found = found[: matching(sketch.state.pool.tokens[found], tokens)]
    return demand(min(len(tokens) + 1, request.limit - 1), size) - len(found), found


def _join(sketch: Sketch, request: Request, reserve: int) -> bool:
    size, draft, count = sketch.config.page_size, sketch.draft, len(request.tokens)
    published = sketch.state.pool.published_ever
    if request.seen is not None and request.seen[1] == published and sketch.trace is None:
        most = request.seen[0]  # nothing was published since; one page may make many findable, so no sum says more
        if demand(min(count + 1, request.limit - 1), size) - most > draft.usable - reserve:
            return False
    wanted, found = need(sketch, request, draft)
    request.seen = None if draft.evicted else (len(found), published)  # this plan's evictions may never happen
    available = draft.usable - reserve - (draft.unheld(found) if found else 0)
    if wanted > available:
        text = f"{wanted} pages are needed, {available} are to be had beside {reserve} kept for rows that run"
        sketch.why(request, "pages", wanted, available, text)
        return False
    if found:
        draft.share(found)
    pages = found + draft.take(demand(count, size) - len(found))
    slot = sketch.free_slots[-1 - len(sketch.joins)]
    start = len(found) * size
    sketch.joins.append(Join(slot, request.rid, request.choice, start, [pages], request.epoch))
    sketch.chunk(slot, start, count)
    return True


def growth_reserve(sketch: Sketch, without: Sequence[int] = ()) -> int:
    """Pages that rows (but those in slots `without`) will need for `growth_horizon` more tokens each."""
    horizon, size = sketch.config.growth_horizon, sketch.config.page_size
    slots = sketch.decoding.slots
    if not horizon or not len(slots):
        return 0
    if without:
        slots = slots[~np.isin(slots, without)]
    columns = sketch.state.columns
    reach = np.minimum(columns.planned[slots] + horizon, columns.limit[slots])
    return int((-(-reach // size) + -columns.runway[slots] // size).clip(0).sum())


def _explain_order(sketch: Sketch, stuck: Request | None) -> None:
    """Why those wait that the policy did not come to; `stuck`: who did not fit."""
    joined = [(join.rid, join.epoch, join.choice) for join in sketch.joins]
    for request in sketch.state.waiting:
        if request is stuck or (request.rid, request.epoch, request.choice) in joined:
            continue
        if request in sketch.overdue:
            sketch.why(request, "deadline", 0, 0, "its deadline has passed")
        elif not may_join(sketch.state, request):
            sketch.why(request, "gate", 0, 0, "it came after the pause that is draining")
        elif _follows(request):
            sketch.why(request, "order", 0, 0, "its first choice computes the prompt that they share")
        elif stuck is not None:
            sketch.why(request, "order", 0, 0, f"behind {stuck.rid!r}, which does not fit")
