"""What replays, simulates and fuzzes starts without torch, and importing a room has no side effects to wait for."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "triton", "fastapi", "uvicorn", "zmq", "openai", "tokenizers", "safetensors", "gguf")
LIGHT = ("leftfold", "leftfold.events", "leftfold.fsm", "leftfold.replay", "leftfold.cli", "leftfold.replay.simulating",
         "leftfold.commands.simulate", "leftfold.replay.ui.http", "leftfold.replay.report")  # fmt: skip


def heavy_modules_after(statement: str) -> list[str]:
    """Which of `HEAVY` a fresh interpreter holds after `statement`."""
    script = f"{statement}\nimport sys\nprint(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("module", LIGHT)
def test_importing_it_loads_no_heavy_package(module: str) -> None:
    assert heavy_modules_after(f"import {module}") == []


def test_the_http_process_holds_no_scheduler() -> None:
    script = "import leftfold.server.launch, leftfold.server.app, sys; print(*sys.modules)"
    held = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert "leftfold.server.app" in held and "torch" not in held
    assert [name for name in held if name.startswith(("leftfold.fsm", "leftfold.replay.worlds"))] == []


def test_the_check_sees_a_heavy_package() -> None:
    assert "uvicorn" in heavy_modules_after("import uvicorn")
