"""What the control plane costs per decode step: decide, apply, commit, plan digest and both checksummed records.

The records are encoded, checksummed and queued on the clock; handing the queue to the store is not timed.
Prefix cache on, page size 16, the pool full of cached pages, prompt lengths spread evenly over the page's phases.
No model runs: an executor that answers at once stands in. Peers that are installed are measured in the same run.
Where something takes the processor thousands of times a second, a line says so: figures are higher then, those of
interpreted code most.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np

from leftfold.bench import peers
from leftfold.bench.machine import interruptions
from leftfold.commands.common import OK, Parser, UsageError
from leftfold.compiled import in_use
from leftfold.events import Admit, EventLog, ExecutionPlan, ForwardDone, SamplingParams, Tick
from leftfold.fsm import Config, ConfigError, State, apply, decide, step

PAGE = 16
PROMPT = 64
WARM_UP = 20
QUIET = 5000
"""A clock tick and a few devices interrupt a machine less often than so many times a second."""
LEAST = {"num_pages": 1, "page_size": 1, "max_running": 1, "max_batch_tokens": 1, "max_model_len": 1}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `leftfold bench control`."""
    parser.add_argument("--rows", default="1,32,256,1024", help="batch sizes, with commas (default %(default)s)")
    parser.add_argument("--steps", type=int, default=400, help="steps measured for each (default %(default)s)")
    parser.add_argument("--churn", type=float, default=0.0, help="share of rows that end and join per step (0.005)")
    parser.add_argument("--depth", type=int, default=0, help="steps planned ahead of results (default %(default)s)")
    parser.add_argument("--policy", default="fcfs", help="who is admitted first (default %(default)s)")
    parser.add_argument(
        "--waiting",
        type=int,
        default=0,
        metavar="N",
        help="so many requests wait that cannot be admitted yet (default %(default)s)",
    )
    parser.add_argument("--no-peers", action="store_true", help="leave the installed peers out")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Measure and print; exit code 0."""
    try:
        sizes = [int(size) for size in args.rows.split(",")]
    except ValueError:
        raise UsageError(f"--rows {args.rows!r} is not a list of integers with commas") from None
    if not sizes or min(sizes) < 1 or args.steps < 1 or not 0 <= args.churn < 1:
        raise UsageError("--rows and --steps must be positive, --churn at least 0 and below 1")
    if args.waiting < 0 or (args.waiting and args.churn):
        raise UsageError("--waiting must be at least 0, and goes without --churn")
    try:
        Config(**LEAST, pipeline_depth=args.depth, policy=args.policy)
    except ConfigError as error:
        raise UsageError(str(error)) from None
    rows = []
    for size in sizes:
        interrupted = interruptions()
        row = measure(size, args.steps, args.churn, args.depth, args.policy, args.waiting)
        row["interruptions_per_s"] = round(interrupted)
        row["peers"] = {} if args.no_peers else {name: peer(size) for name, peer in peers.installed().items()}
        rows.append(row)
        if not args.json:
            _print_row(row, first=len(rows) == 1, churn=args.churn)
    if args.json:
        settings = {"churn": args.churn, "depth": args.depth, "policy": args.policy, "waiting": args.waiting}
        print(json.dumps({**settings, "steps": args.steps, "compiled": in_use(), "rows": rows}))
    elif (most := max(row["interruptions_per_s"] for row in rows)) > QUIET:
        print(f"something interrupts this machine up to {most:,} times a second: a quiet one has lower figures")
    return OK


def _print_row(row: dict[str, Any], first: bool, churn: float) -> None:
    peer_times: dict[str, float] = row["peers"]
    if first:
        names = "".join(f"{name:>14} {'ratio':>7}" for name in peer_times)
        code = "compiled" if in_use() else "interpreted"
        print(f"µs per decode step, churn {churn:g}, {code}\n{'rows':>6} {'median':>9} {'mean':>9}{names}")
    basis = row["us_per_step_mean"] if churn else row["us_per_step"]
    against = "".join(f"{time:>14.1f} {basis / time:>7.3f}" for time in peer_times.values())
    print(f"{row['rows']:>6} {row['us_per_step']:>9.1f} {row['us_per_step_mean']:>9.1f}{against}", flush=True)


def measure(
    rows: int, steps: int, churn: float = 0.0, depth: int = 0, policy: str = "fcfs", waiting: int = 0
) -> dict[str, Any]:
    """Median and mean µs of `steps` decode steps of `rows` rows, while `waiting` more requests wait."""
    engine = Bench(rows, steps, churn, depth, policy)
    admission = engine.crowd(waiting)
    times = []
    gc.collect()
    gc.freeze()
    try:
        for _ in range(WARM_UP):
            engine.step()
        for _ in range(steps):
            times.append(engine.step() * 1e6)
    finally:
        gc.unfreeze()
    return {
        "rows": rows,
        "us_per_step": round(statistics.median(times), 2),
        "us_per_step_mean": round(statistics.fmean(times), 2),
        **({"us_per_admission": round(admission * 1e6, 2)} if waiting else {}),
    }


class Bench:
    """A state with `rows` decoding rows over a pool full of cached pages, its log, and an instant executor."""

    def __init__(
        self, rows: int, steps: int, churn: float = 0.0, depth: int = 0, policy: str = "fcfs", log: Any = None
    ) -> None:
        self.rows = rows
        self.life = round(1 / churn) if churn else PROMPT + steps + WARM_UP  # steps a row lives
        self.steady = False
        self.rng = np.random.default_rng(0)
        length = PROMPT + 2 * PAGE + self.life
        pages = rows * (length // PAGE + 2) + 2048
        self.log = EventLog.memory() if log is None else log
        self.state = State(
            Config(
                num_pages=pages, page_size=PAGE, max_running=rows, max_batch_tokens=8192, max_model_len=8192,
                pipeline_depth=depth, policy=policy,
            )
        )  # fmt: skip
        self.flying: deque[tuple[ExecutionPlan, int]] = deque()  # plans, and the tokens that their results bring
        self.t = 0
        self.admitted = 0
        self._fill_cache()
        for index in range(rows):
            self._admit(self.life - index * self.life // rows if churn else self.life)
        while self.state.waiting or self.state.prefilling:
            self.step()
        self.steady = bool(churn)

    def _fill_cache(self) -> None:
        """Every page of the pool is cached when the rows join."""
        prompt = min(4096, self.state.config.num_pages * PAGE)
        for _ in range(self.state.config.num_pages * PAGE // prompt + 1):
            self._admit(1, prompt)
            while self.state.live:
                self.step()
        assert not self.state.pool.free, "the pool is not full of cached pages"

    def _admit(self, max_tokens: int, prompt_len: int | None = None) -> None:
        self._take(self._arrival(max_tokens, prompt_len))

    def _arrival(self, max_tokens: int, prompt_len: int | None = None) -> Admit:
        if prompt_len is None:
            prompt_len = PROMPT + self.admitted % PAGE
        prompt = self.rng.integers(0, 50_000, prompt_len, dtype=np.int32)
        params = SamplingParams(max_tokens=max_tokens, stop_token_ids=(50_001,))
        self.admitted += 1
        return Admit(t=self.t, rid=f"r{self.admitted}", prompt=prompt, params=params)

    def _take(self, event: Admit) -> None:
        self.log.append(event)
        step(self.state, event)

    def step(self) -> float:
        """One decode step; seconds it took."""
        state, log, flying, depth = self.state, self.log, self.flying, self.state.config.pipeline_depth
        tokens = self.rng.integers(0, 50_000, self.rows + 64, dtype=np.int32)
        self.t += 1000
        ended = self.rows - len(state.live) if self.steady else 0
        arrivals = [self._arrival(self.life) for _ in range(ended)]
        begun = perf_counter()
        for arrival in arrivals:
            self._take(arrival)
        while len(flying) <= depth and self._launch():
            pass
        execution, count = flying.popleft()
        done = ForwardDone(t=self.t, step=execution.step, tokens=tokens[:count], digest=execution.digest)
        log.append(done)
        step(state, done)
        took = perf_counter() - begun
        log.flush()  # a writer's work, not the control plane's
        return took

    def _launch(self) -> bool:
        """Plan a step ahead, if there is anything to plan."""
        state = self.state
        plan = decide(state, self.t)
        if plan is None:
            return False
        tick = Tick(t=self.t, plan=plan)
        self.log.append(tick)
        execution = apply(state, tick, plan).plan
        assert execution is not None
        self.flying.append((execution, state.in_flight[-1].expected))
        return True

    def crowd(self, count: int) -> float:
        """`count` requests that no slot is free for join the line, of mixed classes and deadlines; seconds for each."""
        events = [
            replace(self._arrival(16), priority=index % 7 - 6, deadline=3_600_000_000 + index % 997)
            for index in range(count)
        ]
        begun = perf_counter()
        for event in events:
            step(self.state, event)
        took = perf_counter() - begun
        for event in events:
            self.log.append(event)
        self.log.flush()
        return took / max(1, count)


def main(argv: Sequence[str] | None = None) -> int:
    """Run by itself: `python -m leftfold.bench.control`."""
    parser = Parser(prog="leftfold bench control", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    raise SystemExit(main())
