"""Results of steps, in each form that an executor may give them, and with one thing wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from leftfold.events import ExecutionPlan, ForwardDone
from leftfold.fsm import State
from leftfold.replay.fuzzing.clients import Client, Key
from leftfold.replay.fuzzing.looks import client_in

FORMS: Sequence[str] = ("list", "bare", "counts", "more")
"""Tokens as a list; no digest; how many tokens each row has, which is one; more of them behind a row's last one."""

SPOILS: Sequence[str] = ("digest", "count", "counts", "none", "range", "text", "ended", "more", "order")
"""What may be wrong with a result."""


def overs(state: State, clients: Mapping[Key, Client], plan: ExecutionPlan) -> list[bool]:
    """Whether each row that samples is over, or will be with the token that the oldest step in flight brings it."""
    found = [client_in(state, clients, row.slot) for row in plan.rows if row.samples]
    return [client is None or client.ends_next for client in found]


def formed(form: str, t: int, plan: ExecutionPlan, tokens: Sequence[int], over: Sequence[bool]) -> ForwardDone:
    """The result of `plan` in one of `FORMS`; they all say the same."""
    digest = None if form == "bare" else plan.digest
    if form == "counts" or form == "more":
        counts = [1 + (form == "more" and last) for last in over]
        return ForwardDone(t=t, step=plan.step, tokens=_with_more(tokens, counts), digest=digest, counts=counts)
    return ForwardDone(t=t, step=plan.step, tokens=[*tokens], digest=digest)


def spoil(kind: str, t: int, plan: ExecutionPlan, tokens: Sequence[int], over: Sequence[bool]) -> ForwardDone:
    """The result of `plan`, with one thing wrong; `order`: it is not the oldest one's (or, where it is, miscounted)."""
    fields: dict[str, Any] = {"step": plan.step, "tokens": tokens, "digest": plan.digest}
    if kind == "digest":
        fields["digest"] = "f" * 32
    elif kind == "count":
        fields["tokens"] = [*tokens, 1]
    elif kind in ("range", "text"):
        fields["tokens"] = [*tokens[:-1], 1 << 31 if kind == "range" else "a token"]
    elif kind == "ended":
        fields["ended"] = [0]
    elif kind == "none" and tokens:
        fields |= {"tokens": tokens[1:], "counts": [0, *[1] * (len(tokens) - 1)]}
    elif kind == "more" and not all(over):  # a row that goes on has no K/V of what its second token would stand behind
        counts = [2 - last for last in over]
        fields |= {"tokens": _with_more(tokens, counts), "counts": counts}
    elif kind == "right":
        fields["digest"] = None  # so that nothing but its number tells whose it is
    else:
        fields["counts"] = [2, *[1] * len(tokens)]
    return ForwardDone(t=t, **fields)


def _with_more(tokens: Sequence[int], counts: Sequence[int]) -> list[int]:
    return [token for token, count in zip(tokens, counts, strict=True) for _ in range(count)]
