"""`fsm/` as machine code does what it does interpreted: the same runs, and what other tests say of it holds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from leftfold import compiled
from leftfold.compiling import CompileError, compile_fsm
from leftfold.events import encode
from leftfold.replay.fuzzing import PROFILES
from leftfold.replay.fuzzing.loop import made_again

ROOT = Path(__file__).parents[2]

SUITES = (
    ("tests/property/test_result_forms.py", "tests/property/test_seldom.py", "tests/unit/test_bad_results.py"),
    ("tests/property/test_batches.py", "tests/property/test_snapshots.py", "tests/property/test_wild_logs.py"),
    ("tests/unit/test_validity.py", "tests/unit/test_admission.py", "tests/unit/test_limits.py"),
    ("tests/unit/test_policies.py", "tests/unit/test_suspects.py", "tests/unit/test_stop_ids.py"),
    ("tests/golden/test_logs.py", "tests/golden/test_histories.py", "tests/unit/test_digest.py"),
    tuple(str(file.relative_to(ROOT)) for file in sorted((ROOT / "tests/property").glob("test_cases_*.py"))),
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
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("there is no C compiler here")
    return compile_fsm()[0]


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


def test_machine_code_is_of_the_source_that_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = compiled.folder()
    changed = tmp_path / "commit.py"
    changed.write_text("# another one\n")
    there = compiled.sources()
    monkeypatch.setattr(compiled, "sources", lambda: [changed if file.name == "commit.py" else file for file in there])
    assert compiled.folder() != before
    assert compiled.folder().parent == before.parent


def test_without_a_compiler_it_is_said_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LEFTFOLD_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setattr("leftfold.compiling.MODULES", ("queue",))
    with pytest.raises(CompileError, match="fsm/ cannot be compiled: .*no-such-compiler"):
        compile_fsm()
    assert [file.name for file in (tmp_path / "compiled").iterdir()] == [".lock"]
