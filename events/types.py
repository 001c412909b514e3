"""Events: the closed union of facts the engine took from its inbox, in log order.

Records are frozen and keyword-only. The order of fields and their defaults are part of the log format. Text
fields say what they hold (`CONTENT`, `NAME`, `PLAIN`), so that a log can be made shareable without reading code.
`t` is integer microseconds since the first `Started`, never decreasing. Compare records with `same`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from leftfold.events.plan import Plan
from leftfold.events.quick import quick

Tokens = Sequence[int] | npt.NDArray[np.int32]

CONTENT: Mapping[str, str] = {"text": "content"}
NAME: Mapping[str, str] = {"text": "name"}
PLAIN: Mapping[str, str] = {"text": "plain"}


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are drawn and when it ends.

    `max_tokens`: generated tokens at most (the model's length may end it earlier). `min_tokens`: stop ids do not
    count before so many. `stop_token_ids`: ids that end the request, included in its output. `temperature` 0 is
    greedy. `top_p`, `min_p` in [0, 1]; `top_k` 0 is off. `seed`: 64 bits; a draw depends on (seed, position) alone.
    The reducer reads `max_tokens`, `min_tokens`, `stop_token_ids`, `n` and `grammar`; the rest passes through.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    n: int = 1
    grammar: Mapping[str, Any] | None = field(default=None, metadata=CONTENT)
    processors: Sequence[Any] = field(default=(), metadata=PLAIN)
    _json: bytes | None = field(default=None, init=False, repr=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Started:
    """An executor is ready (at every process start and after every loss): voids everything in flight."""

    t: int
    incarnation: int = 0
    wall_ns: int = 0
    config: Mapping[str, Any] | None = field(default=None, metadata=PLAIN)
    model: str = field(default="", metadata=NAME)
    code: str = field(default="", metadata=PLAIN)
    laws: int = 1
    kept: Sequence[str] = field(default=(), metadata=PLAIN)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExecutorLost:
    """The executor crashed or hangs: voids everything in flight; no rows until the next `Started`."""

    t: int
    error: str = field(default="", metadata=CONTENT)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shutdown:
    """Refuse admissions, finish what lives until `deadline` (µs from `t`, 0: none), then stop."""

    t: int
    call: str = field(default="", metadata=NAME)
    deadline: int = 0


@quick
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Admit:
    """A request enters. `prompt`: token ids; deadlines in µs from `t` (0: none). See vocabulary §1 for the rest."""

    t: int
    rid: str = field(metadata=NAME)
    epoch: int = 0
    prompt: Tokens = ()
    params: SamplingParams = SamplingParams()
    priority: int = 0
    tenant: str = field(default="", metadata=NAME)
    deadline: int = 0
    queue_deadline: int = 0
    adapter: str = field(default="", metadata=NAME)
    cache_salt: str = field(default="", metadata=NAME)
    cache: str = field(default="use", metadata=PLAIN)
    media: Sequence[Any] = field(default=(), metadata=CONTENT)
    session: str | None = field(default=None, metadata=NAME)
    peer: str | None = field(default=None, metadata=NAME)
    shard: int | None = None
    task: str = field(default="generate", metadata=PLAIN)
    want: Mapping[str, Any] | None = field(default=None, metadata=PLAIN)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Abort:
    """End a request (`rid` None: all; `epoch` None: the latest). `keep`: output tokens that count (stop strings)."""

    t: int
    rid: str | None = field(default=None, metadata=NAME)
    epoch: int | None = None
    choice: int | None = None
    reason: str = field(default="", metadata=CONTENT)
    keep: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Session:
    """Open or close a session of requests that share KV. `capacity` in tokens, `ttl` in µs."""

    t: int
    call: str = field(default="", metadata=NAME)
    session: str = field(metadata=NAME)
    open: bool
    capacity: int = 0
    ttl: int = 0


@quick
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tick:
    """A decision. `plan` None: `step` decides, then applies; given: `step` only applies it."""

    t: int
    plan: Plan | None = None


@quick
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForwardDone:
    """A step's result. `tokens`: int32, flat, one per sampling row in plan order (`counts` if not one each).

    `ended`: rows whose grammar ended. `error`: {"text": str, "retry": bool, "rows": (…)}; `rows` and `ended` hold
    indices into the plan's rows. With "apart": True in it, those that are to run again do so one by one until they are
    past this step. `digest`: of the plan that was executed (32 hex digits; None is not compared).
    `scores`: what clients were told beside the tokens, kept where asked for; decides nothing: [rid, epoch, choice,
    [[position, token, logprob, [[token, logprob], …]], …]] for each that wanted it.
    """

    t: int
    step: int
    tokens: Tokens = ()
    digest: str | None = field(default=None, metadata=PLAIN)
    counts: Sequence[int] | None = None
    ended: Sequence[int] = ()
    error: Mapping[str, Any] | None = field(default=None, metadata=CONTENT)
    scores: Sequence[Any] = field(default=(), metadata=CONTENT)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """A `prepare` operation ended; `found`: pages a storage look-up promises."""

    t: int
    op: int
    found: int = 0
    error: str | None = field(default=None, metadata=CONTENT)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CacheOpDone:
    """A `move` operation ended; `moved`: pages really there, a prefix of the operation's."""

    t: int
    op: int
    moved: int
    error: str | None = field(default=None, metadata=CONTENT)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TransferDone:
    """A `send` or `receive` operation ended; `tokens`: first tokens from the peer."""

    t: int
    op: int
    tokens: Tokens = ()
    error: str | None = field(default=None, metadata=CONTENT)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ControlDone:
    """A `control` operation ended."""

    t: int
    op: int
    info: Any = field(default=None, metadata=CONTENT)
    error: str | None = field(default=None, metadata=CONTENT)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pause:
    """Stop planning rows. `mode`: "keep", "wait" or "abort"."""

    t: int
    call: str = field(default="", metadata=NAME)
    mode: str = field(metadata=PLAIN)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Resume:
    """Plan rows again."""

    t: int
    call: str = field(default="", metadata=NAME)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlushCache:
    """Nothing cached so far is found any more."""

    t: int
    call: str = field(default="", metadata=NAME)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sleep:
    """Give back memory: `tags` of "weights" and "kv"."""

    t: int
    call: str = field(default="", metadata=NAME)
    tags: Sequence[str] = field(default=("weights", "kv"), metadata=PLAIN)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wake:
    """Take memory again: `tags` of "weights" and "kv"."""

    t: int
    call: str = field(default="", metadata=NAME)
    tags: Sequence[str] = field(default=("weights", "kv"), metadata=PLAIN)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UpdateWeights:
    """Load other weights from `source`; live requests are recomputed or keep their KV (`live`)."""

    t: int
    call: str = field(default="", metadata=NAME)
    source: str = field(metadata=NAME)
    version: str = field(metadata=NAME)
    live: str = field(default="recompute", metadata=PLAIN)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reconfigure:
    """Change limits at run time; `set` is validated whole, or refused unchanged."""

    t: int
    call: str = field(default="", metadata=NAME)
    set: Mapping[str, Any] = field(metadata=PLAIN)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Adapter:
    """Load (`source`) or unload (`source` None) an adapter."""

    t: int
    call: str = field(default="", metadata=NAME)
    name: str = field(metadata=NAME)
    source: str | None = field(default=None, metadata=NAME)
    version: str = field(metadata=NAME)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """A verb for the executor that keeps its place in the plan stream."""

    t: int
    call: str = field(default="", metadata=NAME)
    verb: str = field(metadata=PLAIN)
    args: Mapping[str, Any] = field(metadata=CONTENT)


Event = (
    Started | ExecutorLost | Shutdown | Admit | Abort | Session | Tick | ForwardDone | Prepared | CacheOpDone
    | TransferDone | ControlDone | Pause | Resume | FlushCache | Sleep | Wake | UpdateWeights | Reconfigure
    | Adapter | Call
)  # fmt: skip

EVENTS: tuple[type[Event], ...] = Event.__args__
