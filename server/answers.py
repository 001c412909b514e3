"""Generations in the API's shapes: chat and plain completions, whole or as a stream of chunks."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from leftfold.server.generation import Delta, Generation
from leftfold.server.scores import ChatScores, TextScores
from leftfold.server.streaming import EventStream, frame, until_gone


class Shape(Protocol):
    """How one route dresses its choices."""

    def head(self, index: int) -> dict[str, Any] | None:
        """The chunk's choice that opens a stream, if any."""

    def piece(self, delta: Delta) -> dict[str, Any]:
        """The chunk's choice for new text."""

    def whole(self, answer: Delta) -> dict[str, Any]:
        """The choice of an answer that is given at once: all its deltas in one."""

    def names(self) -> tuple[str, str, str]:
        """Prefix of the answer's id, object of an answer, object of a chunk."""


@dataclass(frozen=True, slots=True)
class ChatShape:
    """`/v1/chat/completions`. `scores`: how scores are shown, if they are wanted."""

    scores: ChatScores | None = None

    def names(self) -> tuple[str, str, str]:
        return "chatcmpl", "chat.completion", "chat.completion.chunk"

    def head(self, index: int) -> dict[str, Any] | None:
        return _chunk_choice(index, {"role": "assistant", "content": ""}, None)

    def piece(self, delta: Delta) -> dict[str, Any]:
        content = {"content": delta.text} if delta.text else {}
        logprobs = self.scores.shown(delta.scores) if self.scores is not None and delta.scores else None
        return _chunk_choice(delta.index, content, delta.finish_reason, logprobs)

    def whole(self, answer: Delta) -> dict[str, Any]:
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        logprobs = None if self.scores is None else self.scores.shown(answer.scores)
        reason = answer.finish_reason
        return {"index": answer.index, "message": message, "logprobs": logprobs, "finish_reason": reason}


@dataclass(frozen=True, slots=True)
class TextShape:
    """`/v1/completions`. `echoes[i]` is the text that comes before choice i (its prompt, or nothing).

    `scores[i]`: how the scores of choice i are shown, if they are wanted; an echo then waits for those of its tokens.
    """

    echoes: Sequence[str] = ()
    scores: Sequence[TextScores] = ()

    def names(self) -> tuple[str, str, str]:
        return "cmpl", "text_completion", "text_completion"

    def head(self, index: int) -> dict[str, Any] | None:
        return _text_choice(index, self.echoes[index], None) if self.echoes and not self.scores else None

    def piece(self, delta: Delta) -> dict[str, Any]:
        if not self.scores:
            return _text_choice(delta.index, delta.text, delta.finish_reason)
        shower = self.scores[delta.index]
        text = delta.text if shower.begun or not self.echoes else self.echoes[delta.index] + delta.text
        logprobs = shower.shown(delta.scores, delta.prompt_scores)
        return _text_choice(delta.index, text, delta.finish_reason, logprobs if logprobs["tokens"] else None)

    def whole(self, answer: Delta) -> dict[str, Any]:
        text = (self.echoes[answer.index] if self.echoes else "") + answer.text
        logprobs = self.scores[answer.index].shown(answer.scores, answer.prompt_scores) if self.scores else None
        return _text_choice(answer.index, text, answer.finish_reason, logprobs)


def _chunk_choice(index: int, delta: dict[str, Any], finish_reason: str | None, logprobs: Any = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _text_choice(index: int, text: str, finish_reason: str | None, logprobs: Any = None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _joined(index: int, deltas: Sequence[Delta]) -> Delta:
    """All deltas of a choice as one."""
    return Delta(
        index,
        "".join(delta.text for delta in deltas),
        next((delta.finish_reason for delta in deltas if delta.finish_reason), "length"),
        [score for delta in deltas for score in delta.scores],
        [score for delta in deltas for score in delta.prompt_scores],
    )


@dataclass
class Answer:
    """One answer to be: its generation, `count` choices, how they are dressed, and what every chunk repeats."""

    generation: Generation
    shape: Shape
    model: str
    count: int
    base: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        prefix, _, _ = self.shape.names()
        self.generation.id = f"{prefix}-{secrets.token_hex(12)}"
        self.base = {"id": self.generation.id, "created": int(time.time()), "model": self.model}

    async def whole(self, request: Request) -> dict[str, Any]:
        """The answer in one piece. Raises ApiError, and ClientGone if nobody waits for it any more."""
        try:
            return await until_gone(request, self._collect())
        finally:
            self.generation.close()

    async def stream(self, request: Request, include_usage: bool) -> Response:
        """The answer as server-sent events. Raises ApiError while a status can still carry it."""
        try:
            await until_gone(request, self.generation.begin())
        except BaseException:
            self.generation.close()
            raise
        return EventStream(self._chunks(include_usage), self.generation.close)

    async def _collect(self) -> dict[str, Any]:
        await self.generation.begin()
        deltas: list[list[Delta]] = [[] for _ in range(self.count)]
        async for delta in self.generation:
            deltas[delta.index].append(delta)
        _, kind, _ = self.shape.names()
        choices = [self.shape.whole(_joined(index, parts)) for index, parts in enumerate(deltas)]
        usage = self.generation.usage
        return {**self.base, **self._fingerprint(), "object": kind, "choices": choices, "usage": usage}

    def _fingerprint(self) -> dict[str, str]:
        """The version of the weights, once an update has named one."""
        return {"system_fingerprint": self.generation.version} if self.generation.version else {}

    async def _chunks(self, include_usage: bool) -> AsyncIterator[bytes]:
        _, _, kind = self.shape.names()
        base = {**self.base, "object": kind, **({"usage": None} if include_usage else {})}
        for index in range(self.count):
            if (head := self.shape.head(index)) is not None:
                yield frame({**base, "choices": [head]})
        async for delta in self.generation:
            yield frame({**base, **self._fingerprint(), "choices": [self.shape.piece(delta)]})
        if include_usage:
            yield frame({**base, **self._fingerprint(), "choices": [], "usage": self.generation.usage})
