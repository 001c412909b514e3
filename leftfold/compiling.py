"""Compiles the scheduler with mypyc, from its own type annotations, into the user's cache (leftfold/compiled.py)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from fcntl import LOCK_EX, flock
from importlib.util import find_spec
from pathlib import Path

from leftfold.compiled import GROUP, MANIFEST, MODULES, folder, is_whole, manifest, sources
from leftfold.errors import EngineError

_SETUP = """
from mypyc.build import mypycify
from setuptools import setup

modules = [name.replace(".", "/") + ".py" for name in {modules!r}]
options = ["--config-file=mypy.ini", "--cache-dir=types", "--follow-imports=silent", "--ignore-missing-imports"]
code = mypycify([*options, *modules], opt_level="2", debug_level="0", group_name={group!r})
setup(name={group!r}, packages=[], ext_modules=code, script_args=["-q", "build_ext", "--build-lib", "built"])
"""

KEPT = 8
"""Of so many sources the machine code is kept, the newest."""


class CompileError(EngineError):
    """The scheduler cannot be compiled here; the message says why."""


def compile_scheduler(begins: Callable[[], None] = lambda: None) -> tuple[Path, bool]:
    """Compile the source that is there, unless that was done: where the code is, and whether it is new.

    Takes a minute, before which `begins` is called. Raises `CompileError`.
    """
    try:
        target = folder()
        if is_whole(target):
            return target, False
        _check_tools()
        begins()
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target.parent / ".lock", "w") as lock:
            flock(lock, LOCK_EX)  # who comes second finds what the first one made
            return _compiled(target.parent)
    except (OSError, RuntimeError) as error:
        raise CompileError(f"cannot keep machine code in the cache: {error}; set LEFTFOLD_CACHE") from error


def _check_tools() -> None:
    for module in ("mypyc", "setuptools"):
        if find_spec(module) is None:
            raise CompileError(f"{module} is not installed: pip install 'leftfold[compile]'")
    compiler = [*os.environ.get("CC", "").split(), *(sysconfig.get_config_var("CC") or "cc").split()][0]
    if shutil.which(compiler) is None:
        raise CompileError(f"there is no C compiler here ({compiler})")
    headers = sysconfig.get_path("include")
    if not Path(headers, "Python.h").is_file():
        raise CompileError(f"Python's headers are not in {headers}")


def _compiled(cache: Path) -> tuple[Path, bool]:
    """As `compile_scheduler`; nobody else writes to `cache`.

    A copy of the source is compiled: a checkout may change meanwhile, and its paths are nobody's business.
    """
    for left in cache.glob(".build-*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=cache) as work:
        package = Path(work, "leftfold")
        here = Path(__file__).parent
        for file in sources(here):
            copy = package / file.relative_to(here)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
        target = folder(package)
        if is_whole(target):
            return target, False
        built = _built(Path(work))
        if target.is_dir():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)
        os.replace(built, target)
    older = sorted(cache.glob("????????????????"), key=lambda place: place.stat().st_mtime, reverse=True)
    for place in older[KEPT:]:
        shutil.rmtree(place, ignore_errors=True)
    return target, True


def _built(work: Path) -> Path:
    """Compile the package in `work`, which knows of no other one and of nobody's settings."""
    for name in ("leftfold/__init__.py", "leftfold/py.typed"):
        Path(work, name).touch()
    Path(work, "mypy.ini").write_text("[mypy]\n")
    done = subprocess.run(
        [sys.executable, "-c", _SETUP.format(modules=MODULES, group=GROUP)], cwd=work, capture_output=True, text=True,
        check=False, stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": "", "MYPYPATH": ""},
    )  # fmt: skip
    built = work / "built"
    try:
        Path(built, MANIFEST).write_text(manifest(built))
    except OSError:
        said = [line for line in (done.stderr + done.stdout).splitlines() if "rror" in line]
        raise CompileError(f"cannot compile: {said[-1].strip()[:200] if said else 'no reason given'}") from None
    return built
