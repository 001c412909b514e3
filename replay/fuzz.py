"""`leftfold fuzz`: random runs of the scheduler on the oracle, every invariant checked after every event.

Equal seeds make equal runs. What is found is made small and written as a regression test; then the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import secrets
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from leftfold.replay.fuzzing import Run, Tally, fuzz, shrink, source_of, write_test

SHRINK_SECONDS = 20.0
DEFAULT_SECONDS = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--seconds", type=_seconds, help=f"stop after so many seconds (default {DEFAULT_SECONDS:.0f})")
    parser.add_argument("--runs", type=_natural, help="stop after so many runs")
    parser.add_argument("--seed", type=_natural, help="what all chance comes from (default: drawn, and printed)")
    parser.add_argument("--out", type=Path, metavar="DIR", default=Path("tests/property/found"),
                        help="where the test of a finding is written (default %(default)s)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Fuzz, shrink what was found, report; 0 if nothing was found, else 1."""
    seed = secrets.randbits(32) if args.seed is None else args.seed
    commit = commit_of(Path(__file__).resolve())
    if not args.json:
        print(f"seed {seed}, commit {commit or 'unknown'}", flush=True)
    begin, spent = time.perf_counter(), time.process_time()
    tally = fuzz(seed, _budget(args.seconds, args.runs, begin))
    elapsed, spent = time.perf_counter() - begin, time.process_time() - spent
    finding = None if tally.found is None else _smallest(tally.found)
    path = None if finding is None else write_test(finding, seed, args.out)
    if args.json:
        print(json.dumps(_summary(tally, elapsed, commit, finding, path)))
    else:
        _tell(tally, elapsed, spent, finding, path)
    return 0 if finding is None else 1


def _budget(seconds: float | None, runs: int | None, begin: float) -> Callable[[Tally], bool]:
    if seconds is None and runs is None:
        seconds = DEFAULT_SECONDS

    def go_on(tally: Tally) -> bool:
        if runs is not None and tally.runs >= runs:
            return False
        return seconds is None or time.perf_counter() - begin < seconds

    return go_on


def _smallest(found: Run) -> Run:
    end = time.perf_counter() + SHRINK_SECONDS
    return shrink(found, lambda tries: time.perf_counter() < end)


def _summary(
    tally: Tally, elapsed: float, commit: str | None, finding: Run | None, path: Path | None
) -> dict[str, Any]:
    findings = []
    if finding is not None:
        message = str(finding.fault)
        findings.append({"kind": finding.kind, "events": finding.events, "test": str(path), "message": message})
    return {
        "seed": tally.seed,
        "commit": commit,
        "runs": tally.runs,
        "steps": tally.steps,
        "steps_per_second": round(tally.steps / elapsed, 1),
        "findings": findings,
    }


def _tell(tally: Tally, elapsed: float, spent: float, finding: Run | None, path: Path | None) -> None:
    """`spent`: seconds on the processor, which say more on a machine that others use too."""
    rate = f"{tally.steps / elapsed:,.0f} steps/s, {tally.steps / max(spent, 1e-9):,.0f} per second of processor time"
    print(f"{tally.runs} runs, {tally.steps} steps in {elapsed:.1f} s ({rate})")
    if finding is None:
        print("no findings")
        return
    print(f"found {finding.kind} after {finding.events} events, as small as it gets; written to {path}:\n")
    print(source_of(finding, tally.seed))


def commit_of(source: Path) -> str | None:
    """The commit of the checkout that `source` belongs to; None where there is none (or no git)."""
    known = _git(source.parent, "ls-files", "--error-unmatch", source.name)
    return None if known is None else _git(source.parent, "rev-parse", "--short=12", "HEAD")


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        found = subprocess.run(["git", *arguments], cwd=directory, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None


def _natural(text: str) -> int:
    value = int(text) if text.isdecimal() else -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return value
