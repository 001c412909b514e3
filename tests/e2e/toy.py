"""A server whose model is a formula, for tests of everything around the model: real engine, real processes.

`python -m tests.e2e.toy OPTIONS_JSON` serves; the next token follows from the last one and its position alone.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from leftfold.engine import Engine
from leftfold.events import Control, EventLog, ExecutionPlan, Row
from leftfold.events.stores import DirectoryStore
from leftfold.executor.base import Attachment, Result, Score, Wanted, wanted_of
from leftfold.fsm import Config
from leftfold.keeping import KeptLog
from leftfold.server.launch import serve
from leftfold.server.options import ServeOptions
from tests.tiny_folder import VOCAB_SIZE, byte_tokenizer

_LETTERS = [i for i in range(256) if byte_tokenizer().decode([i]).isalpha()]


class ToyExecutor:
    """Letters by formula; a row whose last token is "?" makes the process die. Weights are the name of a version."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._hold = Path(os.environ["TOY_HOLD"]) if "TOY_HOLD" in os.environ else None
        self._weights = 0
        self._drawn: dict[str, tuple[int, int]] = {}
        self._wanted: dict[str, tuple[Wanted, Any]] = {}
        self._die = byte_tokenizer().encode("?").ids[0]

    def reset(self) -> None:
        self._drawn.clear()

    def execute(self, plan: ExecutionPlan) -> Result:
        time.sleep(self._seconds)
        while self._held_back(plan):
            time.sleep(0.002)
        controls = [self._control(op) for op in plan.ops if isinstance(op, Control)]
        self._wanted |= {row.rid: (wanted, row.tokens) for row in plan.joined if (wanted := wanted_of(row))}
        tokens = [self._draw(row) for row in plan.rows if row.samples]
        scored = [self._attachment(row) for row in plan.rows if row.rid in self._wanted]
        result = Result(plan.step, np.array(tokens, dtype=np.int32), None, None, controls)  # type: ignore[arg-type]
        return result._replace(attachments=scored)

    def _attachment(self, row: Row) -> Attachment:
        """Scores by formula, of a row that was drawn."""
        wanted, prompt = self._wanted[row.rid]
        known = [(at, int(prompt[at])) for at in wanted.predicted(row.start, row.length)]
        if row.samples and wanted.drawn:
            known.append(self._drawn[row.rid])
        others = tuple((_LETTERS[i], -1.0 - i) for i in range(wanted.top))
        return Attachment(row.rid, 0, row.choice, [Score(at, token, -at / 8, others) for at, token in known])

    def _held_back(self, plan: ExecutionPlan) -> bool:
        """Whether the file says that no row goes beyond a position that one of these reaches."""
        try:
            limit = int(self._hold.read_text() or 0) if self._hold is not None else None
        except FileNotFoundError:
            return False
        return limit is not None and any(row.start + row.length > limit for row in plan.rows)

    def _draw(self, row: Row) -> int:
        """The next token; what a step in flight has drawn is known here before the plan can know it."""
        at = row.start + row.length
        position, drawn = self._drawn.get(row.rid, (-1, 0))
        last = drawn if position == at - 1 else int(row.tokens[-1])
        if last == self._die:
            os._exit(3)
        token = _LETTERS[(last * 31 + at * at * 7 + 3 + self._weights) % len(_LETTERS)]
        self._drawn[row.rid] = (at, token)
        return token

    def _control(self, op: Control) -> tuple[int, dict[str, str], str | None]:
        if op.verb == "update_weights":
            self._weights = crc32(op.args["version"].encode())
        known = op.verb in ("sleep", "wake", "update_weights")
        return op.op, {"verb": op.verb}, None if known else f"no such verb: {op.verb}"


class FaultyEngine(Engine):
    """Comes up refusing all work, as an engine does whose log the reducer cannot fold."""

    def start(self) -> None:
        self.fault = "record 7 broke the reducer"


class FailingStore(DirectoryStore):
    """A directory on a disk that is "full" or cannot "sync" while the file `how` says so."""

    def __init__(self, directory: str, how: Path) -> None:
        super().__init__(directory)
        self._how = how

    def write(self, data: memoryview) -> int:
        self._fail("full", errno.ENOSPC)
        return super().write(data)

    def sync(self) -> None:
        self._fail("sync", errno.EIO)
        super().sync()

    def _fail(self, what: str, code: int) -> None:
        if self._how.exists() and self._how.read_text() == what:
            raise OSError(code, os.strerror(code))


def _log(options: ServeOptions) -> EventLog | KeptLog:
    if options.log_dir is None:
        return EventLog.memory()
    if "TOY_DISK" not in os.environ:
        return EventLog.open(options.log_dir)
    log = EventLog(store=FailingStore(options.log_dir, Path(os.environ["TOY_DISK"])))
    return KeptLog(log, Path(options.log_dir), strict=options.durability == "strict")


def build(options: ServeOptions, on_effects: Callable[[Any], None]) -> Engine:
    """What the engine process calls."""
    time.sleep(float(os.environ.get("TOY_START_SECONDS", "0")))
    config = Config(
        num_pages=(options.kv_tokens or 4096) // (options.page_size or 16),
        page_size=options.page_size or 16,
        max_running=options.max_num_seqs or 16,
        max_batch_tokens=options.max_num_batched_tokens or 256,
        max_model_len=options.max_model_len or 512,
        pipeline_depth=options.pipeline_depth or 0,
        max_queued_requests=options.max_queued_requests,
        max_queued_tokens=options.max_queued_tokens,
        growth_horizon=options.growth_horizon,
        vocab_size=VOCAB_SIZE,
    )
    seconds = float(os.environ.get("TOY_STEP_SECONDS", "0.001"))
    kind = FaultyEngine if "TOY_FAULT" in os.environ else Engine
    return kind(
        log=_log(options), executor=ToyExecutor(seconds), config=config, model="toy", on_effects=on_effects,
        on_log_failure=options.on_log_failure,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(serve(ServeOptions.from_dict(json.loads(sys.argv[1])), "tests.e2e.toy:build"))
