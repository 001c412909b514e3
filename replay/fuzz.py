"""`leftfold fuzz`: random runs of the scheduler on the oracle, every invariant checked after every event.

Equal seeds make equal runs. What is found is made small and written as a regression test and as a log that `leftfold
replay` opens; then the exit code is 1.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from leftfold.replay.fuzzing import (
    PROFILES,
    CrewError,
    Run,
    Tally,
    fuzz,
    fuzz_together,
    shrink,
    source_of,
    write_log,
    write_test,
)  # fmt: skip
from leftfold.replay.fuzzing.report import events_of
from leftfold.replay.mutants import command as mutants

SHRINK_SECONDS = 20.0
DEFAULT_SECONDS = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.epilog = (
        "Runs first let everything fail (safety), then nothing (liveness: all must end within a stated number of "
        "steps). What is found is made small and told: its kind, its events, a test that fails until it is mended, a "
        "log for `leftfold replay show` and `verify`, and the command that finds it again; the exit code is 1. "
        "Profiles, faults and kinds are explained in docs/fuzzing.md."
    )
    parser.add_argument("--seconds", type=_seconds, help=f"stop after so many seconds (default {DEFAULT_SECONDS:.0f})")
    parser.add_argument("--runs", type=_natural, help="stop after so many runs")
    parser.add_argument("--seed", type=_natural, help="what all chance comes from (default: drawn, and printed)")
    parser.add_argument("--profile", choices=PROFILES, default="lite",
                        help=f"what runs are like (default lite). {_profiles()}")  # fmt: skip
    parser.add_argument("--skip", type=_natural, default=0, metavar="N",
                        help="leave out the first N runs of the seed: with --runs 1, to make run N again")  # fmt: skip
    parser.add_argument("--jobs", type=_natural, default=1, metavar="N",
                        help="share the runs among N processes (default 1; 0: one for each processor); what is found "
                             "does not depend on it")  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="DIR", default=Path("tests/property/found"),
                        help="where the test of a finding is written (default %(default)s)")  # fmt: skip
    parser.add_argument("--log-dir", type=Path, metavar="DIR", default=Path("logs/fuzz"),
                        help="where the log of a finding is written, as a folder (default %(default)s)")  # fmt: skip
    parser.add_argument("--mutants", action="store_true",
                        help="plant each fault of tests/mutants and tell whether and how fast it is caught "
                             "(within --seconds each, default 60)")  # fmt: skip
    parser.add_argument("--only", action="append", default=[], metavar="NAME",
                        help="with --mutants: this one, or those of this class, or *…* (may be repeated)")  # fmt: skip
    parser.add_argument("--sampled", type=_natural, metavar="N",
                        help="with --mutants: not the catalogue, but N small changes drawn from all that can be made "
                             "in events/ and fsm/ (--seconds each, default 16; then unit tests)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _profiles() -> str:
    return "; ".join(f"{name}: {profile.says}" for name, profile in PROFILES.items()) + "."


def run(args: argparse.Namespace) -> int:
    """Fuzz, shrink what was found, report; 0 if nothing was found, else 1."""
    seed = secrets.randbits(32) if args.seed is None else args.seed
    commit = commit_of(Path(__file__).resolve())
    if args.jobs != 1 and (args.mutants or args.sampled or args.only):
        print("leftfold fuzz: --jobs goes without --mutants, --only and --sampled", file=sys.stderr)
        return 2
    if args.sampled:
        return mutants.run_sampled(args.sampled, args.seconds, seed, commit, args.json)
    if args.mutants or args.only:
        return mutants.run(args.only, args.seconds, seed, commit, args.json)
    if not args.json:
        print(f"seed {seed}, profile {args.profile}, commit {commit or 'unknown'}", flush=True)
    gc.freeze()  # what is there stays; what runs leave behind is looked for more seldom than usual
    gc.set_threshold(50_000, 20, 20)
    begin, spent = time.perf_counter(), _spent()
    budget, jobs = _budget(args.seconds, args.runs, begin), args.jobs or len(os.sched_getaffinity(0))
    try:
        if jobs > 1:
            tally = fuzz_together(jobs, seed, budget, PROFILES[args.profile], args.skip)
        else:
            tally = fuzz(seed, budget, PROFILES[args.profile], args.skip)
    except CrewError as error:
        print(f"leftfold fuzz: {error}", file=sys.stderr)
        return 1
    elapsed, spent = time.perf_counter() - begin, _spent() - spent
    finding = None
    if tally.found is not None:
        again = f"leftfold fuzz --profile {args.profile} --seed {seed} --skip {tally.number} --runs 1"
        finding = _Finding(_smallest(tally.found), again, commit or "unknown", args.out, args.log_dir)
    if args.json:
        print(json.dumps(_summary(tally, args.profile, elapsed, commit, finding)))
    else:
        _tell(tally, elapsed, spent, finding)
    return 0 if finding is None else 1


class _Finding:
    """What is told of a run in which something is wrong; writes its test and its log."""

    def __init__(self, run: Run, again: str, commit: str, out: Path, log_dir: Path) -> None:
        self.run = run
        self.again = again
        self.source = source_of(run, again, commit)
        self.test = write_test(run, self.source, out)
        self.log = write_log(run, log_dir)

    def as_dict(self) -> dict[str, Any]:
        run = self.run
        return {
            "kind": run.kind,
            "message": str(run.fault),
            "events": run.events,
            "list": events_of(run),
            "test": str(self.test),
            "log": str(self.log),
            "again": self.again,
        }

    def describe(self) -> str:
        run = self.run
        return "\n".join(
            [
                f"found {run.kind} after {run.events} events, as small as it gets: {run.fault}",
                "",
                *events_of(run),
                "",
                f"its test, written to {self.test}:",
                "",
                self.source,
                f"look at it:  leftfold replay show {self.log}   (or verify)",
                f"find it again:  {self.again}",
            ]
        )


def _spent() -> float:
    """Seconds on the processor, of processes that this one began, too."""
    ours, theirs = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return ours.ru_utime + ours.ru_stime + theirs.ru_utime + theirs.ru_stime


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
    tally: Tally, profile: str, elapsed: float, commit: str | None, finding: _Finding | None
) -> dict[str, Any]:
    return {
        "seed": tally.seed,
        "profile": profile,
        "commit": commit,
        "runs": tally.runs,
        "steps": tally.steps,
        "steps_per_second": round(tally.steps / elapsed, 1),
        "findings": [] if finding is None else [finding.as_dict()],
    }


def _tell(tally: Tally, elapsed: float, spent: float, finding: _Finding | None) -> None:
    """`spent`: seconds on the processor, which say more on a machine that others use too."""
    rate = f"{tally.steps / elapsed:,.0f} steps/s, {tally.steps / max(spent, 1e-9):,.0f} per second of processor time"
    print(f"{tally.runs} runs, {tally.steps} steps in {elapsed:.1f} s ({rate})")
    print("no findings" if finding is None else finding.describe())


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
