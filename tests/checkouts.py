"""Other checkouts for tests of replay: this one's modules with another planner, or with something that dies."""

from __future__ import annotations

from pathlib import Path

import leftfold.fsm

REAL = Path(leftfold.fsm.__file__).resolve().parents[1] / "leftfold"
BEGINNING = f"""
import os
from dataclasses import replace
__path__.append({str(REAL)!r})
from leftfold import fsm
real = fsm.decide
def decide(state, t):
    plan = real(state, t)
"""


def checkout(folder: Path, planner: str) -> Path:
    """A checkout whose planner runs the lines `planner`, which know `state`, `t` and what is decided here, `plan`."""
    lines = "".join(f"    {line}\n" for line in planner.splitlines())
    return _written(folder, f"{BEGINNING}{lines}fsm.decide = decide\n")


def dead(folder: Path, source: str) -> Path:
    """A checkout that runs `source` where it is imported."""
    return _written(folder, source)


def _written(folder: Path, source: str) -> Path:
    (folder / "leftfold").mkdir(parents=True)
    (folder / "leftfold" / "__init__.py").write_text(source)
    return folder
