"""Plans are data: the delta that the log keeps, and the hydrated form that executors apply.

`Plan` is what `decide` chose and what its `Tick` records. `ExecutionPlan` is the same record hydrated with what
the log holds elsewhere (token ids of chunks, parameters of joins, slots of rows that ended), so that an executor
needs nothing but the stream of execution plans to keep its mirrors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from leftfold.events.quick import quick

if TYPE_CHECKING:
    from leftfold.events.types import SamplingParams

IntArray = npt.NDArray[np.int64]
TokenArray = npt.NDArray[np.int32]
Column = IntArray | list[int]
PageLists = Sequence[Sequence[int]]


def as_list(values: Sequence[int] | IntArray) -> list[int]:
    """Integers of a plan's column as Python integers."""
    if type(values) is list:
        return values
    listed: list[int] = values.tolist() if isinstance(values, np.ndarray) else list(values)
    return listed


class Join(NamedTuple):
    """A request takes `slot`. `start`: tokens found in the prefix cache; `pages`: one list of page ids per group."""

    slot: int
    rid: str
    choice: int
    start: int
    pages: PageLists
    epoch: int = 0


class Chunk(NamedTuple):
    """A row that computes other than `width` tokens in this step; `length` 0 leaves the row out."""

    slot: int
    length: int
    samples: bool


class Grow(NamedTuple):
    """New last pages: `pages[i]` is appended to the page list of `slots[i]`."""

    slots: Sequence[int] | IntArray
    pages: Sequence[int] | IntArray


class Evict(NamedTuple):
    """Cached pages whose content is dropped, so that they may be granted."""

    tier: str
    group: int
    pages: Sequence[int] | IntArray


class End(NamedTuple):
    """A request ends although no result forces it (a deadline)."""

    rid: str
    choice: int
    reason: str
    epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Copy:
    """Copy pages inside a group; ends with its plan's step."""

    group: int = 0
    src: Sequence[int] = ()
    dst: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Move:
    """Move pages between tiers (device, host, disk); ends with `CacheOpDone`."""

    op: int
    group: int = 0
    from_tier: str
    src: Sequence[int] = ()
    to_tier: str
    dst: Sequence[int] = ()
    rid: str | None = None
    hold: bool = True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepare:
    """Prepare what a HELD request needs, shared by `key`; ends with `Prepared`."""

    op: int
    kind: str
    key: str
    rid: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Send:
    """Send a request's KV up to position `upto` to `peer`; ends with `TransferDone`."""

    op: int
    rid: str
    upto: int
    last: bool
    peer: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Receive:
    """Receive remote KV into granted pages; ends with `TransferDone`."""

    op: int
    rid: str
    pages: PageLists
    peer: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cancel:
    """Fence an operation: it ends with its own event, after which nothing is written any more."""

    op: int | None = None
    peer: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Control:
    """A control verb (weights, sleep, wake, adapters, calls); ends with `ControlDone`."""

    op: int
    verb: str
    args: Mapping[str, Any]


Operation = Copy | Move | Prepare | Send | Receive | Cancel | Control


@quick
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """The delta of one step, as its `Tick` logs it; a field at its default is absent from the log.

    Row order, and so the order of sampled tokens in `ForwardDone`: rows of the row set that `chunks` does not
    name, in the order they joined, then the rows of `chunks` with a length, in the order listed. The row set is
    that of `base` (default: the previous plan) less ended and preempted rows, plus `join`.
    """

    step: int | None = None
    base: int | None = None
    join: Sequence[Join] = ()
    preempt: Sequence[int] = ()
    chunks: Sequence[Chunk] = ()
    width: int = 1
    grow: Sequence[Grow] = ()
    evict: Sequence[Evict] = ()
    ops: Sequence[Operation] = ()
    ends: Sequence[End] = ()
    memo: Mapping[str, int] | None = None
    _json: bytes | None = field(default=None, init=False, repr=False)

    @property
    def empty(self) -> bool:
        """Whether a `Tick` with this plan changes nothing (and so is not logged)."""
        return self.step is None and not self.ends and self.memo is None


class Row(NamedTuple):
    """One row of a step. `tokens`: the input token ids; `pages`: page ids that hold positions < start + length."""

    rid: str
    choice: int
    slot: int
    start: int
    length: int
    samples: bool
    tokens: Sequence[int]
    pages: Sequence[int]


class Joined(NamedTuple):
    """Hydration of a `Join`: everything an executor must know of a request that enters `slot`.

    `tokens`: every token id known at the join (int32, prompt and what was generated before a preemption);
    `prompt_len`: how many of them are the prompt; `pages`: page ids granted so far (group 0); `want`: values beside
    the tokens that the client asked for (`Admit.want`).
    """

    slot: int
    rid: str
    choice: int
    start: int
    prompt_len: int
    tokens: TokenArray
    pages: Sequence[int]
    params: SamplingParams
    epoch: int = 0
    want: Mapping[str, Any] | None = None


class RowSource(ABC):
    """Where an `ExecutionPlan` finds its rows when somebody asks; reducers subclass it."""

    __slots__ = ()

    @abstractmethod
    def rows(self) -> Sequence[Row]:
        """The rows in plan order, immutable afterwards."""


class ExecutionPlan(NamedTuple):
    """A plan as executors get it.

    `plan`: the logged delta. `ended`: slots that left the row set since the previous plan without being named in
    `plan.preempt`, in ascending order. `joined`: one per `plan.join`, same order. `chunk_tokens`: the input token
    ids of each of `plan.chunks` (int32; empty for length 0). `digest`: chained over the hydrated plans, as 32 hex
    digits; a `ForwardDone` attests to it. `voids`: failed steps, since the executor's start, that were known when this
    was planned; an executor that knows of more applies the deltas alone, since rows of a plan after a failed step start
    from what was never computed. An executor applies in this order: ended, preempt, join, grow, ops, rows.
    """

    plan: Plan
    ended: Sequence[int]
    joined: Sequence[Joined]
    chunk_tokens: Sequence[TokenArray]
    digest: str
    source: RowSource
    voids: int = 0

    @property
    def step(self) -> int:
        assert self.plan.step is not None
        return self.plan.step

    @property
    def join(self) -> Sequence[Join]:
        return self.plan.join

    @property
    def preempt(self) -> Sequence[int]:
        return self.plan.preempt

    @property
    def chunks(self) -> Sequence[Chunk]:
        return self.plan.chunks

    @property
    def grow(self) -> Sequence[Grow]:
        return self.plan.grow

    @property
    def evict(self) -> Sequence[Evict]:
        return self.plan.evict

    @property
    def ops(self) -> Sequence[Operation]:
        return self.plan.ops

    @property
    def rows(self) -> Sequence[Row]:
        """The rows of this step in plan order; self-contained, immutable afterwards."""
        return self.source.rows()
