"""The toy server with an executor that a "^" loses for good: it cannot be reset then.

`python -m tests.e2e.giving_up OPTIONS_JSON` serves.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from leftfold.engine import Engine
from leftfold.events import ExecutionPlan
from leftfold.executor.base import Result
from leftfold.server.launch import serve
from leftfold.server.options import ServeOptions
from tests.e2e import toy
from tests.tiny_folder import byte_tokenizer


class LosingExecutor(toy.ToyExecutor):
    """Raises in a step that computes a "^", and in every reset after it."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self._poison = byte_tokenizer().encode("^").ids[0]
        self._gone = False

    def execute(self, plan: ExecutionPlan) -> Result:
        if any(self._poison in row.tokens for row in plan.rows):
            self._gone = True
            raise RuntimeError("the device fell off")
        return super().execute(plan)

    def reset(self) -> None:
        if self._gone:
            raise OSError("no such\ndevice")
        super().reset()


def build(options: ServeOptions, on_effects: Callable[[Any], None]) -> Engine:
    """What the engine process calls."""
    toy.ToyExecutor = LosingExecutor  # type: ignore[misc]
    return toy.build(options, on_effects)


if __name__ == "__main__":
    sys.exit(serve(ServeOptions.from_dict(json.loads(sys.argv[1])), "tests.e2e.giving_up:build"))
