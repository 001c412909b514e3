"""A hunt from end to end: an engine with a planted fault leaves a log; it is found, explained, shrunk, and kept as a
test that fails on the fault alone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("events", "fsm", "executor", "replay", "kernels", "leftfold")

RIGHT = """            _explain_order(sketch, request)
        return
    if sketch.trace"""
FAULT = """            _explain_order(sketch, request)
        continue  # the fault: whoever does not fit is overtaken
    if sketch.trace"""


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout whose planner lets small requests overtake one that does not fit."""
    home = tmp_path_factory.mktemp("faulty")
    for room in ROOMS:
        shutil.copytree(ROOT / room, home / room, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    planner = home / "fsm" / "admitting.py"
    source = planner.read_text()
    assert source.count(RIGHT) == 1
    planner.write_text(source.replace(RIGHT, FAULT))
    return home


def run(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    return subprocess.run([sys.executable, *arguments], env=environment, cwd=checkout, capture_output=True, text=True)


def leftfold(checkout: Path, *arguments: str) -> tuple[int, dict[str, object]]:
    done = run(checkout, "-m", "leftfold", *arguments, "--json")
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.fixture(scope="module")
def log(faulty: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the faulty engine wrote down while it served 40 requests, most of them small, some large."""
    home = tmp_path_factory.mktemp("captured")
    rows = [
        {"timestamp": 90 * n, "input_length": 900 if n % 5 == 4 else 60, "output_length": 30, "hash_ids": [n, 100 + n]}
        for n in range(40)
    ]
    (home / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, found = leftfold(
        faulty, "simulate", "--trace", str(home / "trace.jsonl"), "--set", "num_pages=96", "--log", str(home / "log")
    )
    assert code == 0 and found["requests"] == 40
    return str(home / "log")


def test_a_planted_fault_is_found_explained_shrunk_and_kept(faulty: Path, log: str, tmp_path: Path) -> None:
    assert leftfold(faulty, "replay", "verify", log)[0] == 0  # the engine that made it agrees with itself
    code, verdict = leftfold(ROOT, "replay", "verify", log)
    divergence = verdict["divergence"]
    assert code == 1 and isinstance(divergence, dict)
    assert leftfold(faulty, "replay", "verify", log, "--checkout", str(ROOT)) == (1, verdict)
    assert leftfold(ROOT, "replay", "verify", log, "--checkout", str(faulty))[0] == 0

    overtaken = [row[1] for row in divergence["expected"]] if divergence["field"] == "join" else []
    code, shown = leftfold(ROOT, "replay", "show", log, "--at", str(divergence["seq"]))
    assert code == 0 and isinstance(shown["requests"], list)
    waiting = [row["rid"] for row in shown["requests"] if row["phase"] == "WAITING" and row["rid"] not in overtaken]
    code, told = leftfold(ROOT, "replay", "explain", log, waiting[0], "--at", str(divergence["seq"]))
    assert code == 0 and told["divergence"] == divergence["seq"]
    assert isinstance(told["causes"], list) and told["causes"][-1]["kind"] == "pages"
    assert told["causes"][-1]["needed"] > told["causes"][-1]["available"]

    arguments = ("--divergence", "--checkout", str(faulty), "--out", str(tmp_path), "--seconds", "60")
    code, small = leftfold(ROOT, "replay", "shrink", log, *arguments)
    assert code == 1 and isinstance(small["events"], int) and small["events"] <= 10

    test = str(small["test"])
    options = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-c", os.devnull, test)
    good, bad = run(ROOT, *options), run(faulty, *options)
    assert good.returncode == 0, good.stdout
    assert bad.returncode == 1 and "divergence at seq" in bad.stdout, bad.stdout
