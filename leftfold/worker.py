"""The executor's own thread: plans in, results out, in step order. Its end is a message, never an exception."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from leftfold.events import ExecutionPlan
from leftfold.executor.base import Executor, Result

RESETS = 3
"""How often a lost executor is reset before it is given up."""


@dataclass(frozen=True, slots=True)
class Done:
    """A step's result."""

    incarnation: int
    result: Result


@dataclass(frozen=True, slots=True)
class Lost:
    """`execute` raised in `plan`; every later plan of this incarnation is dropped."""

    incarnation: int
    plan: ExecutionPlan
    error: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The executor was reset, which ended `incarnation`."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class GivenUp:
    """The executor could not be reset in `RESETS` tries."""

    error: str


class Worker:
    """One thread around an executor. What happens is posted as `Done`, `Lost`, `Ready` or `GivenUp`."""

    def __init__(self, executor: Executor, post: Callable[[object], None], backoff: float = 0.2) -> None:
        self._executor = executor
        self._post = post
        self._backoff = backoff
        self._lost = -1
        self._closing = threading.Event()
        self._jobs: SimpleQueue[tuple[int, ExecutionPlan | float] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="leftfold-executor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def execute(self, incarnation: int, plan: ExecutionPlan) -> None:
        """Queue a plan; plans run one after the other."""
        self._jobs.put((incarnation, plan))

    def reset(self, incarnation: int, delay: float = 0.0) -> None:
        """Drop what waits of `incarnation`, and after `delay` seconds reset the executor."""
        self._lost = incarnation
        self._jobs.put((incarnation, delay))

    def close(self, timeout: float) -> bool:
        """Drop what waits, let the running plan end, for at most `timeout` seconds; whether it did."""
        self._closing.set()
        self._jobs.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None and not self._closing.is_set():
            incarnation, work = job
            if isinstance(work, float):
                self._reset(incarnation, work)
            elif incarnation > self._lost:
                self._execute(incarnation, work)

    def _execute(self, incarnation: int, plan: ExecutionPlan) -> None:
        try:
            self._post(Done(incarnation, self._executor.execute(plan)))
        except Exception as error:  # the boundary: whatever an executor dies of becomes an event
            self._lost = incarnation
            self._post(Lost(incarnation, plan, describe(error)))

    def _reset(self, incarnation: int, delay: float) -> None:
        error = ""
        for tried in range(RESETS):
            if self._closing.wait(delay + self._backoff * tried):
                return None
            try:
                self._executor.reset()
            except Exception as failure:  # the same boundary
                error = describe(failure)
            else:
                return self._post(Ready(incarnation))
        return self._post(GivenUp(error))


def describe(error: BaseException) -> str:
    """Type and text in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


__all__ = ["Done", "GivenUp", "Lost", "Ready", "Worker", "describe"]
