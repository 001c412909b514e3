"""The control verbs of the torch executor: each changes the executor, or fails with a text and changes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from leftfold.events import Control
from leftfold.executor.errors import ExecutorError
from leftfold.executor.resident import Resident

TAGS = ("weights", "kv")
SLOWEST = 60.0
"""Seconds by which a step may be slowed down."""


class ControlError(ExecutorError):
    """A control operation that asks for what is not there."""


class Controls:
    """Carries out `Control` operations, in the executor's thread.

    `sleep` and `wake` {"tags": of "weights", "kv"}; `update_weights` {"source": a folder or .gguf file}; `slow_down`
    {"seconds": before each step, 0 ends it}, for drills; `start_profile` {} and `stop_profile` {"file": where the trace
    goes, as Chrome's trace viewer reads it}.
    """

    def __init__(self, resident: Resident) -> None:
        self._resident = resident
        self._delay = 0.0
        self._profiler: Any = None
        self._verbs: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
            "sleep": lambda args: resident.sleep(_tags(args)),
            "wake": lambda args: resident.wake(_tags(args)),
            "update_weights": lambda args: resident.update(_text(args, "source")),
            "slow_down": self._slow_down,
            "start_profile": self._start_profile,
            "stop_profile": self._stop_profile,
        }

    def run(self, control: Control) -> tuple[int, Any, str | None]:
        """(op, info, error) of one operation; never raises."""
        verb = self._verbs.get(control.verb)
        if verb is None:
            return control.op, None, f"the verb {control.verb!r} is unknown; there are: {', '.join(self._verbs)}"
        try:
            return control.op, verb(control.args), None
        except ExecutorError as error:
            return control.op, None, str(error)
        except Exception as error:  # the boundary: whatever a file or a device throws is the call's answer
            return control.op, None, f"{type(error).__name__}: {error}"

    def before_step(self) -> None:
        """What a `slow_down` does."""
        if self._delay:
            time.sleep(self._delay)

    def _slow_down(self, args: Mapping[str, Any]) -> dict[str, Any]:
        seconds = args.get("seconds")
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds <= SLOWEST:
            raise ControlError(f"seconds is {seconds!r}, it must be 0 to {SLOWEST:.0f}")
        self._delay = float(seconds)
        return {"seconds": self._delay}

    def _start_profile(self, args: Mapping[str, Any]) -> dict[str, Any]:
        if self._profiler is not None:
            raise ControlError("a profile is being taken already: stop it first")
        profiler = torch.profiler.profile()
        profiler.start()
        self._profiler = profiler
        return {}

    def _stop_profile(self, args: Mapping[str, Any]) -> dict[str, Any]:
        file = Path(_text(args, "file"))
        if self._profiler is None:
            raise ControlError("no profile is being taken: start one first")
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        file.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(file))
        return {"file": str(file)}


def _tags(args: Mapping[str, Any]) -> list[str]:
    tags = args.get("tags")
    if not isinstance(tags, (list, tuple)) or not tags or any(tag not in TAGS for tag in tags):
        raise ControlError(f"tags is {tags!r}, it must be some of {', '.join(TAGS)}")
    return list(tags)


def _text(args: Mapping[str, Any], name: str) -> str:
    value = args.get(name)
    if not isinstance(value, str) or not value:
        raise ControlError(f"{name} is {value!r}, it must be a path")
    return value
