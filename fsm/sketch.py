"""One decision in the making: what the plan has so far, and what may still be spent."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from leftfold.events.plan import Chunk, Control, End, Evict, Grow, Join, Plan
from leftfold.fsm.draft import Draft
from leftfold.fsm.effects import FinishReason
from leftfold.fsm.reasons import Reason
from leftfold.fsm.request import Request, Seat
from leftfold.fsm.rows import RowSet
from leftfold.fsm.state import State


def deadline_ends(overdue: Iterable[Request]) -> list[End]:
    """Each of these requests once, ending with `deadline`."""
    return [
        End(request.rid, request.choice, FinishReason.DEADLINE.value, request.epoch)
        for request in dict.fromkeys(overdue)
    ]


def evictions(pages: Sequence[int]) -> Sequence[Evict]:
    return (Evict("device", 0, pages),) if pages else ()


def idle(slots: Iterable[int]) -> list[Chunk]:
    """Rows that compute nothing in a plan."""
    return [Chunk(slot, 0, False) for slot in slots]


class Sketch:
    """`decoding`, `prefilling`: the rows of this plan, `resting`: slots of those that are planned up to their limit.
    `gone`: slots that leave with it. `left_out`: other decode rows that compute nothing in it, `held_back`: chunk rows
    likewise. `budget`: tokens that may still be computed. `joining`: who may join (None: whoever waits). `trace`: where
    reasons go, if anybody asks.
    """

    def __init__(
        self, state: State, overdue: Collection[Request], control: Control | None, trace: list[Reason] | None
    ) -> None:
        self.state = state
        self.config = state.config
        self.trace = trace
        self.draft = Draft(state.pool)
        self.ops: Sequence[Control] = () if control is None else (control,)
        self.overdue = dict.fromkeys(overdue) if overdue else {}
        self.decoding: RowSet = state.decoding
        self.prefilling: Sequence[Seat] = [*state.prefilling.values()] if state.prefilling else ()
        self.free_slots = state.free_slots
        self.gone: list[int] = []
        self.victims: list[Seat] = []
        self.resting: Mapping[int, Seat] = state.resting
        self.left_out: list[int] = []
        self.held_back: list[Seat] = []
        self.grow: tuple[Grow, ...] = ()
        self.chunks: list[Chunk] = []
        self.joins: list[Join] = []
        self.budget = 0
        self.joining: Sequence[Request] | None = None
        if self.overdue:
            self.leave([request.seat for request in self.overdue if request.seat is not None])

    @property
    def rows(self) -> list[Seat]:
        """All rows, the worst ranked first."""
        seats = (*self.decoding.seats, *self.resting.values(), *self.prefilling)
        return sorted(seats, key=lambda seat: seat.request.rank, reverse=True)

    @property
    def row_count(self) -> int:
        return len(self.decoding.seats) + len(self.resting) + len(self.prefilling) + len(self.joins)

    def leave(self, seats: Sequence[Seat]) -> None:
        """Plan as if these rows had left: what no step in flight names of them is to be had."""
        landed = [seat for seat in seats if not self.state.flies(seat)]
        for seat in landed:
            self.draft.release(seat.pages)
        self.gone += [seat.slot for seat in seats]
        if indices := self.decoding.indices(seats):
            self.decoding = self.decoding.without(indices)
        self.prefilling = [seat for seat in self.prefilling if seat not in seats]
        self.resting = {slot: seat for slot, seat in self.resting.items() if slot not in self.gone}
        self.left_out = [slot for slot in self.left_out if slot not in self.gone]
        self.free_slots = [*self.free_slots, *(seat.slot for seat in landed)]

    def preempt(self, seat: Seat) -> None:
        """`seat` gives its pages back in this plan; no step in flight names it."""
        self.victims.append(seat)
        self.leave((seat,))

    def leave_out(self, seat: Seat) -> None:
        """No token for this row now."""
        if seat in self.prefilling:
            if seat not in self.held_back:
                self.held_back.append(seat)
        elif seat.slot not in self.left_out and seat.slot not in self.resting:
            self.left_out.append(seat.slot)

    def chunk(self, slot: int, start: int, target: int) -> None:
        """As much of positions `start` to `target` as the budget allows."""
        length, most = target - start, self.config.chunk
        if length > most:
            length = most
        if length > self.budget:
            length = self.budget
        self.budget -= length
        self.chunks.append(Chunk(slot, length, length > 0 and start + length == target))

    def why(self, request: Request, kind: str, needed: int, available: int, text: str) -> None:
        """Note a reason; callers ask `trace` first where the text costs."""
        if self.trace is not None:
            self.trace.append(Reason(request.rid, request.epoch, request.choice, kind, needed, available, text))

    def plan(self) -> Plan | None:
        """The plan, or None when it would change nothing."""
        ends = deadline_ends(self.overdue) if self.overdue else ()
        works = len(self.decoding) > len(self.left_out) or any(chunk.length for chunk in self.chunks)
        if not works and not self.ops:
            return Plan(ends=ends) if ends else None
        return Plan(
            step=self.state.next_step,
            join=self.joins,
            preempt=[seat.slot for seat in self.victims],
            chunks=self.chunks,
            grow=self.grow,
            evict=evictions(self.draft.evicted),
            ops=self.ops,
            ends=ends,
        )
