"""The engine machine: one table of (gate, trigger) -> gate, and who may be planned behind each gate."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING

from leftfold.fsm.errors import InvariantViolation

if TYPE_CHECKING:
    from leftfold.fsm.request import Request
    from leftfold.fsm.state import State


class Gate(Enum):
    """Whether the engine takes and plans work."""

    RUNNING = "running"
    DRAINING = "draining"
    PAUSED = "paused"
    CLOSING = "closing"
    STOPPED = "stopped"

    __hash__ = object.__hash__  # members are singletons; the default hashes the name anew at every look-up


RUNNING, DRAINING, PAUSED, CLOSING, STOPPED = Gate
"""The gates as globals: as attributes of an enumeration they cost five times that to look up."""


class GateTrigger(Enum):
    """What moves the gate."""

    PAUSE = "Pause"
    DRAINED = "drained"
    RESUME = "Resume"
    SHUTDOWN = "Shutdown"
    CLOSED = "nothing lives, or the deadline"
    STARTED = "Started"

    __hash__ = object.__hash__


_G, _T = Gate, GateTrigger

GATES: Mapping[tuple[Gate, GateTrigger], Gate] = {
    (_G.RUNNING, _T.PAUSE): _G.DRAINING,
    (_G.RUNNING, _T.RESUME): _G.RUNNING,
    (_G.RUNNING, _T.SHUTDOWN): _G.CLOSING,
    (_G.RUNNING, _T.STARTED): _G.RUNNING,
    (_G.DRAINING, _T.PAUSE): _G.DRAINING,
    (_G.DRAINING, _T.DRAINED): _G.PAUSED,
    (_G.DRAINING, _T.RESUME): _G.RUNNING,
    (_G.DRAINING, _T.SHUTDOWN): _G.CLOSING,
    (_G.DRAINING, _T.STARTED): _G.DRAINING,
    (_G.PAUSED, _T.PAUSE): _G.PAUSED,
    (_G.PAUSED, _T.RESUME): _G.RUNNING,
    (_G.PAUSED, _T.SHUTDOWN): _G.CLOSING,
    (_G.PAUSED, _T.STARTED): _G.PAUSED,
    (_G.CLOSING, _T.CLOSED): _G.STOPPED,
    (_G.CLOSING, _T.STARTED): _G.RUNNING,
    (_G.STOPPED, _T.STARTED): _G.RUNNING,
}


def move_gate(state: State, trigger: GateTrigger) -> None:
    """Move the gate along the table. Raises `InvariantViolation` for a pair that it does not have."""
    target = GATES.get((state.gate, trigger))
    if target is None:
        raise InvariantViolation(f"no transition from gate {state.gate.name} on {trigger.name}")
    state.gate = target


def rows_pass(state: State) -> bool:
    """Whether rows may be planned at all: an open gate, an executor, nothing asleep, no control call at its barrier."""
    gate = state.gate
    if gate is not RUNNING:
        draining = gate is DRAINING and state.drain_mode == "wait"
        if not draining and (gate is not CLOSING or state.frozen):
            return False
    if not state.executor_present or state.asleep:
        return False
    return not state.controls or not state.controls[0].barrier


def may_join(state: State, request: Request) -> bool:
    """Whether `request` may join behind this gate: a drain runs only what is older than its pause."""
    return state.gate is not DRAINING or request.arrival < state.gate_seq
