"""What must hold of a plan, of a refusal and of an engine at rest, as seen from outside the reducer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from leftfold.events import ExecutionPlan, Plan, Row, chain_digest
from leftfold.events.codec import plan_json
from leftfold.events.digest import START
from leftfold.fsm import Config, Gate, Phase, Reason, State, decide
from leftfold.replay.fuzzing.clients import Client, Key
from leftfold.replay.fuzzing.errors import Violation

GIVING_WAY = ("victim", "given_way", "held_back")
"""Kinds of reasons of rows that give their pages back, now or when a result is in."""


def refusal_code(state: State, config: Config, prompt: Sequence[int], max_tokens: int, choices: int = 1) -> str | None:
    """Why a request has to be refused now, None if it must not be."""
    count = len(prompt)
    if state.gate in (Gate.CLOSING, Gate.STOPPED):
        return "closing"
    bound = (1 << 31) if config.vocab_size is None else config.vocab_size
    if not 0 < count < config.max_model_len or count > config.num_pages * config.page_size:
        return "invalid"
    if max_tokens < 1 or choices < 1:
        return "invalid"
    if not 0 <= min(prompt) <= max(prompt) < bound:
        return "invalid"
    waiting = [request for request in state.live.values() if request.seat is None]
    if config.max_queued_requests is not None and len(waiting) + choices > config.max_queued_requests:
        return "queue_full"
    queued = sum(len(request.tokens) for request in waiting)
    if config.max_queued_tokens is not None and queued + count * choices > config.max_queued_tokens:
        return "queue_full"
    return None


def client_in(state: State, clients: Mapping[Key, Client], slot: int) -> Client | None:
    """Who runs in `slot`; None if its request has ended."""
    seat = state.by_slot[slot]
    if seat is None or state.live.get(seat.request.key) is not seat.request:
        return None
    return clients[seat.request.key]


def check_plan(state: State, config: Config, clients: Mapping[Key, Client], plan: ExecutionPlan) -> None:
    """A plan obeys the limits, and names only running rows, each once, at the position they have reached."""
    rows = plan.rows
    total = sum(row.length for row in rows)
    if not plan.plan.ops and not total or total > config.max_batch_tokens or len(rows) > config.max_running:
        raise Violation("limits", f"step {plan.step} has {len(rows)} rows with {total} tokens")
    if len({row.slot for row in rows}) != len(rows):
        raise Violation("limits", f"step {plan.step} names a slot twice")
    for row in rows:
        client = client_in(state, clients, row.slot)
        if client is None or client.key[::2] != (row.rid, row.choice) or row.length > config.chunk:
            raise Violation("limits", f"step {plan.step} computes {row.length} tokens of {row.rid!r} ({client})")
        _check_row(state, config, client, row)
        if len(rows) > 1 and client.key in state.suspects:
            raise Violation("apart", f"step {plan.step} computes {len(rows)} rows, one of them of {client.key}")


def check_room(state: State, config: Config, last: Client) -> None:
    """Who joined last finds a page for its first new token, too: it is not let in only to give way in the next step."""
    wanted = -(-min(last.known + 1, last.limit - 1) // config.page_size) - -(-last.known // config.page_size)
    if wanted > state.pool.usable:
        raise Violation("room", f"{last.key} joins with {last.known} tokens, and no page is left for the next one")


def _check_row(state: State, config: Config, client: Client, row: Row) -> None:
    context, end = [*client.prompt, *client.tokens], row.start + row.length
    told = bool(row.tokens) or len(state.in_flight) == 1  # else an earlier step, still in flight, brings the input
    if end >= client.limit or (told and list(row.tokens) != context[row.start : end]):
        raise Violation("input", f"{row.rid!r} computes {row.tokens} from {row.start}, its limit is {client.limit}")
    if row.samples != (end >= client.known):
        raise Violation("input", f"{row.rid!r} has {client.known} tokens, computes up to {end}: samples {row.samples}")
    if len(row.pages) != -(-end // config.page_size):
        raise Violation("pages", f"{row.rid!r} computes up to {end} on pages {row.pages}")
    committed = min(row.start, int(state.columns.computed[row.slot]))
    mirrored = state.pool.tokens[list(row.pages)].reshape(-1)[:committed].tolist()
    if mirrored != context[:committed]:
        raise Violation("mirror", f"pages {row.pages} of {row.rid!r} are noted to hold {mirrored}")


def check_digest(plan: ExecutionPlan) -> None:
    """An executor that was told anything else would attest to another plan."""
    attested = chain_digest(START, plan)
    others = [plan._replace(ended=(*plan.ended, 1 << 20)), plan._replace(voids=plan.voids + 1)]
    others += [plan._replace(ended=plan.ended[1:])] if plan.ended else []
    for at, tokens in enumerate(plan.chunk_tokens):
        if len(tokens):
            told = [*plan.chunk_tokens[:at], tokens + 1, *plan.chunk_tokens[at + 1 :]]
            others.append(plan._replace(chunk_tokens=told))
    for at, row in enumerate(plan.joined):
        rows = [row._replace(tokens=row.tokens + 1), row._replace(prompt_len=row.prompt_len + 1)]
        rows += [row._replace(params=replace(row.params, n=row.params.n + 1)), row._replace(want={"logprobs": 1})]
        others += [plan._replace(joined=[*plan.joined[:at], other, *plan.joined[at + 1 :]]) for other in rows]
    for other in others:
        if chain_digest(START, other) == attested:
            raise Violation("attested", f"the digest of step {plan.step} says nothing of {other}")


def check_rest(state: State) -> None:
    """Nothing lives: no page, slot, place in line or deadline may be left."""
    stats = state.stats()
    names = ("running", "waiting", "stopping", "live", "in_flight", "pages_held", "queued_tokens")
    left = [name for name in names if stats[name]]
    left += [name for name in ("controls", "pause_calls", "stopping") if getattr(state, name)]
    if left or state.wake_at is not None or state.columns.watchers:
        raise Violation("leak", f"{left} are left when nothing lives, wake_at is {state.wake_at}")
    if len(state.free_slots) != len(state.by_slot):
        raise Violation("leak", f"slots {state.free_slots} are free, not all {len(state.by_slot)}")
    for request in state.finished:
        if request.phase is not Phase.FINISHED or len(request.tokens) or request.seat is not None:
            raise Violation("leak", f"{request.key} is over, and is {request.phase} with {len(request.tokens)} tokens")


def decide_aloud(state: State, t: int, plan: Plan | None) -> None:
    """`plan` was decided; reasons are given when asked for, and asking changes nothing."""
    reasons: list[Reason] = []
    again = decide(state, t, reasons)
    if _json(plan) != _json(again):
        raise Violation("trace", f"{plan} becomes {again} when reasons are asked for")
    check_reasons(state, plan, reasons)
    if plan is not None:
        check_shortage(state, plan, reasons)


def _json(plan: Plan | None) -> bytes | None:
    return None if plan is None else plan_json(plan)


def check_reasons(state: State, plan: Plan | None, reasons: Sequence[Reason]) -> None:
    """Reasons speak of requests that live, and everybody who waits and does not join has one."""
    over = set() if plan is None else {(end.rid, end.epoch, end.choice) for end in plan.ends}
    told = {(reason.rid, reason.epoch, reason.choice) for reason in reasons}
    if not told <= state.live.keys():
        raise Violation("reasons", f"{told - state.live.keys()} do not live")
    joined = set() if plan is None else {(join.rid, join.epoch, join.choice) for join in plan.join}
    silent = [request.key for request in state.waiting if request.key not in joined | told | over]
    planned = state.gate is not Gate.STOPPED and len(state.in_flight) <= state.config.pipeline_depth
    if silent and planned and not (plan is not None and plan.memo is not None):
        raise Violation("reasons", f"nobody says why {silent} wait; told are {reasons}")


def check_shortage(state: State, plan: Plan, reasons: Sequence[Reason]) -> None:
    """Where rows lack pages, so many give way, or are left out to give way next, as it takes, or nobody computes."""
    if state.suspects or plan.step is None or plan.ops:
        return
    giving = {(reason.rid, reason.epoch, reason.choice) for reason in reasons if reason.kind in GIVING_WAY}
    giving |= {(end.rid, end.epoch, end.choice) for end in plan.ends}
    still = [chunk.slot for chunk in plan.chunks if not chunk.length]
    seats = state.running()
    gone = [seat for seat in seats if seat.request.key in giving]
    needing = [seat for seat in seats if seat.slot in state.at_edge and seat not in gone]
    held = Counter(page for seat in gone for page in seat.pages)
    usable = state.pool.usable + sum(count == state.pool.refs[page] for page, count in held.items())
    computing = [seat for seat in seats if seat.slot not in still and seat not in gone]
    if len(needing) > usable and computing:
        lack, run = [seat.request.key for seat in needing], [seat.request.key for seat in computing]
        raise Violation("shortage", f"{lack} need a page each, {usable} are or become usable; {run} compute")
