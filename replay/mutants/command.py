"""`leftfold fuzz --mutants`: plant each fault of the catalogue, fuzz, and tell whether and how fast it was caught."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from leftfold.replay.mutants.catalogue import PACKAGE, CatalogueError, Mutant, chosen, home, read
from leftfold.replay.mutants.sampling import Sampled, sampled

LIMIT_SECONDS = 60.0
SAMPLED_SECONDS = 16.0
SUITE_SECONDS = 300.0
_TOLD = ("kind", "message", "runs", "steps")
_HEAVY = re.compile("torch|tiny_models|leftfold.server|leftfold.llm|LLM|subprocess|tests.e2e|replay.mutants")
_FUZZING = ("test_fuzz", "test_machine")  # which the fuzzer was tried with
PATIENCE, LEAST_PATIENCE = 20, 120
"""A trial that gives no answer within so many times its limit, or so many seconds if that is longer, is ended."""


def run(only: Sequence[str], seconds: float | None, seed: int, commit: str | None, as_json: bool) -> int:
    """Print a table or one JSON object; 0 when every fault was caught, 1 when one was not, 2 without a catalogue."""
    try:
        mutants = read(home())
        mutants = chosen(mutants, only) if only else mutants
        for mutant in mutants:
            mutant.planted()
    except CatalogueError as error:
        print(f"leftfold fuzz: {error}", file=sys.stderr)
        return 2
    if not as_json:
        print(f"seed {seed}, commit {commit or 'unknown'}", flush=True)
    limit = LIMIT_SECONDS if seconds is None else seconds
    rows: list[dict[str, Any]] = []
    for mutant in mutants:
        rows.append({"name": mutant.name, **tried(mutant, seed, limit)})
        if not as_json:
            print(_line(mutant, rows[-1]), flush=True)
    if as_json:
        print(json.dumps(_summary(rows, seed, commit)))
    else:
        _tell(rows)
    return 0 if all(row["caught"] for row in rows) else 1


def tried(mutant: Mutant, seed: int, seconds: float, out: str | None = None) -> dict[str, Any]:
    """Whether the fuzzer catches `mutant`, and after how many seconds of processor time; why it could not be tried.

    `out`: a folder for the test of what was found, made small.
    """
    answer = fuzzed(mutant, seed=seed, seconds=seconds, out=out, profile=mutant.profile)
    if "error" not in answer and not answer["planted"]:
        answer["error"] = f"{mutant.module} plays no part in a run"
    if "error" in answer:
        return {"caught": False, "seconds": 0.0, "runs": 0, "steps": 0, **answer}
    return answer


def fuzzed(mutant: Mutant, *, profile: str, seed: int, seconds: float, **job: Any) -> dict[str, Any]:
    """A trial by the fuzzer; what it catches counts where the same run of sound sources finds nothing."""
    answer = trial(mutant, profile=profile, seed=seed, seconds=seconds, **job)
    if answer.get("caught"):
        sound = trial(None, profile=profile, seed=seed, seconds=seconds, skip=answer["number"], runs=1)
        if sound.get("caught", True):
            return {"error": f"run {answer['number']} finds {sound.get('kind')} without the fault, too", "sound": False}
    return answer


def trial(mutant: Mutant | None, **job: Any) -> dict[str, Any]:
    """Do a job in an interpreter of its own, with the fault planted (None: none); its answer."""
    if mutant is not None:
        job |= {"name": mutant.name, "module": mutant.module, "source": mutant.planted()}
        job["origin"] = str(PACKAGE / mutant.file)
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "leftfold.replay.mutants.trial"],
            input=json.dumps(job), capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "LEFTFOLD_COMPILED": "off"},
            timeout=max(LEAST_PATIENCE, PATIENCE * job.get("seconds", LIMIT_SECONDS)),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"error": "no answer"}
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except json.JSONDecodeError:
        return {"error": f"exit code {done.returncode}: {done.stderr.strip()[-300:]}"}
    return answer


def run_sampled(count: int, seconds: float | None, seed: int, commit: str | None, as_json: bool) -> int:
    """Plant `count` small changes drawn from `events/` and `fsm/`; the score, and those that nothing notices."""
    try:
        tests = home().parent
    except CatalogueError as error:
        print(f"leftfold fuzz: {error}", file=sys.stderr)
        return 2
    limit = SAMPLED_SECONDS if seconds is None else seconds
    if not as_json:
        print(f"seed {seed}, commit {commit or 'unknown'}", flush=True)
    rows: list[dict[str, Any]] = []
    for mutant in sampled(count, Random(seed)):
        rows.append({"name": mutant.name, "story": mutant.story, **noticed(mutant, seed, limit, tests)})
        if not as_json:
            print(f"{_line(mutant, rows[-1])}   {mutant.story[:80]}", flush=True)
    if as_json:
        print(json.dumps(_summary(rows, seed, commit)))
    else:
        _tell(rows)
    return 0 if all(row["caught"] for row in rows) else 1


def noticed(mutant: Sampled, seed: int, seconds: float, tests: Path) -> dict[str, Any]:
    """Whether the fuzzer catches a change in half of `seconds`, on a disk in the other half, else the tests of it."""
    spent = 0.0
    for profile in ("faults", "lite") if mutant.kind == "events" else ("lite", "faults"):
        answer = fuzzed(mutant, seed=seed, seconds=seconds / 2, profile=profile)
        spent += answer.get("seconds", 0.0)
        if answer.get("caught") or "error" in answer:  # what does not even import, or end, is noticed
            found = {"kind": "broken", "message": answer.get("error"), "runs": 0, "steps": 0, **answer}
            row = {key: found[key] for key in _TOLD}
            return {**row, "caught": answer.get("sound", True), "seconds": round(spent, 2)}
        if not answer["planted"]:
            break  # no run imports it
    suite = suite_of(mutant.file, tests)
    told: dict[str, Any] = trial(mutant, suite=suite, seconds=SUITE_SECONDS) if suite else {"passed": True}
    answer |= {"kind": "tests", "message": " ".join(told.get("failed", ())) or told.get("error", "")}
    spent += told.get("seconds", 0.0)
    return {**{key: answer[key] for key in _TOLD}, "caught": told.get("passed") is False, "seconds": round(spent, 2)}


def suite_of(file: str, tests: Path) -> list[str]:
    """Files of unit tests, and of property tests that name `file`, without a server or a model.

    Those that speak most of `file` and what it defines come first.
    """
    stem, module = Path(file).stem, ".".join(("leftfold", *Path(file).with_suffix("").parts))
    tree = ast.parse((PACKAGE / file).read_text())
    names = [node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    words = re.compile(rf"\b({'|'.join([stem, *(name for name in names if len(name) > 5)])})\b")
    found: list[tuple[int, str]] = []
    for path in sorted((*(tests / "unit").glob("test_*.py"), *(tests / "property").glob("test_*.py"))):
        text = path.read_text()
        bonus = 1000 * (stem in path.stem) + 100 * (f"from {module} import" in text)
        if (bonus or path.parent.name == "unit") and path.stem not in _FUZZING and not _HEAVY.search(text):
            found.append((bonus + len(words.findall(text)), str(path)))
    return [path for _, path in sorted(found, reverse=True)]


def _line(mutant: Mutant, row: Mapping[str, Any]) -> str:
    if "error" in row:
        how = f"could not be tried: {row['error']}"
    else:
        how = f"{row['kind']}: {row['message']}" if row["caught"] else f"in {row['runs']} runs, {row['steps']} steps"
    said = "caught" if row["caught"] else "MISSED"
    return f"{mutant.kind:10} {mutant.name:36} {said} {row['seconds']:6.1f} s  {' '.join(how.split())[:60]}"


def _tell(rows: Sequence[Mapping[str, Any]]) -> None:
    times = [row["seconds"] for row in rows]
    missed = [row["name"] for row in rows if not row["caught"]]
    print(f"{len(rows) - len(missed)} of {len(rows)} caught; median {median(times):.1f} s, slowest {max(times):.1f} s")
    if missed:
        print(f"missed: {', '.join(missed)}")


def _summary(rows: Sequence[Mapping[str, Any]], seed: int, commit: str | None) -> dict[str, Any]:
    names = ("name", "story", "caught", "seconds", "kind", "error")
    steps, seconds = sum(row["steps"] for row in rows), sum(row["seconds"] for row in rows)
    return {
        "seed": seed,
        "commit": commit,
        "runs": sum(row["runs"] for row in rows),
        "steps": steps,
        "steps_per_second": round(steps / max(seconds, 1e-9), 1),
        "findings": [],
        "mutants": [{name: row[name] for name in names if name in row} for row in rows],
    }
