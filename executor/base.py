"""What an executor is: it applies a stream of execution plans and attests to each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from leftfold.events import Control, ExecutionPlan, Joined


class Score(NamedTuple):
    """What the model thought of the token at `position`, before temperature, penalties, biases and filters.

    `logprob`: natural logarithm of the token's probability; `top`: (token, logprob) of the likeliest tokens at this
    position, likeliest first, the lower id first among equals.
    """

    position: int
    token: int
    logprob: float
    top: Sequence[tuple[int, float]] = ()


class Attachment(NamedTuple):
    """Values beside the tokens of one choice, which decide nothing and so are in no log. Positions ascend."""

    rid: str
    epoch: int
    choice: int
    scores: Sequence[Score]


class Result(NamedTuple):
    """What became of one plan: all of its `ForwardDone` but the time.

    `tokens`: int32, one per sampling row in plan order. `digest`: chained by the executor itself over the plans it
    received. `error`: None, or {"text": str, "retry": bool, "rows": indices of culprits among the plan's rows}.
    `controls`: (op, info, error) of each `control` operation, whose `ControlDone` comes before this `ForwardDone`.
    `attachments`: of rows that want them (`Joined.want`): scores of drawn tokens and, for each chunk, of the prompt's
    tokens that its positions predict. A row that computes its prompt again gives the prompt's scores again.
    """

    step: int
    tokens: npt.NDArray[np.int32]
    digest: str
    error: Mapping[str, Any] | None = None
    controls: Sequence[tuple[int, Any, str | None]] = ()
    attachments: Sequence[Attachment] = ()


NO_TOKENS: npt.NDArray[np.int32] = np.zeros(0, dtype=np.int32)
NO_TOKENS.setflags(write=False)


class Wanted(NamedTuple):
    """The scores that a row wants, with `top` alternatives: of drawn tokens (`drawn`), of [first, end) of its prompt.

    `first` is at least 1: nothing predicts a prompt's first token.
    """

    rid: str
    epoch: int
    choice: int
    top: int
    drawn: bool
    first: int
    end: int

    def predicted(self, start: int, length: int) -> range:
        """The wanted positions of the prompt that computing `length` positions from `start` predicts."""
        return range(max(self.first, start + 1), min(self.end, start + length + 1))


def wanted_of(row: Joined) -> Wanted | None:
    """What `Joined.want` asks for; None if nothing."""
    want = row.want or {}
    top, first = want.get("logprobs"), want.get("logprobs_from")
    if top is None and first is None:
        return None
    first = row.prompt_len if first is None else max(1, first)
    return Wanted(row.rid, row.epoch, row.choice, top or 0, top is not None, first, row.prompt_len)


def void(plan: ExecutionPlan, digest: str) -> Result:
    """What a step gets that was planned before an earlier one was known to have failed."""
    failed = {"text": "an earlier step failed", "retry": True, "rows": ()}
    lost = [(op.op, None, "an earlier step failed") for op in plan.ops if isinstance(op, Control)]
    return Result(plan.step, NO_TOKENS, digest, failed, lost)


class Executor(Protocol):
    """One executor of an engine. Calls come from one thread, plans in order of their steps."""

    def reset(self) -> None:
        """A `Started` was logged: forget all rows and KV content, restart the digest chain."""
        ...

    def execute(self, plan: ExecutionPlan) -> Result:
        """Apply the plan's deltas, run its operations and rows; what went wrong is in `error`.

        Raises only when the executor itself is beyond use: it is then reset, and given up if that raises as well.

        A failed step leaves its deltas (ended, preempt, join, grow) applied and no row advanced, so the same rows
        may come again in a later plan. Plans with fewer `voids` than steps have failed here were made before the
        failure was known: their deltas are applied, nothing is computed, and the result is `void`.
        """
        ...
