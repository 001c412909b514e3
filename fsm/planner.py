"""The choice: which rows run, which pages they get, who is preempted, who is admitted, who has run out of time.

`decide` only reads. Rows in this order: those that decode, prefill chunks in progress, admissions by rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from leftfold.events.plan import Chunk, Control, End, Evict, Grow, Join, Plan
from leftfold.fsm.controls import gives_back_rows, operation
from leftfold.fsm.draft import Draft, next_pages
from leftfold.fsm.effects import FinishReason
from leftfold.fsm.gate import Gate, may_join, rows_pass
from leftfold.fsm.limits import demand
from leftfold.fsm.prefix import extend_keys
from leftfold.fsm.request import Request, Seat
from leftfold.fsm.rows import RowSet
from leftfold.fsm.state import State


def decide(state: State, t: int) -> Plan | None:
    """The plan for now (`t` in µs), or None when there is nothing to do."""
    wake_at = state.wake_at
    overdue = [] if wake_at is None or wake_at > t else [who for key, who in state.deadlines.items() if key[0] <= t]
    if state.closing_at and wake_at is not None and state.closing_at <= t:
        return Plan(ends=_ends(overdue), memo=dict(state.memo))  # the `Tick` at which the engine stops
    if state.gate is Gate.STOPPED or len(state.in_flight) > state.config.pipeline_depth:
        return Plan(ends=_ends(overdue)) if overdue else None
    control = operation(state) if state.controls else None
    if control is not None and state.controls[0].barrier:
        return _control_alone(state, overdue, control)
    if not rows_pass(state):
        if control is not None:
            return _control_alone(state, overdue, control)
        return Plan(ends=_ends(overdue)) if overdue else None
    busy = overdue or state.waiting or state.prefilling or state.resting or control is not None
    if busy or len(state.at_edge) > state.pool.usable:
        return _Planner(state, overdue, control).plan()
    return _same_rows(state) if state.decoding.seats else None


def _control_alone(state: State, overdue: Sequence[Request], control: Control) -> Plan:
    """A plan for one operation: rows are left out, or give their pages back where it takes their K/V."""
    dropped = [request.seat for request in overdue]
    rows = [seat for seat in state.running() if seat not in dropped]
    gone = gives_back_rows(control, state.controls[0])
    return Plan(
        step=state.next_step,
        preempt=[seat.slot for seat in rows] if gone else (),
        chunks=() if gone else [Chunk(seat.slot, 0, False) for seat in rows],
        ops=(control,),
        ends=_ends(overdue),
    )


def _same_rows(state: State) -> Plan:
    """One more token for every row; a page for those that need one."""
    needing = state.at_edge
    if not needing:
        return Plan(step=state.next_step)
    pages, evicted = next_pages(state.pool, len(needing))
    return Plan(step=state.next_step, grow=(Grow([*needing], pages),), evict=_evictions(evicted))


def _evictions(pages: Sequence[int]) -> Sequence[Evict]:
    return (Evict("device", 0, pages),) if pages else ()


def _ends(overdue: Sequence[Request]) -> list[End]:
    ends: dict[tuple[str, int], End] = {}
    for request in overdue:
        ends.setdefault(request.key, End(request.rid, request.choice, FinishReason.DEADLINE.value, request.epoch))
    return list(ends.values())


class _Planner:
    """One decision in the making. `budget`: tokens that this step may still compute."""

    def __init__(self, state: State, overdue: Sequence[Request], control: Control | None) -> None:
        self.state = state
        self.ops: Sequence[Control] = () if control is None else (control,)
        self.config = state.config
        self._draft: Draft | None = None
        self.ends: Sequence[End] = ()
        self.decoding: RowSet = state.decoding
        self.prefilling: Sequence[Seat] = [*state.prefilling.values()]
        self.free_slots = state.free_slots
        self.dropped: Sequence[int] = ()
        self.victims: list[Seat] = []
        self.left_out: list[int] = [*state.resting]
        self.held_back: list[Seat] = []
        self.grow: tuple[Grow, ...] = ()
        self.chunks: list[Chunk] = []
        self.joins: list[Join] = []
        if overdue:
            self.ends = _ends(overdue)
            self._drop([request.seat for request in overdue if request.seat is not None])
        self.budget = 0

    @property
    def draft(self) -> Draft:
        """Made when pages are first asked for: most steps need none."""
        if self._draft is None:
            self._draft = Draft(self.state.pool)
        return self._draft

    def plan(self) -> Plan | None:
        short = self.state.at_edge and not self._grow()
        self.chunks = [Chunk(slot, 0, False) for slot in self.left_out]
        decoding = len(self.decoding) - len(self.left_out)
        self.budget = self.config.max_batch_tokens - decoding
        if self.prefilling:
            self._continue()
        if self.state.waiting and not short:
            self._admit()
        if not decoding and not self.ops and not any(chunk.length for chunk in self.chunks):
            return Plan(ends=self.ends) if self.ends else None
        return Plan(
            step=self.state.next_step,
            join=self.joins,
            preempt=[seat.slot for seat in self.victims],
            chunks=self.chunks,
            grow=self.grow,
            evict=_evictions(self._draft.evicted) if self._draft is not None else (),
            ops=self.ops,
            ends=self.ends,
        )

    def _drop(self, seats: Sequence[Seat]) -> None:
        """Plan as if these rows had left: what no step in flight names of them is to be had."""
        slots = self.dropped = [seat.slot for seat in seats]
        landed = [seat for seat in seats if not self.state.flies(seat)]
        for seat in landed:
            self.draft.release(seat.pages)
        self._leave(seats)
        self.left_out = [slot for slot in self.left_out if slot not in slots]
        self.free_slots = [*self.free_slots, *(seat.slot for seat in landed)]

    def _leave(self, seats: Sequence[Seat]) -> None:
        gone = [index for index, seat in enumerate(self.decoding.seats) if seat in seats]
        if gone:
            self.decoding = self.decoding.without(gone)
        self.prefilling = [seat for seat in self.prefilling if seat not in seats]

    def _grow(self) -> bool:
        """A page for every row that needs one; whether there was one for each without anybody's making room."""
        needing = [slot for slot in self.state.at_edge if slot not in self.dropped]
        short = len(needing) > self.draft.usable
        if short:
            needing = self._make_room(needing)
        if needing:
            self.grow = (Grow(needing, self.draft.take(len(needing))),)
        return not short

    def _make_room(self, needing: list[int]) -> list[int]:
        """Preempt from the worst rank until the rows that need a page can have one; the slots that get one.

        A row that a step in flight names cannot be a victim: it is left out of this plan, so that it can be one when
        its result is in. Every victim adds usable pages or needs one itself. With nothing in flight the best ranked
        row is never reached: alone, it can always grow, since its limit is at most what the pool holds.
        """
        rows = sorted((*self.decoding.seats, *self.prefilling), key=lambda seat: seat.request.rank, reverse=True)
        hoped = 0  # pages of rows that are left out to become victims
        for seat in rows:
            if len(needing) <= self.draft.usable + hoped:
                break
            needs, gain = seat.slot in needing, self.draft.gain(seat.pages)
            if not needs and not gain:
                continue
            if needs:
                needing.remove(seat.slot)
            if not self.state.flies(seat):
                self.victims.append(seat)
                self.draft.release(seat.pages)
            else:
                hoped += gain
                self._leave_out(seat)
        self._leave(self.victims)
        by_rank = [seat for seat in reversed(rows) if seat.slot in needing]
        for seat in by_rank[self.draft.usable :]:
            self._leave_out(seat)
        fed = [seat.slot for seat in by_rank[: self.draft.usable]]
        return [slot for slot in needing if slot in fed]

    def _leave_out(self, seat: Seat) -> None:
        """No token for this row now. Chunks that are left of its prompt are left out with it."""
        if seat in self.prefilling:
            self.held_back.append(seat)
        elif seat.slot not in self.left_out:
            self.left_out.append(seat.slot)

    def _chunk(self, slot: int, start: int, target: int) -> None:
        length = min(self.budget, self.config.chunk, target - start)
        self.budget -= length
        self.chunks.append(Chunk(slot, length, length > 0 and start + length == target))

    def _continue(self) -> None:
        planned = self.state.columns.planned
        for seat in self.prefilling:
            if seat in self.held_back:
                self.chunks.append(Chunk(seat.slot, 0, False))
            else:
                self._chunk(seat.slot, int(planned[seat.slot]), seat.target)

    def _admit(self) -> None:
        """Admit by rank while slots, budget and pages last; who does not fit is not overtaken."""
        room = self.config.rows - len(self.decoding) - len(self.prefilling)
        gone = [(end.rid, end.epoch) for end in self.ends]
        state = self.state
        for request in state.waiting:
            if request.key in gone or not may_join(state, request):
                continue
            if room <= len(self.joins) or self.budget <= 0 or not self._join(request):
                break

    def _join(self, request: Request) -> bool:
        size, draft, tokens = self.config.page_size, self.draft, request.tokens
        found: list[int] = []
        if request.reads_cache:
            extend_keys(request.keys, request.root, tokens, max((len(tokens) - 1) // size, len(request.keys)), size)
            found = draft.find(request.keys[: (len(tokens) - 1) // size])
            found = found[: self._matching(tokens, found)] if found else found
        # room for the first new token too, so that a request is not admitted only to be preempted at once
        wanted = demand(min(len(tokens) + 1, request.limit - 1), size) - len(found)
        if wanted > draft.usable - (draft.unheld(found) if found else 0):
            return False
        if found:
            draft.share(found)
        granted = draft.take(demand(len(tokens), size) - len(found))
        slot = self.free_slots[-1 - len(self.joins)]
        start = len(found) * size
        self.joins.append(Join(slot, request.rid, request.choice, start, [found + granted], request.epoch))
        self._chunk(slot, start, len(tokens))
        return True

    def _matching(self, tokens: np.ndarray, found: list[int]) -> int:
        """How many found pages really hold these tokens: equal keys are not taken on trust."""
        size = self.config.page_size
        held = self.state.pool.tokens[found]
        wrong = (held != tokens[: len(found) * size].reshape(held.shape)).any(axis=1)
        return int(wrong.argmax()) if wrong.any() else len(found)
