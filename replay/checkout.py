"""The planner of another checkout, in a process of its own: it folds what it is told, and says what it would decide."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson

from leftfold.events import Event, encode
from leftfold.replay.errors import ReplayError

SCRIPT = """
import sys, orjson
from leftfold.events.codec import decode, plan_json
from leftfold.fsm import Config, State, decide, step
state, failed = None, None
for line in sys.stdin.buffer:
    ask = orjson.loads(line)
    try:
        if "config" in ask:
            state, failed = State(Config.from_dict(ask["config"])), None
        elif "event" in ask and failed is None:
            step(state, decode(ask["event"]))
        elif "decide" in ask:
            plan = None if failed else decide(state, ask["decide"])
            said = {"error": failed} if failed else {"plan": None if plan is None else orjson.loads(plan_json(plan))}
            sys.stdout.buffer.write(orjson.dumps(said) + b"\\n")
            sys.stdout.buffer.flush()
    except Exception as error:
        failed = f"{type(error).__name__}: {error}"
        if "decide" in ask:
            sys.stdout.buffer.write(orjson.dumps({"error": failed}) + b"\\n")
            sys.stdout.buffer.flush()
"""


class CheckoutError(ReplayError):
    """Another checkout that cannot be asked."""


class Checkout:
    """The planner in the checkout at `path`, whose code is run. Close it, or use it in a `with` statement."""

    def __init__(self, path: str | Path) -> None:
        path = Path(path).resolve()
        if not (path / "leftfold" / "__init__.py").is_file():
            raise CheckoutError(f"{path} is no checkout: it has no leftfold/__init__.py")
        self.path = path
        self._process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT], env={**os.environ, "PYTHONPATH": str(path)}, cwd=path,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def begin(self, config: dict[str, Any]) -> None:
        """A fresh state."""
        self._tell({"config": config})

    def take(self, event: Event) -> None:
        """Fold an event there."""
        self._tell({"event": orjson.Fragment(encode(event))})

    def decide(self, t: int) -> dict[str, Any]:
        """{"plan": what it would decide, or None}, or {"error": what it raised}. Raises `CheckoutError`."""
        self._tell({"decide": t})
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            raise CheckoutError(f"the planner at {self.path} is gone: {self._last_words()}")
        said: dict[str, Any] = orjson.loads(line)
        return said

    def _tell(self, what: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(orjson.dumps(what) + b"\n")
        except BrokenPipeError:
            raise CheckoutError(f"the planner at {self.path} is gone: {self._last_words()}") from None

    def _last_words(self) -> str:
        assert self._process.stderr is not None
        self._process.wait(10)
        text = self._process.stderr.read().decode(errors="replace").strip()
        return text.splitlines()[-1] if text else f"exit code {self._process.returncode}"

    def close(self) -> None:
        """End the process."""
        for pipe in filter(None, (self._process.stdin, self._process.stdout, self._process.stderr)):
            with suppress(BrokenPipeError):  # it went first
                pipe.close()
        self._process.terminate()
        self._process.wait(10)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


__all__ = ["Checkout", "CheckoutError"]
