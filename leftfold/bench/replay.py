"""How fast a log becomes a state again: from its newest snapshot, folded whole, and decided anew.

The log is made first, by the real planner with made-up tokens: requests of 10 to 200 tokens that get 50 to 300 more,
and a snapshot every so many events, the last one `--tail` events before the end.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from leftfold.commands.common import OK, natural, positive, print_json
from leftfold.events import Admit, Event, EventLog, ForwardDone, SamplingParams, Started, Tick
from leftfold.fsm import Config, Effects, decide
from leftfold.replay.fold import Fold
from leftfold.replay.snapshots import begin, capture
from leftfold.replay.verify import verify

STEP_US = 10_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `leftfold bench replay`."""
    parser.add_argument("--events", type=positive, default=100_000, help="of the log (%(default)s)")
    parser.add_argument("--rows", type=positive, default=16, help="requests that run at a time (%(default)s)")
    parser.add_argument("--tail", type=natural, default=10_000, help="events after the snapshot (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Make the log, measure, print; exit code 0."""
    with tempfile.TemporaryDirectory(prefix="leftfold-bench-") as folder:
        found = measure(Path(folder) / "log", args.events, args.rows, min(args.tail, args.events - 1))
    if args.json:
        print_json(found)
    else:
        print("\n".join(f"{name:<28} {value}" for name, value in found.items()))
    return OK


def measure(folder: Path, events: int, rows: int, tail: int) -> dict[str, Any]:
    """Seconds of a recovery with the snapshot, events per second without, folded and verified."""
    digest = make(folder, events, rows, events - tail)
    recovered, seconds = _timed(lambda: _recover(folder))
    whole, fold_seconds = _timed(lambda: _fold(folder))
    verdict, verify_seconds = _timed(lambda: verify(EventLog.read(folder)))
    if not (digest == recovered == whole and verdict.clean):
        raise AssertionError(f"digests {digest}, {recovered}, {whole}: {verdict.describe()}")
    return {
        "events": events, "rows": rows, "tail": tail,
        "bytes": sum(path.stat().st_size for path in folder.glob("*.jsonl*")),
        "recovery_seconds": round(seconds, 3), "fold_events_per_second": round(events / fold_seconds),
        "verify_events_per_second": round(events / verify_seconds),
    }  # fmt: skip


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    started = perf_counter()
    return call(), perf_counter() - started


def _recover(folder: Path) -> str:
    """What a server does before it takes up work: open for appending, restore, fold the rest."""
    with EventLog.open(folder) as log:
        fold, records = begin(log)
        for record in records:
            fold.take(record.seq, record.event)
    assert fold.state is not None
    return fold.state.digest()


def _fold(folder: Path) -> str:
    fold = Fold()
    for record in EventLog.read(folder):
        fold.take(record.seq, record.event)
    assert fold.state is not None
    return fold.state.digest()


def make(folder: Path, events: int, rows: int, snapshot_at: int) -> str:
    """A log of so many events with a snapshot after one of them (0: none); the digest at its end."""
    config = Config(num_pages=40 * rows, page_size=16, max_running=rows, max_batch_tokens=512, max_model_len=2048)
    with EventLog.open(folder) as log:
        made = _Maker(log, folder, config, snapshot_at)
        made.take(Started(t=0, incarnation=1, config=config.as_dict(), model="made-up"))
        while log.next_seq <= events:
            made.turn(events)
        assert made.fold.state is not None
        return made.fold.state.digest()


class _Maker:
    """An engine in miniature that never waits."""

    def __init__(self, log: EventLog, folder: Path, config: Config, snapshot_at: int) -> None:
        self.fold = Fold()
        self._log = log
        self._folder = folder
        self._config = config
        self._snapshot_at = snapshot_at
        self._draw = np.random.default_rng(1)
        self._t = self._admitted = 0

    def take(self, event: Event) -> Effects:
        effects = self.fold.take(self._log.append(event), event)
        if self.fold.seq == self._snapshot_at:
            self._log.sync()
            capture(self.fold).save(self._folder, self._log.mark[1])
        return effects

    def turn(self, events: int) -> None:
        """Admit what there is room for, then one step; stops at `events`, wherever that is."""
        state = self.fold.state
        assert state is not None
        while len(state.live) < self._config.max_running + 4 and self._log.next_seq <= events:
            self._admit()
        if self._log.next_seq > events:
            return
        self._t += STEP_US
        plan = self.take(Tick(t=self._t, plan=decide(state, self._t))).plan
        assert plan is not None
        if self._log.next_seq > events:
            return
        tokens = self._draw.integers(0, 49_000, state.in_flight[0].expected).astype(np.int32)
        self.take(ForwardDone(t=self._t, step=plan.step, tokens=tokens, digest=plan.digest))

    def _admit(self) -> None:
        self._admitted += 1
        prompt = self._draw.integers(0, 49_000, int(self._draw.integers(10, 200))).astype(np.int32)
        params = SamplingParams(max_tokens=int(self._draw.integers(50, 300)))
        self.take(Admit(t=self._t, rid=f"r{self._admitted}", prompt=prompt, params=params))


__all__ = ["add_arguments", "make", "measure", "run"]
