"""The fold: `step(state, event) -> Effects`, and `apply`, its half that has no freedom."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from leftfold.events import types
from leftfold.events.plan import ExecutionPlan, Plan
from leftfold.events.types import Abort, Event, ForwardDone, Shutdown, Started, Tick
from leftfold.fsm.admission import admit
from leftfold.fsm.commit import forward_done
from leftfold.fsm.effects import Ack, Effects, FinishReason, Outputs
from leftfold.fsm.ending import end_with_output
from leftfold.fsm.laws import apply_plan
from leftfold.fsm.planner import decide
from leftfold.fsm.recovery import lose_executor, start
from leftfold.fsm.state import Gate, State

LAWS = 1
"""The number of the laws in force, as `Started.laws` records it."""


def step(state: State, event: Event) -> Effects:
    """Fold one event into `state` (which is mutated) and return what follows from it.

    A `Tick` without a plan is decided here first. Raises `PlanRefused` for a `Tick` whose plan this state cannot
    apply (nothing is written then) and `TypeError` for what is no event; a client's or an executor's fault never
    raises.
    """
    if type(event) is Tick and event.plan is None:
        return apply(state, event, decide(state, event.t))
    return apply(state, event, event.plan if type(event) is Tick else None)


def apply(state: State, event: Event, plan: Plan | None = None) -> Effects:
    """Apply an event, a `Tick` with the given plan; only writes, and leaves nothing to choose."""
    outputs = Outputs()
    acks: list[Ack] = []
    execution: ExecutionPlan | None = None
    if type(event) is Tick:
        if plan is not None:
            execution = apply_plan(state, plan, outputs)
            _stop_when_due(state, event.t, acks)
    elif type(event) is ForwardDone:
        forward_done(state, event, outputs)
    else:
        _HANDLERS[type(event)](state, event, outputs, acks)
    if state.gate is Gate.CLOSING and not state.live and not state.in_flight:
        _stop(state, acks)
    return Effects(execution, outputs, acks, (), state.wake_at)


def _admit(state: State, event: Any, outputs: Outputs, acks: list[Ack]) -> None:
    admit(state, event, outputs)


def _abort(state: State, event: Abort, outputs: Outputs, acks: list[Ack]) -> None:
    """End one request, or all; what is unknown, older or finished is a no-op."""
    reason = FinishReason.STOP if event.reason == "stop_string" else FinishReason.ABORT
    if event.rid is None:
        named = list(state.live.values())
    else:
        newest = state.requests.get(event.rid)
        epoch = event.epoch if event.epoch is not None else newest.epoch if newest else 0
        request = state.live.get((event.rid, epoch))
        named = [] if request is None or event.choice not in (None, request.choice) else [request]
    if not named:
        state.count("ignored")
    for request in named:
        end_with_output(state, request, reason, outputs, keep=event.keep)


def _started(state: State, event: Started, outputs: Outputs, acks: list[Ack]) -> None:
    start(state, event, outputs, acks)


def _executor_lost(state: State, event: Any, outputs: Outputs, acks: list[Ack]) -> None:
    lose_executor(state)


def _shutdown(state: State, event: Shutdown, outputs: Outputs, acks: list[Ack]) -> None:
    if state.gate in (Gate.CLOSING, Gate.STOPPED):
        acks.append(Ack(event.call, state.gate is Gate.STOPPED, f"the engine is {state.gate.value}"))
        return
    state.gate = Gate.CLOSING
    state.closing_call = event.call
    state.closing_at = event.t + event.deadline if event.deadline else 0


def _stop_when_due(state: State, t: int, acks: list[Ack]) -> None:
    """CLOSING ends at its deadline although something lives: that is for the next `Started`."""
    if state.gate is Gate.CLOSING and state.closing_at and t >= state.closing_at:
        _stop(state, acks)


def _stop(state: State, acks: list[Ack]) -> None:
    state.gate = Gate.STOPPED
    acks.append(Ack(state.closing_call or "", True, {"live": len(state.live)}))
    state.closing_call, state.closing_at = None, 0


def _ignore(state: State, event: Any, outputs: Outputs, acks: list[Ack]) -> None:
    """An event of an operation that nothing waits for."""
    state.count("ignored")


def _decline(state: State, event: Any, outputs: Outputs, acks: list[Ack]) -> None:
    """A control call that these laws do not carry out is answered, never dropped."""
    acks.append(Ack(event.call, False, f"{type(event).__name__} is not supported by laws {LAWS}"))


_HANDLERS: Mapping[type, Callable[[State, Any, Outputs, list[Ack]], None]] = {
    types.Started: _started,
    types.ExecutorLost: _executor_lost,
    types.Shutdown: _shutdown,
    types.Admit: _admit,
    types.Abort: _abort,
    **dict.fromkeys((types.Prepared, types.CacheOpDone, types.TransferDone, types.ControlDone), _ignore),
    **dict.fromkeys(
        (
            types.Session, types.Pause, types.Resume, types.FlushCache, types.Sleep, types.Wake, types.UpdateWeights,
            types.Reconfigure, types.Adapter, types.Call,
        ),
        _decline,
    ),
}  # fmt: skip
