"""Pause, resume, shutdown: what moves the gate, and when each call is answered."""

from __future__ import annotations

from leftfold.events.types import Pause, Resume, Shutdown
from leftfold.fsm.effects import Ack, FinishReason, Outputs
from leftfold.fsm.ending import end_with_output
from leftfold.fsm.gate import CLOSING, DRAINING, PAUSED, RUNNING, STOPPED, GateTrigger, move_gate
from leftfold.fsm.state import State

MODES = ("wait", "keep", "abort")
"""From the laxest to the strictest: finish what runs; stop after the step in flight; end everything."""


def pause(state: State, event: Pause, outputs: Outputs, acks: list[Ack]) -> None:
    """Begin to drain, or make a drain stricter; answered when drained."""
    if event.mode not in MODES:
        acks.append(Ack(event.call, False, f"mode {event.mode!r} is none of {', '.join(MODES)}"))
        return
    if state.gate in (CLOSING, STOPPED):
        acks.append(Ack(event.call, False, f"the engine is {state.gate.value}"))
        return
    if state.gate is RUNNING:
        state.drain_mode = event.mode
        state.gate_seq = state.next_arrival
    elif MODES.index(event.mode) > MODES.index(state.drain_mode):
        state.drain_mode = event.mode
    move_gate(state, GateTrigger.PAUSE)
    if event.mode == "abort":
        for request in list(state.live.values()):
            end_with_output(state, request, FinishReason.ABORT, outputs)
    if state.gate is PAUSED:
        acks.append(Ack(event.call, True, {"mode": state.drain_mode}))
    else:
        state.pause_calls.append(event.call)


def resume(state: State, event: Resume, outputs: Outputs, acks: list[Ack]) -> None:
    """Run again; pauses that are still draining are superseded."""
    if state.gate in (CLOSING, STOPPED):
        acks.append(Ack(event.call, False, f"the engine is {state.gate.value}"))
        return
    if state.asleep:
        acks.append(Ack(event.call, False, f"{', '.join(state.asleep)} asleep: wake first"))
        return
    move_gate(state, GateTrigger.RESUME)
    acks += [Ack(call, False, "superseded by a resume") for call in state.pause_calls]
    state.pause_calls = []
    acks.append(Ack(event.call, True, None))


def shutdown(state: State, event: Shutdown, outputs: Outputs, acks: list[Ack]) -> None:
    """Refuse admissions; answered when nothing lives, or at the earliest deadline. A paused engine plans no more."""
    if state.gate is STOPPED:
        acks.append(Ack(event.call, True, "the engine is stopped"))
        return
    due = event.t + event.deadline if event.deadline else 0
    closing = state.gate is CLOSING
    state.closing_at = min(due or state.closing_at, state.closing_at or due) if closing else due
    state.closing_calls.append(event.call)
    if closing:
        return
    state.frozen = state.gate is PAUSED
    move_gate(state, GateTrigger.SHUTDOWN)
    acks += [Ack(call, False, "superseded by a shutdown") for call in state.pause_calls]
    state.pause_calls = []


def settle(state: State, acks: list[Ack]) -> None:
    """Looked at after every event: has a drain, or the closing engine, come to its end?"""
    if state.gate is DRAINING and _drained(state):
        move_gate(state, GateTrigger.DRAINED)
        acks += [Ack(call, True, {"mode": state.drain_mode}) for call in state.pause_calls]
        state.pause_calls = []
    elif state.gate is CLOSING and _through(state):
        stop(state, acks)


def _through(state: State) -> bool:
    """Whether nothing is on the device, and nothing lives or will run."""
    working = state.in_flight or (state.controls and state.controls[0].op is not None)
    return not working and (not state.live or _rests(state))


def _rests(state: State) -> bool:
    """Whether nothing that lives will run any more: it closes from PAUSED, or sleeps and no call will wake it."""
    return state.frozen or (bool(state.asleep) and not state.controls)


def _drained(state: State) -> bool:
    if state.in_flight:
        return False
    if state.drain_mode == "keep":
        return True
    oldest = next(iter(state.live.values()), None)  # live requests are in the order they came
    return oldest is None or oldest.arrival >= state.gate_seq


def stop_when_due(state: State, t: int, acks: list[Ack]) -> None:
    """CLOSING ends at its deadline although something lives: that is for the next `Started`."""
    if state.gate is CLOSING and state.closing_at and t >= state.closing_at:
        stop(state, acks)


def stop(state: State, acks: list[Ack]) -> None:
    """CLOSING becomes STOPPED; control calls that still wait will not happen."""
    move_gate(state, GateTrigger.CLOSED)
    acks += [Ack(control.event.call, False, "the engine stopped before it was done") for control in state.controls]
    state.controls.clear()
    acks += [Ack(call, True, {"live": len(state.live)}) for call in state.closing_calls]
    state.closing_calls, state.closing_at, state.frozen = [], 0, False
