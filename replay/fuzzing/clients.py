"""What each client must hear: a pure function of its request, whatever happens around it."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from leftfold.events import SamplingParams
from leftfold.fsm import FinishReason, Output
from leftfold.fsm.effects import LENGTH, STOP
from leftfold.replay.fuzzing.errors import Violation

Key = tuple[str, int, int]
"""rid, epoch and choice."""


class Client:
    """One choice of an admitted request, seen from outside.

    `tokens`: what the oracle says it gets (int ids, from the first generated one); `heard`: how many came; `limit`:
    tokens, prompt included, at which it ends; `serial`: how many were admitted before; `deadline_at`,
    `queue_deadline_at`: absolute µs, 0 for none; `priority`, `tenant`, `salt`, `cache`: as it asked.
    """

    __slots__ = (
        "cache", "deadline_at", "failures", "heard", "key", "limit", "min_tokens", "priority", "prompt", "prompt_len",
        "queue_deadline_at", "salt", "serial", "stops", "tenant", "tokens",
    )  # fmt: skip

    def __init__(
        self, key: Key, serial: int, prompt: Sequence[int], tokens: Sequence[int], params: SamplingParams, limit: int
    ) -> None:
        self.key = key
        self.serial = serial
        self.prompt = prompt
        self.prompt_len = len(prompt)
        self.tokens = tokens
        self.heard = 0
        self.stops = frozenset(params.stop_token_ids)
        self.min_tokens = params.min_tokens
        self.limit = limit
        self.deadline_at = 0
        self.queue_deadline_at = 0
        self.failures = 0
        self.priority = 0
        self.tenant = self.salt = ""
        self.cache = "use"

    @property
    def known(self) -> int:
        """Tokens it has, its prompt included."""
        return self.prompt_len + self.heard

    @property
    def context(self) -> list[int]:
        """Its prompt and all that it gets; of that, `known` tokens are there."""
        return [*self.prompt, *self.tokens]

    @property
    def ends_next(self) -> bool:
        """Whether the next token it gets is its last one."""
        heard = self.heard + 1
        stopped = self.tokens[self.heard] in self.stops and heard >= self.min_tokens
        return stopped or self.prompt_len + heard >= self.limit

    def due(self) -> int:
        """The next of its deadlines (0: none)."""
        if not self.deadline_at or not self.queue_deadline_at:
            return self.deadline_at or self.queue_deadline_at
        return min(self.deadline_at, self.queue_deadline_at)

    def hear_token(self, position: int, token: int) -> FinishReason | None:
        """Take a token that came; why it must be the last one, None if it must not. Raises `Violation`."""
        heard = self.heard
        if position != self.prompt_len + heard:
            raise Violation("order", f"{self.key} heard position {position}, expected {self.known}")
        if token != self.tokens[heard]:
            expected = self.tokens[heard]
            raise Violation("wrong-token", f"{self.key} heard {token} at position {position}, expected {expected}")
        self.heard = heard = heard + 1
        if token in self.stops and heard >= self.min_tokens:
            return STOP
        return LENGTH if position + 1 >= self.limit else None

    def check_usage(self, output: Output, counted: int) -> None:
        """A terminal output counts what was heard, and never as cached what had to be computed."""
        usage = output.usage
        if usage is None or usage[:2] != (self.prompt_len, counted) or not 0 <= usage.cached_tokens < self.prompt_len:
            raise Violation("usage", f"{self.key} ended with {usage}, expected {self.prompt_len} and {counted}")

    def save(self) -> tuple[Any, ...]:
        """What changes as it hears; for `restore`."""
        return _changing(self)

    def restore(self, saved: tuple[Any, ...]) -> None:
        """Know again what was known when `saved` was made."""
        for name, value in zip(_CHANGING, saved, strict=True):
            setattr(self, name, value)


_CHANGING = ("tokens", "heard", "limit", "deadline_at", "queue_deadline_at", "failures")
_changing = attrgetter(*_CHANGING)
