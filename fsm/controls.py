"""Control calls: one at a time, in log order, each behind its barrier, each answered when its effect has happened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from leftfold.events.plan import Control
from leftfold.events.types import Call, ControlDone, FlushCache, Reconfigure, Sleep, UpdateWeights, Wake
from leftfold.fsm.effects import Ack, Outputs
from leftfold.fsm.gate import CLOSING, STOPPED
from leftfold.fsm.lifecycle import Trigger, advance
from leftfold.fsm.limits import Config, ConfigError
from leftfold.fsm.line import Line
from leftfold.fsm.policy import POLICIES, fcfs
from leftfold.fsm.prefix import namespace
from leftfold.fsm.rows import RowSet
from leftfold.fsm.seating import put_back
from leftfold.fsm.state import ControlCall, State

TAGS = ("weights", "kv")
FIXED = ("num_pages", "page_size", "max_model_len", "vocab_size", "prefix_cache")
"""What a running engine cannot change: the memory and the model."""


def enqueue_control(state: State, event: Any, outputs: Outputs, acks: list[Ack]) -> None:
    """Take a control call into the queue, or answer at once why not."""
    closed = state.gate is STOPPED or (state.gate is CLOSING and not isinstance(event, Wake))
    fault = f"the engine is {state.gate.value}" if closed else _fault(event)
    if fault:
        acks.append(Ack(event.call, False, fault))
        return
    state.controls.append(ControlCall(event, barrier=not isinstance(event, (Call, FlushCache))))


def _fault(event: Any) -> str:
    if isinstance(event, (Sleep, Wake)) and (not event.tags or any(tag not in TAGS for tag in event.tags)):
        return f"tags {list(event.tags)!r} must be some of {', '.join(TAGS)}"
    if isinstance(event, UpdateWeights) and event.live not in ("recompute", "keep"):
        return f"live {event.live!r} must be recompute or keep"
    if isinstance(event, UpdateWeights) and not event.version:
        return "version '' must name the weights: without a name they are those of the start"
    return ""


def operation(state: State) -> Control | None:
    """The operation that the call at the head of the queue needs now; None while it waits or has it."""
    if not state.controls or state.controls[0].op is not None or not state.executor_present:
        return None
    head = state.controls[0]
    if head.barrier and state.in_flight:
        return None
    event = head.event
    if isinstance(event, Sleep):
        return Control(op=state.next_op, verb="sleep", args={"tags": _in_order(event.tags)})
    if isinstance(event, Wake):
        return Control(op=state.next_op, verb="wake", args={"tags": _in_order(event.tags)})
    if isinstance(event, UpdateWeights):
        args = {"source": event.source, "version": event.version}
        return Control(op=state.next_op, verb="update_weights", args=args)
    if isinstance(event, Call):
        return Control(op=state.next_op, verb=event.verb, args=dict(event.args))
    return None


def gives_back_rows(control: Control, head: ControlCall) -> bool:
    """Whether an operation takes the K/V of all rows with it."""
    if control.verb == "sleep":
        return "kv" in control.args["tags"]
    return isinstance(head.event, UpdateWeights) and head.event.live == "recompute"


def _in_order(tags: Any) -> list[str]:
    return [tag for tag in TAGS if tag in tags]


def launch_control(state: State) -> None:
    """The operation of the head of the queue is in a plan."""
    state.controls[0].op = state.next_op
    state.next_op += 1


def control_done(state: State, event: ControlDone, outputs: Outputs, acks: list[Ack]) -> None:
    """The operation at the head ended: its effect happens, and its call is answered."""
    if not state.controls or state.controls[0].op != event.op:
        state.count("ignored")
        return
    head = state.controls.popleft().event
    if event.error is None:
        _take_effect(state, head)
    acks.append(Ack(head.call, event.error is None, event.info if event.error is None else event.error))


def _take_effect(state: State, event: Any) -> None:
    if isinstance(event, Sleep):
        state.asleep = _in_order([*state.asleep, *event.tags])
        if "kv" in event.tags:
            state.pool.forget()
    elif isinstance(event, Wake):
        state.asleep = [tag for tag in state.asleep if tag not in event.tags]
    elif isinstance(event, UpdateWeights):
        state.version = event.version
        new_generation(state)


def settle_controls(state: State, acks: list[Ack]) -> None:
    """Calls at the head that need no operation take effect as soon as their barrier allows."""
    while state.controls:
        head = state.controls[0].event
        if isinstance(head, FlushCache):
            new_generation(state)
            answer = Ack(head.call, True, None)
        elif isinstance(head, Reconfigure) and not state.in_flight:
            answer = _reconfigure(state, head)
        elif isinstance(head, Wake) and (fault := _wakes_too_early(state, head)):
            answer = Ack(head.call, False, fault)
        else:
            return
        state.controls.popleft()
        acks.append(answer)


def _wakes_too_early(state: State, event: Wake) -> str:
    early = "kv" in event.tags and "weights" in state.asleep and "weights" not in event.tags
    return "weights are asleep: wake them first, or both" if early else ""


def lose_control(state: State, acks: list[Ack], why: str) -> None:
    """The operation in flight is lost with the executor; calls that have none yet stay in the queue."""
    if state.controls and state.controls[0].op is not None:
        acks.append(Ack(state.controls.popleft().event.call, False, why))


def new_generation(state: State) -> None:
    """Nothing cached so far is found any more, and rows that run publish nothing more in this stay."""
    state.generation += 1
    state.pool.forget()
    state.root = namespace(generation=state.generation)
    for request in state.live.values():
        request.root = namespace(generation=state.generation, salt=request.salt) if request.salt else state.root
        request.keys = []
        if request.seat is not None:
            request.seat.publishes = False
            request.seat.parent = None


def _reconfigure(state: State, event: Reconfigure) -> Ack:
    """Change limits, or refuse the whole. Rows over the new limits go back in line, the worst ranked first."""
    try:
        config = _changed(state.config, event.set)
    except (ConfigError, TypeError) as error:  # TypeError: a value that cannot even be compared
        return Ack(event.call, False, str(error))
    state.widen(config.slots)
    state.config = config
    rank_anew(state)
    rows = sorted(state.running(), key=lambda seat: seat.request.rank)
    for seat in reversed(rows[config.rows :]):
        put_back(state, seat)
        state.left.append(seat.slot)
        advance(seat.request, Trigger.PREEMPT)
    return Ack(event.call, True, None)


def _changed(config: Config, values: Mapping[str, Any]) -> Config:
    for name in values:
        if name in FIXED:
            raise ConfigError(f"{name} cannot be changed while the engine runs")
        if name not in config.as_dict():
            raise ConfigError(f"unknown configuration field {name!r}")
    return replace(config, **values)


def rank_anew(state: State) -> None:
    """Give every live request the rank that the configured policy gives it."""
    state.policy = POLICIES[state.config.policy]
    line = Line(state.policy.rank is not fcfs)
    line.overtakers = state.waiting.overtakers
    waiting = list(state.waiting)
    for request in state.live.values():
        request.rank = state.policy.rank(request)
    for request in waiting:
        line.add(request)
    state.waiting = line
    state.decoding = RowSet(state.decoding.seats, state.decoding.slots)
