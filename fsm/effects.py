"""What a step derives: work for the executor, what clients and routers hear, answers, the next deadline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from leftfold.events.plan import Column, ExecutionPlan, as_list
from leftfold.fsm.pages import PagePool
from leftfold.fsm.request import Request, Seat


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    DEADLINE = "deadline"

    __hash__ = str.__hash__  # that of its value: an enumeration's own hashes the name anew at every look-up


STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
"""Why most requests end."""


class Usage(NamedTuple):
    """Tokens of a finished request; `cached`: prompt tokens that the prefix cache held at its first join."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Output(NamedTuple):
    """What a client hears. `position`: absolute index of the first of `tokens` (or of the token that never came).

    `finish_reason` is None but in the terminal output; `error` is None or {"code", "text"}, code one of `invalid`,
    `queue_full`, `closing`, `failed`; `usage` is given with the terminal output; `version` names the weights.
    """

    rid: str
    epoch: int
    choice: int
    position: int
    tokens: Sequence[int]
    finish_reason: FinishReason | None
    error: Mapping[str, str] | None
    usage: Usage | None
    version: str


class TokenBatch:
    """One token for each of several rows, as columns (lists where they are few); rows are made when iterated.

    `ended`: reason and usage of the rows that this token ends, by index.
    """

    __slots__ = ("ended", "positions", "seats", "tokens", "version")

    def __init__(
        self,
        seats: Sequence[Seat],
        positions: Column,
        tokens: Column,
        version: str,
    ) -> None:
        self.seats = seats
        self.positions = positions
        self.tokens = tokens
        self.ended: dict[int, tuple[FinishReason, Usage]] = {}
        self.version = version

    def __len__(self) -> int:
        return len(self.seats)

    def __iter__(self) -> Iterator[Output]:
        positions, tokens = as_list(self.positions), as_list(self.tokens)
        for index, seat in enumerate(self.seats):
            request = seat.request
            reason, usage = self.ended.get(index, (None, None))
            yield Output(
                request.rid, request.epoch, request.choice, positions[index], (tokens[index],), reason, None, usage,
                self.version,
            )  # fmt: skip


class Outputs:
    """Outputs in the order they happened: single ones and columnar batches, iterated as rows."""

    __slots__ = ("parts",)

    def __init__(self) -> None:
        self.parts: list[Output | TokenBatch] = []

    def __iter__(self) -> Iterator[Output]:
        for part in self.parts:
            if isinstance(part, TokenBatch):
                yield from part
            else:
                yield part

    def __len__(self) -> int:
        return sum(len(part) if isinstance(part, TokenBatch) else 1 for part in self.parts)

    @property
    def count(self) -> int:
        """Tokens of all of them, counted without making rows."""
        return sum([len(part) if isinstance(part, TokenBatch) else len(part.tokens) for part in self.parts])


class KvStored(NamedTuple):
    """A full page became findable. `key`, `parent` (None for a first page): 16-byte prefix keys; `tokens`: its ids."""

    tier: str
    group: int
    key: bytes
    parent: bytes | None
    tokens: Sequence[int]


class KvRemoved(NamedTuple):
    """A page ceased to be findable."""

    tier: str
    group: int
    key: bytes


class KvCleared(NamedTuple):
    """Nothing of this tier is findable any more."""

    tier: str


KvEvent = KvStored | KvRemoved | KvCleared


def kv_events(pool: PagePool) -> Sequence[KvEvent]:
    """What the pool's journal holds, as routers hear it; the journal is taken."""
    journal, pool.journal = pool.journal or [], []
    events: list[KvEvent] = []
    for entry in journal:
        if entry is None:
            events.append(KvCleared("device"))
        elif entry[0] < 0:
            events.append(KvRemoved("device", 0, entry[1]))
        else:
            events.append(KvStored("device", 0, entry[1], entry[2], tuple(pool.tokens[entry[0]].tolist())))
    return events


class Ack(NamedTuple):
    """The one answer to a control call, given when its effect has happened."""

    call: str
    ok: bool
    info: Any


@dataclass(slots=True)
class Effects:
    """Everything a step derives.

    `kv_events`: only where somebody listens (`State.listen`). `wake_at`: absolute µs at which a `Tick` is due although
    nothing happens, or None.
    """

    plan: ExecutionPlan | None
    outputs: Sequence[Output] | Outputs
    acks: Sequence[Ack]
    kv_events: Sequence[KvEvent]
    wake_at: int | None


def usage_of(request: Request, completion: int) -> Usage:
    """What `request` has used, with `completion` generated tokens that count."""
    return Usage(request.prompt_len, completion, max(request.cached, 0))


def closing_output(
    request: Request,
    known: int,
    reason: FinishReason,
    error: Mapping[str, str] | None = None,
    keep: int | None = None,
    version: str = "",
) -> Output:
    """A terminal output without tokens. `known`: tokens the request has; `keep`: generated ones that count."""
    generated = known - request.prompt_len
    counted = generated if keep is None else max(0, min(keep, generated))
    usage = usage_of(request, counted)
    return Output(request.rid, request.epoch, request.choice, known, (), reason, error, usage, version)
