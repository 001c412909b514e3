"""Answers that can be read again: what they were asked with, what has come of them, and for how long they are kept."""

from __future__ import annotations

import dataclasses
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from leftfold.server.group import Group

if TYPE_CHECKING:
    from leftfold.server.answer_file import AnswerFile

MOST_ANSWERS = 2**14
MOST_TOKENS = 2**24
"""Of answers that have ended: more are dropped, the oldest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What an answer's text and form follow from, beside its tokens. Plain data, so that it can lie in a file.

    `base`: of the ids that the engine knows it by. `kind`: "chat", "text" or "response". `prompts`: tokens of each
    prompt. `echoes`: texts that come before the choices. `response`: what a response object repeats of its request.
    `key`, `body`: digests of the client's own name for it and of what it asked (see idempotency.py), "" without one.
    """

    id: str
    base: str
    kind: str
    created: int
    prompts: Sequence[int]
    n: int = 1
    stops: Sequence[str] = ()
    stop_ids: Sequence[int] = ()
    min_tokens: int = 0
    echoes: Sequence[str] = ()
    include_usage: bool = False
    include_ids: bool = True
    token_ids: bool = False
    response: Mapping[str, Any] | None = None
    key: str = ""
    body: str = ""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def background(self) -> bool:
        """Whether it goes on whoever listens, across stops of the server as well."""
        return bool((self.response or {}).get("background"))


class Kept:
    """One answer. `shape`: how its choices are dressed, anew for each reader; None: from the terms alone."""

    def __init__(self, terms: Terms, group: Group, shape: Callable[[], Any] | None = None) -> None:
        self.terms = terms
        self.group = group
        self.shape = shape
        self.ended_at: float | None = None
        self.readers = 0
        self.leave: Callable[[], None] = lambda: None
        """What to do when the last of those who read has gone and it has not ended."""

    @property
    def tokens(self) -> int:
        return sum(len(choice.tokens) for choice in self.group.choices)

    @property
    def void(self) -> bool:
        """Whether this is no answer, nor will be one: it was aborted, failed, or ended without a token at its deadline.

        Who asks for it again under its key asks anew.
        """
        group = self.group
        if group.gone is not None or (group.aborted and not group.over):
            return True
        ends = {choice.end.finish_reason for choice in group.choices if choice.end is not None}
        if "deadline" in ends and not any(choice.tokens for choice in group.choices):
            return True
        return not ends.isdisjoint(("abort", "error"))

    def join(self) -> None:
        """Somebody reads."""
        self.readers += 1

    def part(self) -> None:
        """Somebody does not read any more."""
        self.readers -= 1
        if self.readers == 0 and not self.group.over:
            self.leave()


class Shelf:
    """All answers that can be read again, for `seconds` after their end; `file`: where they outlive the process."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.time) -> None:
        self._seconds = seconds
        self._clock = clock
        self._answers: dict[str, Kept] = {}
        self._ended: OrderedDict[str, Kept] = OrderedDict()
        self._keys: dict[str, str] = {}  # by the digests of clients' keys: the answer's id
        self._tokens = 0
        self.file: AnswerFile | None = None

    async def announce(self, terms: Terms) -> None:
        """Before the engine hears of it, so that what it does can be found again."""
        if self.file is not None:
            await self.file.opened(terms)

    def put(self, kept: Kept, ended_at: float | None = None) -> None:
        """Keeps an answer; `ended_at`: of one that an earlier process has kept to its end."""
        self.sweep()
        self._answers[kept.terms.id] = kept
        if kept.terms.key and self.asked(kept.terms.key) is None:
            self._keys[kept.terms.key] = kept.terms.id
        if ended_at is not None:
            self._end(kept, ended_at)
        elif kept.group.over:
            self._over(kept)
        else:
            kept.group.on_end = lambda: self._over(kept)

    def get(self, name: str) -> Kept | None:
        self.sweep()
        return self._answers.get(name)

    def asked(self, key: str) -> Kept | None:
        """The answer that was asked for under `key`, if there is one."""
        kept = self.get(self._keys.get(key, ""))
        return None if kept is None or kept.void else kept

    def drop(self, name: str) -> None:
        """It cannot be read again, nor found by a later process if it was only announced."""
        kept = self._remove(name)
        if kept is not None:
            kept.group.on_end = lambda: None
            if self._ended.pop(name, None) is not None:
                self._tokens -= kept.tokens
        if self.file is not None:
            self.file.dropped(name)

    def sweep(self) -> None:
        """Drop what was kept long enough, and the oldest of what is too much."""
        until = self._clock() - self._seconds
        while self._ended:
            name, kept = next(iter(self._ended.items()))
            crowded = len(self._ended) > MOST_ANSWERS or self._tokens > MOST_TOKENS
            if not crowded and (kept.ended_at or 0.0) > until:
                return
            del self._ended[name]
            self._remove(name)
            self._tokens -= kept.tokens
            if self.file is not None:
                self.file.forgotten(name)

    def _remove(self, name: str) -> Kept | None:
        kept = self._answers.pop(name, None)
        if kept is not None and self._keys.get(kept.terms.key) == name:
            del self._keys[kept.terms.key]
        return kept

    def _over(self, kept: Kept) -> None:
        now = self._clock()
        self._end(kept, now)
        if self.file is not None:
            self.file.ended(kept, now)

    def _end(self, kept: Kept, at: float) -> None:
        kept.ended_at = at
        self._ended[kept.terms.id] = kept
        self._tokens += kept.tokens


__all__ = ["Kept", "Shelf", "Terms"]
