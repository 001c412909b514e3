"""One trial: `python -m leftfold.replay.mutants.trial` plants a fault in a fresh interpreter and runs the fuzzer on it.

The job comes as one JSON object on standard input, the answer goes as one to standard output. Nothing is written into
the checkout: the patched source stands in memory, behind an import hook.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from time import process_time
from types import FrameType, ModuleType
from typing import Any

HANG_SECONDS = 4.0
"""Processor time after which one run of the fuzzer, which takes some hundredths of a second, is taken to hang."""

SHRINK_SECONDS = 3.0


class Planter(MetaPathFinder, Loader):
    """Finds one module, whose source it has. `done`: whether that was imported."""

    def __init__(self, module: str, source: str, origin: str) -> None:
        self.module = module
        self.code = compile(source, origin, "exec")
        self.done = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return spec_from_loader(fullname, self) if fullname == self.module else None

    def exec_module(self, module: ModuleType) -> None:
        self.done = True
        exec(self.code, module.__dict__)


def run(job: Mapping[str, Any]) -> dict[str, Any]:
    """Plant what the job says, then do what it asks for."""
    planter = None
    if job.get("module"):
        planter = Planter(job["module"], job["source"], job["origin"])
        assert job["module"] not in sys.modules, f"{job['module']} is imported already"
        sys.meta_path.insert(0, planter)
    if job.get("suite"):
        found = _suite(job)
    else:
        found = _test(job["test"]) if job.get("test") else _fuzz(job)
    return {**found, "planted": planter is None or planter.done}


def _fuzz(job: Mapping[str, Any]) -> dict[str, Any]:
    """Fuzz until something is found or so many seconds of processor time, this process's start included, are over.

    `skip`, `runs`: runs of the seed that are left out first, and that are made at most.
    """
    from pathlib import Path

    from leftfold.replay.fuzzing import PROFILES, Tally, Violation, fuzz, shrink, source_of, write_test

    def hang(number: int, frame: FrameType | None) -> None:
        raise Violation("hang", f"a run did not end within {HANG_SECONDS:.0f} s of processor time")

    def go_on(tally: Tally) -> bool:
        signal.setitimer(signal.ITIMER_VIRTUAL, HANG_SECONDS)
        return process_time() < float(job["seconds"]) and tally.runs < job.get("runs", tally.runs + 1)

    signal.signal(signal.SIGVTALRM, hang)
    tally = fuzz(job["seed"], go_on, PROFILES[job["profile"]], job.get("skip", 0))
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    answer: dict[str, Any] = {"seconds": round(process_time(), 2), "runs": tally.runs, "steps": tally.steps}
    if tally.found is None:
        return {**answer, "caught": False}
    answer |= {"caught": True, "number": tally.number, "kind": tally.found.kind, "message": str(tally.found.fault)}
    if job.get("out"):
        end = process_time() + SHRINK_SECONDS
        small = shrink(tally.found, lambda tries: process_time() < end)
        source = source_of(small, f"leftfold fuzz --mutants --only {job['name']} --seed {tally.seed}", "unknown")
        answer |= {"test": str(write_test(small, source, Path(job["out"]))), "events": small.events}
    return answer


def _test(path: str) -> dict[str, Any]:
    """Run the tests of one written file; what the first that fails raises."""
    import runpy

    for name, value in runpy.run_path(path).items():
        if name.startswith("test_"):
            try:
                value()
            except Exception as error:  # whatever the engine raises is the answer
                return {"passed": False, "kind": type(error).__name__, "message": str(error)}
    return {"passed": True}


def _suite(job: Mapping[str, Any]) -> dict[str, Any]:
    """Run test files until one fails, or does not end within the job's seconds of processor time."""
    import io
    from contextlib import redirect_stdout

    import pytest

    def hang(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"the tests did not end within {job['seconds']} s of processor time")

    signal.signal(signal.SIGVTALRM, hang)
    signal.setitimer(signal.ITIMER_VIRTUAL, float(job["seconds"]))
    with redirect_stdout(io.StringIO()) as said:
        code = pytest.main(["-x", "-q", "--capture=sys", "-p", "no:cacheprovider", *job["suite"]])
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    passed = code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    failed = [line for line in said.getvalue().splitlines() if line.startswith(("FAILED", "ERROR"))]
    return {"passed": passed, "seconds": round(process_time(), 2), "failed": failed[:1]}


def main() -> None:
    """Answer one job."""
    try:
        answer = run(json.load(sys.stdin))
    except Exception as error:  # an entry that does not even import is no fault that could be caught
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
