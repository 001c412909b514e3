"""Reading an answer from any place on: its tokens become the same text again, and what comes yet follows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from leftfold.server.choices import Choice
from leftfold.server.errors import engine_error, invalid
from leftfold.server.generation import FINISH_REASONS, Delta, gone_error, usage_of
from leftfold.server.kept import Kept
from leftfold.text import AnswerText, Tokenizer

Cursor = Sequence[int]
"""How much of each choice a reader has: tokens, and one more for the end."""


class Reading:
    """Iterate for all of an answer, until it ends; what a reader has comes in one piece. Raises its ApiError."""

    def __init__(self, kept: Kept, tokenizer: Tokenizer, have: Cursor | None = None) -> None:
        terms = kept.terms
        self._kept = kept
        self._news = asyncio.Event()
        choices = kept.group.choices
        self._parts = [
            _Part(i, choice, AnswerText(tokenizer, terms.stops, terms.stop_ids, terms.min_tokens), has)
            for i, (choice, has) in enumerate(zip(choices, have or [0] * len(choices), strict=True))
        ]

    @property
    def usage(self) -> dict[str, Any]:
        """Token counts so far, in the API's form."""
        terms = self._kept.terms
        cached = [int(((c.end and c.end.usage) or {}).get("cached_tokens") or 0) for c in self._kept.group.choices]
        return usage_of(sum(terms.prompts), sum(part.text.tokens for part in self._parts), sum(cached[:: terms.n]))

    @property
    def version(self) -> str:
        """Of the weights that the last tokens came from."""
        return next((choice.version for choice in reversed(self._kept.group.choices) if choice.version), "")

    def there(self) -> Iterator[Delta]:
        """What there is now, without waiting for more. Raises the ApiError that ended it."""
        for part in self._parts:
            yield from part.deltas()
        if self._kept.group.gone is not None and not all(part.done for part in self._parts):
            raise gone_error(self._kept.group.gone)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        group = self._kept.group
        group.listeners.append(self._news.set)
        try:
            while True:
                self._news.clear()
                for part in self._parts:
                    for delta in part.deltas():
                        yield delta
                if all(part.done for part in self._parts):
                    await group.ended()  # after a stop string the end is yet to come, with its counts
                    return
                if group.gone is not None:
                    raise gone_error(group.gone)
                await self._news.wait()
        finally:
            group.listeners.remove(self._news.set)


class _Part:
    """One choice of a reader: `has` of it was read elsewhere, `taken` tokens are in the text."""

    def __init__(self, index: int, choice: Choice, text: AnswerText, has: int) -> None:
        self._index = index
        self._choice = choice
        self._has = has
        self._taken = 0
        self._shown_scores = 0
        self.text = text
        self.done = False

    def deltas(self) -> Iterator[Delta]:
        """What is new since the last time."""
        choice, end = self._choice, self._choice.end
        if self.done:
            return
        if end is not None and end.error is not None:
            self.done = True
            raise engine_error(end.error)
        there = len(choice.tokens)
        if self._taken < min(self._has, there):
            yield from self._step(min(self._has, there), end is not None and self._has > there)
        if not self.done and self._taken >= min(self._has, there) and (there > self._taken or end is not None):
            yield from self._step(there, end is not None)

    def _step(self, upto: int, over: bool) -> Iterator[Delta]:
        choice, counted = self._choice, self.text.tokens
        reason = choice.end.finish_reason if over and choice.end is not None else None
        text = self.text.take(choice.tokens[self._taken : upto].tolist(), reason)
        self._taken = upto
        self.done = self.text.reason is not None
        at = self.text.tokens + self.done
        tokens = choice.tokens[counted : self.text.tokens].tolist()
        scores = [s for s in choice.scores[self._shown_scores :] if s.position < choice.first + self.text.tokens]
        self._shown_scores += len(scores)
        drawn = [score for score in scores if score.position >= choice.first]
        prompt = [score for score in scores if score.position < choice.first]
        said = FINISH_REASONS[self.text.reason] if self.text.reason is not None else None
        yield Delta(self._index, text, said, drawn, prompt, tokens, at)


def cursor(text: str | None, count: int, param: str) -> Cursor | None:
    """A place in a stream of `count` choices from its id: `7`, or `7.3.9`. Raises a 400 ApiError."""
    if text is None or text == "":
        return None
    parts = text.split(".")
    if len(parts) != count or not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        form = "a number" if count == 1 else f"{count} numbers with dots between them"
        raise invalid(param, f"must be an id of this stream, {form}", text)
    return [int(part) for part in parts]


def within(have: Cursor | None, kept: Kept, param: str) -> None:
    """Raises a 400 ApiError for a place behind the end of a choice that has ended.

    One that goes on may yet come to it: what a reader had may be drawn again after a crash.
    """
    for choice, has in zip(kept.group.choices, have or (), strict=False):
        if choice.end is not None and has > len(choice.tokens) + 1:
            end = len(choice.tokens) + 1
            raise invalid(param, f"is behind the end of this stream, which is {end}", place(have or ()))


def place(have: Cursor) -> str:
    """The id of a place."""
    return ".".join(map(str, have))


__all__ = ["Cursor", "Reading", "cursor", "place", "within"]
