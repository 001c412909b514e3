"""A server whose model is a formula, for tests of everything around the model: real engine, real processes.

`python -m tests.e2e.toy OPTIONS_JSON` serves; the next token follows from the last one and its position alone.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from leftfold.engine import Engine
from leftfold.events import Control, EventLog, ExecutionPlan
from leftfold.executor.base import Result
from leftfold.fsm import Config
from leftfold.server.launch import serve
from leftfold.server.options import ServeOptions
from tests.tiny_folder import VOCAB_SIZE, byte_tokenizer

_LETTERS = [i for i in range(256) if byte_tokenizer().decode([i]).isalpha()]


class ToyExecutor:
    """Letters by formula; a row whose last token is "?" makes the process die."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._die = byte_tokenizer().encode("?").ids[0]

    def reset(self) -> None:
        pass

    def execute(self, plan: ExecutionPlan) -> Result:
        time.sleep(self._seconds)
        tokens = [_next(int(row.tokens[-1]), row.start + row.length) for row in plan.rows if row.samples]
        if any(row.samples and int(row.tokens[-1]) == self._die for row in plan.rows):
            os._exit(3)
        controls = [(op.op, {"verb": op.verb}, self._unknown(op)) for op in plan.ops if isinstance(op, Control)]
        return Result(plan.step, np.array(tokens, dtype=np.int32), None, None, controls)  # type: ignore[arg-type]

    def _unknown(self, op: Control) -> str | None:
        return None if op.verb in ("sleep", "wake", "update_weights") else f"no such verb: {op.verb}"


class FaultyEngine(Engine):
    """Comes up refusing all work, as an engine does whose log the reducer cannot fold."""

    def start(self) -> None:
        self.fault = "record 7 broke the reducer"


def _next(token: int, position: int) -> int:
    return _LETTERS[(token * 31 + position * position * 7 + 3) % len(_LETTERS)]


def build(options: ServeOptions, on_effects: Callable[[Any], None]) -> Engine:
    """What the engine process calls."""
    time.sleep(float(os.environ.get("TOY_START_SECONDS", "0")))
    config = Config(
        num_pages=(options.kv_tokens or 4096) // (options.page_size or 16),
        page_size=options.page_size or 16,
        max_running=options.max_num_seqs or 16,
        max_batch_tokens=options.max_num_batched_tokens or 256,
        max_model_len=options.max_model_len or 512,
        max_queued_requests=options.max_queued_requests,
        max_queued_tokens=options.max_queued_tokens,
        vocab_size=VOCAB_SIZE,
    )
    log = EventLog.memory() if options.log_dir is None else EventLog.open(options.log_dir)
    seconds = float(os.environ.get("TOY_STEP_SECONDS", "0.001"))
    kind = FaultyEngine if "TOY_FAULT" in os.environ else Engine
    return kind(log=log, executor=ToyExecutor(seconds), config=config, model="toy", on_effects=on_effects)


if __name__ == "__main__":
    sys.exit(serve(ServeOptions.from_dict(json.loads(sys.argv[1])), "tests.e2e.toy:build"))
