"""How requests end: the terminal output is told once, what they own is given back when nothing names it any more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from leftfold.fsm.effects import FinishReason, Outputs, closing_output
from leftfold.fsm.lifecycle import END, Trigger, advance
from leftfold.fsm.request import NO_TOKENS, Request, Seat
from leftfold.fsm.seating import dequeue, leave_rows, release
from leftfold.fsm.state import KEPT_FINISHED, InFlight, State

_COUNTED = {reason: f"finished_{reason.value}" for reason in FinishReason}


def end_with_output(
    state: State,
    request: Request,
    reason: FinishReason,
    outputs: Outputs,
    error: Mapping[str, str] | None = None,
    keep: int | None = None,
) -> None:
    """End a live request in any phase, with a terminal output that carries no tokens."""
    outputs.parts.append(closing_output(request, state.known(request), reason, error, keep, state.version))
    end(state, ((request, reason),))


def end(state: State, over: Sequence[tuple[Request, FinishReason]]) -> None:
    """End live requests whose terminal output has been told."""
    seats = [request.seat for request, _ in over if request.seat is not None]
    if seats:
        leave_rows(state, seats)
        state.left += [seat.slot for seat in seats]
    for request, reason in over:
        del state.live[request.key]
        if state.suspects:
            state.suspects.pop(request.key, None)
        alike = state.by_rid[request.rid]
        if len(alike) == 1:
            del state.by_rid[request.rid]
        else:
            alike.remove(request)
            if request.params.n > 1:
                _lead_anew(request, alike)
        state.tenants.ended(request.tenant)
        if request.deadline_at or request.queue_deadline_at:
            _drop_deadlines(state, request)
        state.counts[_COUNTED[reason]] += 1
        seat = request.seat
        if seat is None:
            dequeue(state, request)
            _gone(state, request, END)
        elif state.flies(seat):
            _mark_in_flight(state, seat)
            state.stopping.append(seat)
            advance(request, Trigger.END_IN_FLIGHT)
        else:
            release(state, seat)
            _gone(state, request, END)


def _lead_anew(gone: Request, alike: Sequence[Request]) -> None:
    """Choices that waited for one that is gone follow the first of them that lives."""
    followers = [request for request in alike if request.leader is gone]
    for request in followers:
        request.leader = None if request is followers[0] else followers[0]


def drain(state: State, step: InFlight) -> None:
    """A step is over: rows of it that ended meanwhile are released unless a later step names them."""
    for slot in step.ended:
        if any(slot in later.ended for later in state.in_flight):
            continue
        seat = next(seat for seat in state.stopping if seat.slot == slot)
        state.stopping.remove(seat)
        release(state, seat)
        _gone(state, seat.request, Trigger.DRAINED)


def drain_all(state: State) -> None:
    """Everything in flight is over without a result."""
    while state.in_flight:
        drain(state, state.in_flight.popleft())


def _mark_in_flight(state: State, seat: Seat) -> None:
    for step in state.in_flight:
        if step.rows.names(seat):
            step.ended.append(seat.slot)


def _gone(state: State, request: Request, trigger: Trigger) -> None:
    advance(request, trigger)
    forget(state, request)


def forget(state: State, request: Request) -> None:
    """A finished request can be looked up for a while; its tokens, and whom it followed, are dropped at once."""
    request.tokens = NO_TOKENS
    request.keys = []
    request.leader = None
    state.finished.append(request)
    if len(state.finished) > KEPT_FINISHED:
        oldest = state.finished.popleft()
        if state.requests.get(oldest.rid) is oldest:
            del state.requests[oldest.rid]
            if oldest.rid in state.by_rid:
                state.requests[oldest.rid] = state.by_rid[oldest.rid][-1]


def _drop_deadlines(state: State, request: Request) -> None:
    if request.deadline_at:
        state.deadlines.remove((request.deadline_at, request.arrival, 0))
    if request.queue_deadline_at:
        drop_queue_deadline(state, request)


def drop_queue_deadline(state: State, request: Request) -> None:
    """A request that has a queue deadline and has joined once cannot miss it any more."""
    state.deadlines.remove((request.queue_deadline_at, request.arrival, 1))
    request.queue_deadline_at = 0
