"""What an executor is: it applies a stream of execution plans and attests to each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from leftfold.events import Control, ExecutionPlan


class Result(NamedTuple):
    """What became of one plan: all of its `ForwardDone` but the time.

    `tokens`: int32, one per sampling row in plan order. `digest`: chained by the executor itself over the plans it
    received. `error`: None, or {"text": str, "retry": bool, "rows": indices of culprits among the plan's rows}.
    `controls`: (op, info, error) of each `control` operation, whose `ControlDone` comes before this `ForwardDone`.
    """

    step: int
    tokens: npt.NDArray[np.int32]
    digest: str
    error: Mapping[str, Any] | None = None
    controls: Sequence[tuple[int, Any, str | None]] = ()


NO_TOKENS: npt.NDArray[np.int32] = np.zeros(0, dtype=np.int32)
NO_TOKENS.setflags(write=False)


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
        """Apply the plan's deltas, run its operations and rows. Never raises: what went wrong is in `error`.

        A failed step leaves its deltas (ended, preempt, join, grow) applied and no row advanced, so the same rows
        may come again in a later plan. Plans with fewer `voids` than steps have failed here were made before the
        failure was known: their deltas are applied, nothing is computed, and the result is `void`.
        """
        ...
