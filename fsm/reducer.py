"""The fold: `step(state, event) -> Effects`, and `apply`, its half that has no freedom."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from leftfold.events import types
from leftfold.events.plan import ExecutionPlan, Plan
from leftfold.events.types import Event, ForwardDone, Started, Tick
from leftfold.fsm.admission import admit, choices
from leftfold.fsm.commit import forward_done
from leftfold.fsm.controls import control_done, enqueue_control, lose_control, settle_controls
from leftfold.fsm.effects import STOP, Ack, Effects, FinishReason, Outputs, kv_events
from leftfold.fsm.ending import end_with_output
from leftfold.fsm.gate import RUNNING
from leftfold.fsm.laws import apply_plan
from leftfold.fsm.pausing import pause, resume, settle, shutdown, stop_when_due
from leftfold.fsm.planner import decide
from leftfold.fsm.recovery import lose_executor, start
from leftfold.fsm.state import State

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
    if type(event) is ForwardDone:
        forward_done(state, event, outputs, acks)
    elif type(event) is Tick:
        if plan is not None:
            execution = apply_plan(state, plan, outputs)
            if state.closing_at and not plan.empty:
                stop_when_due(state, event.t, acks)
    elif handler := _HANDLERS.get(type(event)):
        handler(state, event, outputs, acks)
    else:
        raise TypeError(f"{type(event).__name__} is no event")
    if state.controls:
        settle_controls(state, acks)
    if state.gate is not RUNNING:
        settle(state, acks)
    heard = kv_events(state.pool) if state.pool.journal else ()
    return Effects(execution, outputs, acks, heard, state.wake_at if state.deadlines.keys or state.closing_at else None)


def _admit(state: State, event: Any, outputs: Outputs, acks: list[Ack]) -> None:
    admit(state, event, outputs)


def _abort(state: State, event: Any, outputs: Outputs, acks: list[Ack]) -> None:
    """End one request, or all; what is unknown, older or finished is a no-op."""
    reason = STOP if event.reason == "stop_string" else FinishReason.ABORT
    if event.rid is None:
        named = list(state.live.values())
    else:
        named = choices(state, event.rid, event.epoch)
        if event.choice is not None:
            named = [request for request in named if request.choice == event.choice]
    if not named:
        state.count("ignored")
    for request in named:
        end_with_output(state, request, reason, outputs, keep=event.keep)


def _started(state: State, event: Started, outputs: Outputs, acks: list[Ack]) -> None:
    start(state, event, outputs, acks)


def _executor_lost(state: State, event: Any, outputs: Outputs, acks: list[Ack]) -> None:
    lose_executor(state)
    lose_control(state, acks, "the executor was lost")


def _ignore(state: State, event: Any, outputs: Outputs, acks: list[Ack]) -> None:
    """An event of an operation that nothing waits for."""
    state.count("ignored")


def _decline(state: State, event: Any, outputs: Outputs, acks: list[Ack]) -> None:
    """A control call that these laws do not carry out is answered, never dropped."""
    acks.append(Ack(event.call, False, f"{type(event).__name__} is not supported by laws {LAWS}"))


_HANDLERS: Mapping[type, Callable[[State, Any, Outputs, list[Ack]], None]] = {
    types.Started: _started,
    types.ExecutorLost: _executor_lost,
    types.Shutdown: shutdown,
    types.Pause: pause,
    types.Resume: resume,
    types.ControlDone: control_done,
    types.Admit: _admit,
    types.Abort: _abort,
    **dict.fromkeys((types.Prepared, types.CacheOpDone, types.TransferDone), _ignore),
    **dict.fromkeys(
        (types.FlushCache, types.Sleep, types.Wake, types.UpdateWeights, types.Reconfigure, types.Call), enqueue_control
    ),
    **dict.fromkeys((types.Session, types.Adapter), _decline),
}
