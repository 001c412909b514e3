"""Make a run that finds something as small as it can be, and still find the same.

Delta debugging (Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input", 2002) over the list of
commands, then over the numbers and lists in them and in the configuration. Results of steps come from the oracle
each time, so that what is left over is always a run that can happen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from leftfold.replay.fuzzing.loop import Run, execute
from leftfold.replay.fuzzing.world import Command


def shrink(run: Run, go_on: Callable[[int], bool]) -> Run:
    """The smallest run found that ends like `run`; `go_on(tries)` says whether to spend another try."""
    return _Shrinker(run, go_on).shrink()


WIDE = 64
"""Tokens a step and a chunk that are more than most prompts have."""


class _Spent(Exception):
    """No tries are left."""


class _Shrinker:
    def __init__(self, run: Run, go_on: Callable[[int], bool]) -> None:
        self.kind = run.kind
        self.best = run
        self.go_on = go_on
        self.tries = 0

    def shrink(self) -> Run:
        try:
            self._try(self.best.config, self.best.commands)  # looking closely, it may end earlier
            before = -1
            while before != (before := self._weight()):
                self._cut()
                self._widen()
                self._simplify_commands()
                self._simplify_config()
        except _Spent:
            pass
        return self.best

    def _weight(self) -> int:
        return len(repr((self.best.config, self.best.commands)))

    def _try(self, config: Mapping[str, Any], commands: Sequence[Command], most: int | None = None) -> bool:
        """Whether it still ends like that, within `most` events."""
        if not self.go_on(self.tries):
            raise _Spent
        self.tries += 1
        again = execute(config, commands)
        if again.kind != self.kind or (most is not None and again.events > most):
            return False
        self.best = again
        return True

    def _cut(self) -> None:
        """Drop stretches of commands, longer ones first."""
        length = len(self.best.commands)
        while length:
            at = 0
            while at < len(self.best.commands):
                commands = self.best.commands
                if not self._try(self.best.config, [*commands[:at], *commands[at + length :]]):
                    at += length
            length //= 2

    def _widen(self) -> None:
        """A larger budget computes long prompts in fewer steps."""
        for name in ("max_batch_tokens", "max_chunk_tokens"):
            if name in self.best.config and self.best.config[name] not in (None, WIDE):
                self._try({**self.best.config, name: WIDE}, self.best.commands, self.best.events - 1)

    def _simplify_commands(self) -> None:
        at = 0
        while at < len(self.best.commands):
            for name in list(self.best.commands[at][1]):
                self._simplify_argument(at, name)
            at += 1

    def _simplify_argument(self, at: int, argument: str) -> None:
        """Leave an argument out, or make it smaller, as long as that works."""
        progress = True
        while progress:
            name, arguments = self.best.commands[at]
            less = {key: value for key, value in arguments.items() if key != argument}
            candidates = [less, *({**arguments, argument: value} for value in smaller(arguments[argument]))]
            progress = any(self._replace(at, (name, candidate)) for candidate in candidates)
            progress = progress and argument in self.best.commands[at][1]

    def _replace(self, at: int, command: Command) -> bool:
        commands = list(self.best.commands)
        commands[at] = command
        return self._try(self.best.config, commands)

    def _simplify_config(self) -> None:
        for name in list(self.best.config):
            progress = True
            while progress:
                progress = any(
                    self._try({**self.best.config, name: value}, self.best.commands, self.best.events)
                    for value in _simpler_setting(name, self.best.config[name])
                )


_PLAIN = {
    "prefix_cache": False, "max_chunk_tokens": None, "max_queued_requests": None, "max_queued_tokens": None,
    "vocab_size": None, "policy": "fcfs", "pipeline_depth": 0,
}  # fmt: skip


def _simpler_setting(name: str, value: Any) -> Iterator[Any]:
    if name in _PLAIN:
        if value != _PLAIN[name]:
            yield _PLAIN[name]
    elif name != "vocab":
        yield from (less for less in smaller(value) if less > 0)


def smaller(value: Any) -> Iterator[Any]:
    """Simpler values of the same kind, the simplest first."""
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, int):
        for less in dict.fromkeys((0, 1, value // 2, value - 1)):
            if abs(less) < abs(value):
                yield less
    elif isinstance(value, list):
        for length in dict.fromkeys((1, len(value) // 2, len(value) - 1)):
            if 0 < length < len(value):
                yield value[:length]
        plain = [1] * len(value)
        if value != plain and all(isinstance(item, int) for item in value):
            yield plain
