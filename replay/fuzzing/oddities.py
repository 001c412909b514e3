"""Odd inputs: requests nobody can serve, ends of operations nobody started, calls nobody carries out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from leftfold.events import (
    Adapter,
    Admit,
    CacheOpDone,
    Call,
    Chunk,
    ControlDone,
    End,
    Event,
    ExecutionPlan,
    FlushCache,
    ForwardDone,
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
from leftfold.fsm import Config

STRAYS: Mapping[str, Callable[[int], Event]] = {
    "Prepared": lambda t: Prepared(t=t, op=3),
    "CacheOpDone": lambda t: CacheOpDone(t=t, op=3, moved=1),
    "TransferDone": lambda t: TransferDone(t=t, op=3, tokens=[1]),
    "ControlDone": lambda t: ControlDone(t=t, op=3),
}
"""Ends of an operation that no plan started."""

CONTROLS: Mapping[str, Callable[[int, str], Event]] = {
    "Session": lambda t, call: Session(t=t, call=call, session="s", open=True),
    "Pause": lambda t, call: Pause(t=t, call=call, mode="keep"),
    "Resume": lambda t, call: Resume(t=t, call=call),
    "FlushCache": lambda t, call: FlushCache(t=t, call=call),
    "Sleep": lambda t, call: Sleep(t=t, call=call),
    "Wake": lambda t, call: Wake(t=t, call=call),
    "UpdateWeights": lambda t, call: UpdateWeights(t=t, call=call, source="w", version="2"),
    "Reconfigure": lambda t, call: Reconfigure(t=t, call=call, set={"max_running": 1}),
    "Adapter": lambda t, call: Adapter(t=t, call=call, name="a", source="s", version="1"),
    "Call": lambda t, call: Call(t=t, call=call, verb="profile", args={}),
    "Shutdown": lambda t, call: Shutdown(t=t, call=call),
}
"""Control calls; `Shutdown` stands here for one that comes when the gate is closing already."""

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
    "two choices": SamplingParams(n=2),
    "grammar": SamplingParams(grammar={"kind": "json", "source": "{}"}),
}
_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "adapter": {"adapter": "a"},
    "cache mode": {"cache": "often"},
    "negative deadline": {"deadline": -1},
    "task": {"task": "embed"},
    "logprobs": {"want": {"logprobs": 1}},
}
ODD_ADMITS: Sequence[str] = (*_PROMPTS, *_PARAMS, *_FIELDS)
"""Kinds of requests that no engine takes."""


def odd_admit(kind: str, t: int, config: Config) -> Admit:
    """A request of one of `ODD_ADMITS`."""
    prompt = _PROMPTS[kind](config) if kind in _PROMPTS else [1]
    return Admit(t=t, rid="odd", prompt=prompt, params=_PARAMS.get(kind, SamplingParams()), **_FIELDS.get(kind, {}))


SPOILS: Sequence[str] = ("digest", "count", "counts", "range", "text", "order")
"""What may be wrong with a result."""


def spoil(kind: str, t: int, plan: ExecutionPlan, tokens: Sequence[int]) -> ForwardDone:
    """The result of `plan`, with one thing wrong; `order`: it is not the oldest one's (or, where it is, miscounted)."""
    if kind == "digest":
        return ForwardDone(t=t, step=plan.step, tokens=tokens, digest="f" * 32)
    if kind == "count":
        return ForwardDone(t=t, step=plan.step, tokens=[*tokens, 1], digest=plan.digest)
    if kind in ("range", "text"):
        wrong: list[Any] = [*tokens[:-1], 1 << 31 if kind == "range" else "a token"]
        return ForwardDone(t=t, step=plan.step, tokens=wrong, digest=plan.digest)
    if kind == "counts" or kind == "order":
        return ForwardDone(t=t, step=plan.step, tokens=tokens, digest=plan.digest, counts=[2])
    return ForwardDone(t=t, step=plan.step, tokens=tokens, digest=plan.digest)


SPOILED_PLANS: Sequence[str] = ("step", "slot", "page", "chunk", "end", "preempt")
"""What may be wrong with a plan."""


def spoil_plan(kind: str, plan: Plan, config: Config) -> Plan:
    """A plan like `plan` that no state can apply."""
    if kind == "slot" and plan.join:
        return replace(plan, join=[plan.join[0]._replace(slot=config.slots), *plan.join[1:]])
    if kind == "page" and plan.join:
        first, *others = plan.join
        return replace(plan, join=[first._replace(pages=[[*first.pages[0][:-1], config.num_pages]]), *others])
    if kind == "chunk":
        return replace(plan, chunks=[*plan.chunks, Chunk(config.slots, 1, False)])
    if kind == "end":
        return replace(plan, ends=[*plan.ends, End("nobody", 0, "deadline")])
    if kind == "preempt":
        return replace(plan, preempt=[*plan.preempt, -1])
    return replace(plan, step=(plan.step or 0) + 1)
