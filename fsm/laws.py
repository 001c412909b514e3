"""The law: what applying a plan does to a state. It has no freedom, and refuses a plan before it writes anything."""

from __future__ import annotations

from collections.abc import Sequence

from leftfold.events.digest import digest_of
from leftfold.events.plan import Control, ExecutionPlan, IntArray, Join, Joined, Plan, TokenArray, as_list
from leftfold.fsm import few
from leftfold.fsm.columns import ONE
from leftfold.fsm.controls import launch_control
from leftfold.fsm.effects import FinishReason, Outputs
from leftfold.fsm.ending import drop_queue_deadline, end_with_output
from leftfold.fsm.lifecycle import JOIN, Trigger, advance
from leftfold.fsm.prefix import extend_keys
from leftfold.fsm.request import NO_TOKENS, Seat
from leftfold.fsm.rows import ChunkRow, RowSet, StepRows
from leftfold.fsm.seating import dequeue, planned_through, put_back, take_seat
from leftfold.fsm.state import InFlight, State
from leftfold.fsm.validity import refuse_invalid


def apply_plan(state: State, plan: Plan, outputs: Outputs) -> ExecutionPlan | None:
    """Apply `plan`; what the executor gets, or None when it has nothing to do. Raises `PlanRefused`."""
    refuse_invalid(state, plan)
    for rid, choice, reason, epoch in plan.ends:
        end_with_output(state, state.live[rid, epoch, choice], FinishReason(reason), outputs)
    if plan.memo is not None:
        state.memo = dict(plan.memo)
    if plan.step is None:
        return None
    for slot in plan.preempt:
        _preempt(state, slot)
    if plan.ops:
        launch_control(state)
    joined = [_join(state, row) for row in plan.join] if plan.join else []
    for slots, pages in plan.grow:
        _grow(state, as_list(slots), as_list(pages))
    for _, _, pages in plan.evict:
        cached = state.pool.cached
        dropped = as_list(pages)
        if not cached.keys().isdisjoint(dropped):  # the rest was granted
            state.pool.evict([page for page in dropped if page in cached])
    return _launch(state, plan, joined)


def _grow(state: State, slots: Sequence[int], pages: Sequence[int]) -> None:
    """Append one page to each row, once in `page_size` of its steps; all of them had none left to plan on."""
    state.pool.grant(pages)
    cells, size, by_slot = state.columns.cells, state.config.page_size, state.by_slot
    base, runway = cells.base, cells.runway
    for slot, page in zip(slots, pages, strict=True):
        seat = by_slot[slot]
        assert seat is not None
        held = seat.pages
        held.append(page)
        reach, last = len(held) * size, seat.last
        runway[slot] = reach if reach < last else last
        if seat.edge == reach:  # all before is committed; otherwise the commit that fills the page before turns to this
            base[slot] = page * size - reach + size
    state.at_edge = [slot for slot in state.at_edge if slot not in slots] if len(slots) < len(state.at_edge) else []


def _preempt(state: State, slot: int) -> None:
    seat = state.by_slot[slot]
    assert seat is not None
    put_back(state, seat)
    advance(seat.request, Trigger.PREEMPT)
    seat.request.preemptions += 1
    state.count("preemptions")


def _join(state: State, row: Join) -> Joined:
    request = state.live[row.rid, row.epoch, row.choice]
    pages, pool, size = [*as_list(row.pages[0])], state.pool, state.config.page_size
    shared = row.start // size
    dequeue(state, request)
    state.waiting.joined(request)
    if request.queue_deadline_at:
        drop_queue_deadline(state, request)
    if shared:
        extend_keys(request.keys, request.root, request.tokens, shared, size)  # nobody may have decided here
        for page in pages[:shared]:
            pool.share(page)
    pool.grant(pages[shared:] if shared else pages)
    if request.cached < 0:
        request.cached = row.start
        if request.reads_cache:
            state.counts["prefix_queries"] += request.prompt_len
            state.counts["prefix_hits"] += request.cached
    take_seat(state, request, row.slot, pages, row.start)
    advance(request, JOIN)
    return Joined(
        row.slot, row.rid, row.choice, row.start, request.prompt_len, request.tokens, tuple(pages), request.params,
        request.epoch, request.want,
    )  # fmt: skip


def _launch(state: State, plan: Plan, joined: list[Joined]) -> ExecutionPlan:
    step, decode, voids = plan.step, state.decoding, state.voids
    assert step is not None
    chunks: Sequence[ChunkRow] = ()
    tokens: Sequence[TokenArray] = ()
    ended: Sequence[int] = ()
    if plan.chunks:
        chunks, decode = _chunk_rows(state, plan), _decode_rows(state, plan)
        tokens = [chunk.tokens for chunk in chunks]
    rows = _plan_on(state, decode, chunks)
    if state.left:
        ended, state.left = tuple(sorted(state.left)), []
    state.chain = digest = digest_of(state.chain, plan, ended, joined, tokens, voids)
    state.next_step += 1
    ops = [op.op for op in plan.ops if isinstance(op, Control)] if plan.ops else ()
    state.in_flight.append(InFlight(step, digest, rows, ops))
    return ExecutionPlan(plan, ended, joined, tokens, digest, rows, voids)


def _plan_on(state: State, decode: RowSet, chunks: Sequence[ChunkRow]) -> StepRows:
    """Plan every row on by what this step computes; note those that cannot simply be planned on again."""
    ends, inputs, through = (few.plan_few if len(decode.seats) <= few.FEW else _plan_many)(state, decode)
    if through or chunks:
        planned_through(state, through, [chunk.seat for chunk in chunks if chunk.samples])
    return StepRows(decode, ends, inputs, chunks, state.config.page_size)


def _plan_many(state: State, decode: RowSet) -> tuple[IntArray, IntArray | None, list[Seat]]:
    """As `few.plan_few`, by column."""
    columns, slots = state.columns, decode.slots
    inputs = None if state.in_flight else columns.last[slots]
    planned = columns.planned[slots] + ONE
    columns.planned[slots] = planned
    through: list[Seat] = []
    for index in (planned >= columns.runway[slots]).nonzero()[0].tolist():
        seat = decode.seats[index]
        if planned.item(index) >= seat.last:
            through.append(seat)
        else:
            state.at_edge.append(seat.slot)
    return planned, inputs, through


def _decode_rows(state: State, plan: Plan) -> RowSet:
    """Rows that decode one token: all that have their prompt planned, but those that the plan leaves out."""
    by_slot, prefilling, resting, rows = state.by_slot, state.prefilling, state.resting, state.decoding
    left_out = [
        by_slot[slot]
        for slot, length, _ in plan.chunks
        if not length and slot not in prefilling and slot not in resting
    ]
    return rows.without(rows.indices(left_out)) if left_out else rows


def _chunk_rows(state: State, plan: Plan) -> list[ChunkRow]:
    rows: list[ChunkRow] = []
    planned = state.columns.cells.planned
    for slot, length, samples in plan.chunks:
        seat = state.by_slot[slot]
        assert seat is not None
        start = planned[slot]
        if length:
            planned[slot] = end = start + length
            rows.append(ChunkRow(seat, start, length, samples, seat.request.tokens[start:end]))
        else:
            rows.append(ChunkRow(seat, start, 0, samples, NO_TOKENS))
    return rows
