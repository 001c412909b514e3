"""Copies of states: what is mutable is copied, what is frozen or over is shared, views are derived again."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from leftfold.fsm.lifecycle import FINISHED
from leftfold.fsm.line import Line
from leftfold.fsm.policy import fcfs
from leftfold.fsm.queue import SortedQueue
from leftfold.fsm.request import SEAT_FIELDS, Request, Seat
from leftfold.fsm.rows import RowSet, StepRows

if TYPE_CHECKING:
    from leftfold.fsm.state import InFlight, State


def copy(state: State) -> State:
    """An independent state with equal digest and equal future."""
    return _Copier().state(state)


SCALARS = (
    "gate", "drain_mode", "gate_seq", "frozen", "version", "executor_present", "incarnation", "generation", "root",
    "next_step", "next_arrival", "next_order", "next_op", "chain", "voids", "closing_at", "policy",
)  # fmt: skip
"""What of a state is a number, a text or frozen; all else but its `config` is mutable."""


class _Copier:
    """Maps each request that is not over, and each seat, to its one copy."""

    def __init__(self) -> None:
        self.requests: dict[Request, Request] = {}
        self.seats: dict[Seat, Seat] = {}

    def request(self, request: Request) -> Request:
        if request.phase is FINISHED:
            return request  # nothing of it changes any more
        if request not in self.requests:
            twin = self.requests[request] = request.copy()
            if request.leader is not None:
                twin.leader = self.request(request.leader)
            if request.seat is not None:
                twin.seat = self.seat(request.seat)
        return self.requests[request]

    def seat(self, seat: Seat) -> Seat:
        if seat not in self.seats:
            twin = self.seats[seat] = Seat(seat.request, seat.slot, seat.order, seat.pages, seat.start)
            for name in SEAT_FIELDS:
                setattr(twin, name, getattr(seat, name))
            twin.pages = seat.pages.copy()
            twin.request = self.request(seat.request)
        return self.seats[seat]

    def rows(self, rows: RowSet) -> RowSet:
        return RowSet.of([self.seat(seat) for seat in rows.seats])

    def step_rows(self, rows: StepRows) -> StepRows:
        chunks = [chunk._replace(seat=self.seat(chunk.seat)) for chunk in rows.chunks]
        return StepRows(self.rows(rows.decode), rows.ends, rows.inputs, chunks, rows.page_size)

    def queue(self, queue: SortedQueue) -> SortedQueue:
        twin = SortedQueue()
        for key, request in queue.items():
            twin.add(key, self.request(request))
        return twin

    def line(self, state: State) -> Line:
        twin = Line(state.policy.rank is not fcfs)
        for request in state.waiting:
            twin.add(self.request(request))
        twin.overtakers = state.waiting.overtakers.copy()
        return twin

    def in_flight(self, step: InFlight) -> InFlight:
        return type(step)(step.step, step.digest, self.step_rows(step.rows), step.ops, step.ended.copy())

    def state(self, state: State) -> State:
        twin = type(state)(state.config, state.pool.copy(), state.columns.copy())
        for name in SCALARS:
            setattr(twin, name, getattr(state, name))
        twin.requests = {rid: self.request(request) for rid, request in state.requests.items()}
        twin.live = {key: self.request(request) for key, request in state.live.items()}
        twin.by_rid = {rid: [self.request(one) for one in requests] for rid, requests in state.by_rid.items()}
        twin.finished = deque(self.request(request) for request in state.finished)
        twin.waiting = self.line(state)
        twin.tenants = state.tenants.copy()
        twin.deadlines = self.queue(state.deadlines)
        twin.free_slots = state.free_slots.copy()
        twin.by_slot = [None if seat is None else self.seat(seat) for seat in state.by_slot]
        twin.decoding = self.rows(state.decoding)
        twin.prefilling = {slot: self.seat(seat) for slot, seat in state.prefilling.items()}
        twin.at_edge = state.at_edge.copy()
        twin.resting = {slot: self.seat(seat) for slot, seat in state.resting.items()}
        twin.stopping = [self.seat(seat) for seat in state.stopping]
        twin.suspects = state.suspects.copy()
        twin.left = state.left.copy()
        twin.in_flight = deque(self.in_flight(step) for step in state.in_flight)
        twin.closing_calls = state.closing_calls.copy()
        twin.pause_calls = state.pause_calls.copy()
        twin.controls = deque(type(control)(control.event, control.barrier, control.op) for control in state.controls)
        twin.asleep = state.asleep.copy()
        twin.memo = state.memo.copy()
        twin.counts = state.counts.copy()
        return twin
