"""Compiles `fsm/` with mypyc, from its own type annotations, into the user's cache (see leftfold/compiled.py)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from fcntl import LOCK_EX, flock
from importlib.util import find_spec
from pathlib import Path

from leftfold.compiled import GROUP, MODULES, file_of, folder, sources
from leftfold.errors import EngineError

_SETUP = """
import sys
from mypyc.build import mypycify
from setuptools import setup

modules = [f"leftfold/fsm/{{name}}.py" for name in {modules!r}]
options = ["--follow-imports=silent", "--ignore-missing-imports", "--no-error-summary"]
code = mypycify([*options, *modules], opt_level="2", debug_level="0", group_name={group!r})
setup(name={group!r}, packages=[], ext_modules=code, script_args=["-q", "build_ext", "--build-lib", "built"])
"""


class CompileError(EngineError):
    """The state machine cannot be compiled here; the message says why."""


def compile_fsm() -> tuple[Path, bool]:
    """Compile the source that is there, unless that was done: where the code is, and whether it is new.

    Takes most of a minute. Raises `CompileError`.
    """
    target = folder()
    if target.is_dir():
        return target, False
    for module in ("mypyc", "setuptools"):
        if find_spec(module) is None:
            raise CompileError(f"{module} is not installed: pip install 'leftfold[compile]'")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target.parent / ".lock", "w") as lock:
            flock(lock, LOCK_EX)  # who comes second finds what the first one made
            if target.is_dir():
                return target, False
            with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as work:
                os.replace(_built(Path(work)), target)
    except OSError as error:
        raise CompileError(f"cannot keep machine code in {target.parent}: {error}; set LEFTFOLD_CACHE") from error
    return target, True


def _built(work: Path) -> Path:
    """Compile a copy of the sources in `work`: paths of a checkout do not get into the code."""
    package = work / "leftfold"
    package.mkdir()
    package.joinpath("__init__.py").touch()
    package.joinpath("py.typed").touch()
    for file in sources():
        package.joinpath(file.parent.name).mkdir(exist_ok=True)
        shutil.copyfile(file, package / file.parent.name / file.name)
    script = _SETUP.format(modules=MODULES, group=GROUP)
    environment = {**os.environ, "MYPY_CACHE_DIR": str(work / "types"), "PYTHONPATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=work, env=environment, capture_output=True, text=True, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    built = work / "built"
    if done.returncode or not all(file_of(f"leftfold.fsm.{name}", built).is_file() for name in MODULES):
        said = [line for line in (done.stderr + done.stdout).splitlines() if "rror" in line]
        raise CompileError(f"fsm/ cannot be compiled: {said[-1].strip() if said else 'no reason given'}")
    return built
