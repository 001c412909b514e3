"""Odd inputs: requests nobody can serve, ends of operations nobody started, calls nobody carries out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from leftfold.events import (
    Adapter,
    Admit,
    CacheOpDone,
    Call,
    Chunk,
    Control,
    ControlDone,
    End,
    Event,
    FlushCache,
    Pause,
    Plan,
    Prepared,
    Reconfigure,
    Resume,
    SamplingParams,
    Session,
    Shutdown,
    Sleep,
    TransferDone,
    UpdateWeights,
    Wake,
)
from leftfold.fsm import Config, State
from leftfold.replay.fuzzing.tampering import TAMPERINGS

STRANGE = 1 << 40
"""An operation that there is never."""

STRAYS: Mapping[str, Callable[[int], Event]] = {
    "Prepared": lambda t: Prepared(t=t, op=STRANGE),
    "CacheOpDone": lambda t: CacheOpDone(t=t, op=STRANGE, moved=1),
    "TransferDone": lambda t: TransferDone(t=t, op=STRANGE, tokens=[1]),
    "ControlDone": lambda t: ControlDone(t=t, op=STRANGE),
}
"""Ends of an operation that no plan started."""

CONTROLS: Mapping[str, Callable[..., Event]] = {
    "Session": partial(Session, session="s", open=True),
    "Pause": partial(Pause, mode="keep"),
    "Resume": Resume,
    "FlushCache": FlushCache,
    "Sleep": Sleep,
    "Wake": Wake,
    "UpdateWeights": partial(UpdateWeights, source="w", version="2"),
    "Reconfigure": partial(Reconfigure, set={"max_running": 1}),
    "Adapter": partial(Adapter, name="a", source="s", version="1"),
    "Call": partial(Call, verb="profile", args={}),
    "Shutdown": Shutdown,
}
"""Control calls by name, with fields as good as any."""


def control_event(kind: str, t: int, call: str, fields: Mapping[str, Any]) -> Event:
    """A control call of one of `CONTROLS`."""
    return CONTROLS[kind](t=t, call=call, **fields)


_PROMPTS: Mapping[str, Callable[[Config], Any]] = {
    "empty prompt": lambda config: [],
    "negative token": lambda config: [1, -1],
    "huge token": lambda config: [1 << 31],
    "text": lambda config: "text",
    "nothing": lambda config: None,
    "nested": lambda config: [[1], [2, 3]],
    "floats": lambda config: [1.5],
    "too long for the model": lambda config: [1] * config.max_model_len,
    "too long for the pool": lambda config: [1] * (config.num_pages * config.page_size + 1),
}
_PARAMS: Mapping[str, SamplingParams] = {
    "max_tokens 0": SamplingParams(max_tokens=0),
    "negative min_tokens": SamplingParams(min_tokens=-1),
    "negative stop id": SamplingParams(stop_token_ids=(-1,)),
    "one stop id": SamplingParams(stop_token_ids=5),  # type: ignore[arg-type]
    "no choices": SamplingParams(n=0),
    "too many choices": SamplingParams(n=129),
    "grammar": SamplingParams(grammar={"kind": "json", "source": "{}"}),
}
_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "adapter": {"adapter": "a"},
    "cache mode": {"cache": "often"},
    "negative deadline": {"deadline": -1},
    "task": {"task": "embed"},
    "too many logprobs": {"want": {"logprobs": 21}},
    "hidden states": {"want": {"hidden": 1}},
}
ODD_ADMITS: Sequence[str] = (*_PROMPTS, *_PARAMS, *_FIELDS)
"""Kinds of requests that no engine takes."""


def odd_admit(kind: str, t: int, config: Config, rid: str, epoch: int) -> Admit:
    """A request of one of `ODD_ADMITS`."""
    prompt, params = _PROMPTS[kind](config) if kind in _PROMPTS else [1], _PARAMS.get(kind, SamplingParams())
    return Admit(t=t, rid=rid, epoch=epoch, prompt=prompt, params=params, **_FIELDS.get(kind, {}))


SPOILED_PLANS: Sequence[str] = ("step", "slot", "page", "chunk", "end", "preempt", "ops", "order", *TAMPERINGS)
"""What may be wrong with a plan."""


def spoil_plan(kind: str, plan: Plan, state: State) -> Plan:
    """A plan like `plan` that this state cannot apply."""
    config = state.config
    if kind in TAMPERINGS:
        at = [*TAMPERINGS].index(kind)
        for name in [*TAMPERINGS][at:] + [*TAMPERINGS][:at]:  # the first for which there is an occasion
            tampered = TAMPERINGS[name](plan, state)
            if tampered is not None:
                return tampered
    if kind == "slot" and plan.join:
        return replace(plan, join=[plan.join[0]._replace(slot=len(state.by_slot)), *plan.join[1:]])
    if kind == "page" and plan.join:
        first, *others = plan.join
        return replace(plan, join=[first._replace(pages=[[*first.pages[0][:-1], config.num_pages]]), *others])
    if kind == "chunk":
        return replace(plan, chunks=[*plan.chunks, Chunk(len(state.by_slot), 1, False)])
    if kind == "end":
        return replace(plan, ends=[*plan.ends, End("nobody", 0, "deadline")])
    if kind == "preempt":
        return replace(plan, preempt=[*plan.preempt, -1])
    if kind == "ops":
        return replace(plan, ops=[*plan.ops, Control(op=STRANGE, verb="profile", args={})])
    if kind == "order" and plan.ops:
        return replace(plan, ops=[replace(op, op=op.op + 1) for op in plan.ops if isinstance(op, Control)])
    return replace(plan, step=(plan.step or 0) + 1)
