"""What the log costs: µs per step in the engine's thread, and tokens per second of a model, by durability.

Two parts. First a control plane whose log is a real one on disk with its own thread, and whose executor does nothing
for a millisecond a step (one that steps 1,024 rows takes longer): how long the engine's thread is busy with the log per
step, and how long its part of a step takes in all, so that what the log's thread takes away from it is seen as well.
Then the model: the same streams again and again with no log, an asynchronous and a strict one, in turns, so that what
else the machine does falls on all of them alike.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from leftfold.bench import control
from leftfold.commands.common import OK, Parser, UsageError, positive, print_json, threads
from leftfold.events import Event, EventLog
from leftfold.keeping import Keeper, KeptLog, NoLog

MODES = ("off", "async", "strict")
EXECUTOR_SECONDS = 0.001


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `leftfold bench log`."""
    parser.add_argument("--rows", type=positive, default=1024, help="rows of a step of the first part (%(default)s)")
    parser.add_argument("--steps", type=positive, default=400, help="steps measured there (%(default)s)")
    parser.add_argument("--model", default="smollm2", help="what the second part runs (%(default)s)")
    parser.add_argument("--no-model", action="store_true", help="leave the second part out")
    parser.add_argument("--streams", type=positive, default=32, help="requests at a time (%(default)s)")
    parser.add_argument("--tokens", type=positive, default=24, help="tokens of each answer (%(default)s)")
    parser.add_argument(
        "--rounds", type=positive, default=3, help="how often each durability has its turn (%(default)s)"
    )
    parser.add_argument("--threads", type=threads, help="threads of the executor")
    parser.add_argument("--dir", help="where logs are written, on the disk to be measured (a temporary folder)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Measure and print; exit code 0."""
    if args.dir is not None and not Path(args.dir).is_dir():
        raise UsageError(f"--dir {args.dir} is not a folder")
    with tempfile.TemporaryDirectory(prefix="leftfold-bench-", dir=args.dir) as folder:
        found: dict[str, Any] = {"rows": args.rows, **measure_steps(args.rows, args.steps, Path(folder))}
        if not args.json:
            _print_steps(found)
        if not args.no_model:
            found |= measure_model(args, Path(folder), say=None if args.json else print)
    if args.json:
        print_json(found)
    return OK


# The engine's thread


class Timed:
    """A log, and how long whoever appends to it is busy with that: `seconds` since it was last read."""

    def __init__(self, log: Keeper) -> None:
        self._log = log
        self.seconds = 0.0

    def append(self, event: Event) -> int:
        begun = perf_counter()
        seq = self._log.append(event)
        self.seconds += perf_counter() - begun
        return seq

    def flush(self) -> None:
        """Once a step, as the engine does once a turn."""
        begun = perf_counter()
        self._log.commit()
        self.seconds += perf_counter() - begun


def measure_steps(rows: int, steps: int, folder: Path) -> dict[str, Any]:
    """Median µs per step, by durability: on the log (`log_us`), and in all (`step_us`); they take turns."""
    spent: dict[str, list[float]] = {mode: [] for mode in MODES}
    whole: dict[str, list[float]] = {mode: [] for mode in MODES}
    with ExitStack() as stack:
        logs = {mode: Timed(stack.enter_context(keeper(mode, folder / f"steps-{mode}"))) for mode in MODES}
        benches = {mode: control.Bench(rows, steps, log=log) for mode, log in logs.items()}
        for index in range(control.WARM_UP + steps):
            for mode in MODES:
                logs[mode].seconds = 0.0
                took = benches[mode].step()
                sleep(EXECUTOR_SECONDS)
                if index >= control.WARM_UP:
                    spent[mode].append(logs[mode].seconds * 1e6)
                    whole[mode].append(took * 1e6)
    return {"log_us": _medians(spent), "step_us": _medians(whole)}


def _medians(each: dict[str, list[float]]) -> dict[str, float]:
    return {mode: round(statistics.median(values), 2) for mode, values in each.items()}


@contextmanager
def keeper(mode: str, folder: Path) -> Iterator[Keeper]:
    """A log of this durability, closed at the end."""
    log: Keeper = NoLog() if mode == "off" else KeptLog(EventLog.open(folder), strict=mode == "strict")
    try:
        yield log
    finally:
        log.close()


def _print_steps(found: dict[str, Any]) -> None:
    print(f"µs per step of {found['rows']} rows\n{'':>8} {'log':>8} {'in all':>8}")
    for mode in MODES:
        print(f"{mode:>8} {found['log_us'][mode]:>8.1f} {found['step_us'][mode]:>8.1f}")


# The model


def measure_model(args: argparse.Namespace, folder: Path, say: Callable[[str], None] | None) -> dict[str, Any]:
    """Tokens per second by durability, and what is lost against none: the median over rounds of a round's own ratio."""
    from leftfold.builder import load_model
    from leftfold.options import EngineOptions

    room = args.streams * (2 * PROMPT + args.tokens)
    options = EngineOptions(
        model=args.model, max_num_seqs=args.streams, kv_tokens=room, max_model_len=2 * PROMPT + args.tokens,
        threads=args.threads, prefix_cache=False,
    )  # fmt: skip
    executor, config = load_model(options)
    speeds: dict[str, list[float]] = {mode: [] for mode in MODES}
    _answer(executor, config, NoLog(), args.streams, 2)  # the first steps of a process are slow
    for number in range(args.rounds):
        for mode in (MODES, MODES[::-1])[number % 2]:
            with keeper(mode, folder / f"round-{number}-{mode}") as log:
                speeds[mode].append(
                    args.streams * args.tokens / _answer(executor, config, log, args.streams, args.tokens)
                )
        if say is not None:
            say(f"round {number + 1}: " + ", ".join(f"{mode} {speeds[mode][-1]:.1f} tokens/s" for mode in MODES))
    lost = {
        mode: statistics.median(1 - own / base for own, base in zip(speeds[mode], speeds["off"], strict=True))
        for mode in MODES[1:]
    }
    if say is not None:
        say(", ".join(f"{mode}: {share:+.1%} of the speed lost" for mode, share in lost.items()))
    return {
        "streams": args.streams,
        "tokens": args.tokens,
        "tokens_per_second": {mode: round(statistics.median(each), 2) for mode, each in speeds.items()},
        "lost": {mode: round(share, 4) for mode, share in lost.items()},
    }


PROMPT = 16


def _answer(executor: Any, config: Any, log: Keeper, streams: int, tokens: int) -> float:
    """Seconds until `streams` requests, admitted at once, have been told their last of `tokens` tokens."""
    from leftfold.engine import Engine
    from leftfold.events import Admit, SamplingParams

    left, ended = streams, threading.Event()

    def listen(effects: Any) -> None:
        nonlocal left
        left -= sum(output.finish_reason is not None for output in effects.outputs)
        if not left:
            ended.set()

    engine = Engine(log=log, executor=executor, config=config, model="bench", on_effects=listen)
    engine.start()
    thread = threading.Thread(target=engine.run)
    thread.start()
    begun = perf_counter()
    for stream in range(streams):
        prompt = [1 + (stream * 31 + at * 7) % 1000 for at in range(PROMPT + stream % PROMPT)]
        engine.submit(Admit, rid=f"s{stream}", prompt=prompt, params=SamplingParams(max_tokens=tokens, temperature=0.0))
    ended.wait()
    took = perf_counter() - begun
    engine.stop()
    thread.join()
    return took


def main() -> int:
    """Run by itself: `python -m leftfold.bench.log`."""
    parser = Parser(prog="leftfold bench log", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
