"""The scheduler as machine code does what it does interpreted: the same runs, and what other tests say of it holds."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from leftfold import compiled
from leftfold.cli import main
from leftfold.compiling import CompileError, compile_scheduler
from leftfold.events import encode
from leftfold.replay.fuzzing import PROFILES
from leftfold.replay.fuzzing.loop import made_again

ROOT = Path(__file__).parents[2]

SUITES = (
    ("tests/property/test_result_forms.py", "tests/property/test_seldom.py", "tests/unit/test_bad_results.py"),
    ("tests/property/test_batches.py", "tests/unit/test_log_snapshots.py", "tests/property/test_wild_logs.py"),
    ("tests/unit/test_validity.py", "tests/unit/test_admission.py", "tests/unit/test_odd_fields.py"),
    ("tests/unit/test_check.py", "tests/unit/test_invariants.py", "tests/unit/test_deadlines.py"),
    ("tests/unit/test_policies.py", "tests/unit/test_suspects.py", "tests/unit/test_stop_ids.py"),
    ("tests/golden/test_logs.py", "tests/golden/test_histories.py", "tests/unit/test_digest.py"),
    tuple(
        f"tests/property/test_cases_{of}.py"
        for of in ("aborts", "control", "counts", "pages", "preemption", "progress")
    ),
)
"""Tests that neither plant a fault nor look where machine code shows nothing."""

_LOGS = """
import sys
from leftfold import compiled
from tests.property.test_compiled import logs
assert compiled.in_use() == (sys.argv[1] == "on"), "the other one is in use"
sys.stdout.buffer.write(logs())
"""


def logs() -> bytes:
    """The logs of some runs of each kind, and the state that each ends in."""
    parts = []
    for name in ("lite", "swarm", "faults"):
        for number in range(24):
            run = made_again(7, number, PROFILES[name])
            assert run.fault is None, (name, number, run.fault)
            parts += [b"%s %d %d" % (name.encode(), number, run.steps), *map(encode, run.log)]
    return b"\n".join(parts)


@pytest.fixture(scope="module")
def machine_code() -> Path:
    """Compiled now, unless it is there."""
    try:
        return compile_scheduler()[0]
    except CompileError as error:
        pytest.skip(str(error))


def run(mode: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "LEFTFOLD_COMPILED": mode, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


def test_runs_are_the_same_interpreted_and_compiled(machine_code: Path) -> None:
    both = [run(mode, "-c", _LOGS, mode) for mode in ("off", "on")]
    assert [one.returncode for one in both] == [0, 0], both[0].stderr.decode() + both[1].stderr.decode()
    assert len(both[0].stdout) > 100_000 and both[0].stdout == both[1].stdout


@pytest.mark.parametrize("suite", SUITES, ids=[Path(files[0]).stem for files in SUITES])
def test_what_is_said_of_the_state_machine_holds_of_machine_code(machine_code: Path, suite: tuple[str, ...]) -> None:
    done = run("on", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *suite)
    assert done.returncode == 0, done.stdout.decode()[-3000:]


def test_machine_code_is_of_the_source_that_is_there(tmp_path: Path) -> None:
    package = tmp_path / "leftfold"
    for room in compiled.ROOMS:
        shutil.copytree(ROOT / room, package / room, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    assert compiled.folder(package) == compiled.folder()
    with open(package / "fsm/commit.py", "a") as file:
        file.write("#\n")
    assert compiled.folder(package) != compiled.folder()


def cut(place: Path) -> None:
    os.truncate(compiled.file_of(compiled.LIBRARY, place), 5000)


def lose(place: Path) -> None:
    compiled.file_of("leftfold.fsm.few", place).unlink()


def empty(place: Path) -> None:
    (place / compiled.MANIFEST).write_text("")


def spoil(place: Path) -> None:
    with open(compiled.file_of("leftfold.fsm.planner", place), "r+b") as file:
        file.write(b"other")


def another_machines(place: Path) -> None:
    library = compiled.file_of(compiled.LIBRARY, place)
    library.write_bytes(bytes(library.stat().st_size))
    (place / compiled.MANIFEST).write_text(compiled.manifest(place))


@pytest.mark.parametrize(
    ("damage", "says"),
    [(cut, b""), (lose, b""), (empty, b""), (spoil, b""), (another_machines, b"cannot be loaded")],
)
def test_what_is_damaged_is_not_used(
    machine_code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None], says: bytes
) -> None:
    monkeypatch.setenv("LEFTFOLD_CACHE", str(tmp_path))
    shutil.copytree(machine_code, compiled.folder())
    asked = "from leftfold import compiled; print(compiled.in_use())"
    assert run("", "-c", asked).stdout == b"True\n"
    damage(compiled.folder())
    done = run("", "-c", asked)
    assert done.stdout == b"False\n" and done.returncode == 0
    assert says in done.stderr and done.stderr.count(b"\n") == bool(says)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("CC", "no-such-compiler", r"there is no C compiler here \(no-such-compiler\)"),
        ("CC", "false", "cannot compile: .*'false'.*"),
        ("LEFTFOLD_CACHE", "/dev/null/x", "cannot keep machine code in the cache: .*; set LEFTFOLD_CACHE"),
        ("LEFTFOLD_CACHE", "~nobody-of-this-name/x", "cannot keep machine code in the cache: .*; set LEFTFOLD_CACHE"),
    ],
)
def test_where_it_cannot_be_compiled_one_line_says_why_and_nothing_is_left(
    machine_code: Path,
    name: str,
    value: str,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("LEFTFOLD_CACHE", str(tmp_path))
    monkeypatch.setenv(name, value)
    assert main(["compile"]) == 2
    assert re.fullmatch(f"leftfold: {says}\n", capsys.readouterr().err)
    assert [file.name for file in tmp_path.rglob("*") if file.name not in ("compiled", ".lock")] == []
