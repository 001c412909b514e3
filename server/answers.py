"""Generations in the API's shapes: chat and plain completions, whole or as a stream of chunks."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from leftfold.server.admission import Job
from leftfold.server.generation import Delta, Generation
from leftfold.server.idempotency import Key
from leftfold.server.kept import Kept, Terms
from leftfold.server.reading import Cursor, Reading, place
from leftfold.server.scores import ChatScores, TextScores
from leftfold.server.state import ServerState
from leftfold.server.streaming import ClientGone, EventStream, frame, until_gone


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
    """`/v1/chat/completions`. `scores`: how scores are shown, if wanted; `token_ids`: tokens beside the text."""

    scores: ChatScores | None = None
    token_ids: bool = False

    def names(self) -> tuple[str, str, str]:
        return "chatcmpl", "chat.completion", "chat.completion.chunk"

    def head(self, index: int) -> dict[str, Any] | None:
        return _chunk_choice(index, {"role": "assistant", "content": ""}, None)

    def piece(self, delta: Delta) -> dict[str, Any]:
        content = {"content": delta.text} if delta.text else {}
        logprobs = self.scores.shown(delta.scores) if self.scores is not None and delta.scores else None
        return {**_chunk_choice(delta.index, content, delta.finish_reason, logprobs), **self._ids(delta)}

    def _ids(self, delta: Delta) -> dict[str, Any]:
        return {"token_ids": [*delta.tokens]} if self.token_ids else {}

    def whole(self, answer: Delta) -> dict[str, Any]:
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        logprobs = None if self.scores is None else self.scores.shown(answer.scores)
        reason = answer.finish_reason
        choice = {"index": answer.index, "message": message, "logprobs": logprobs, "finish_reason": reason}
        return {**choice, **self._ids(answer)}


@dataclass(frozen=True, slots=True)
class TextShape:
    """`/v1/completions`. `echoes[i]` is the text that comes before choice i (its prompt, or nothing).

    `scores[i]`: how the scores of choice i are shown, if they are wanted; an echo then waits for those of its tokens.
    """

    echoes: Sequence[str] = ()
    scores: Sequence[TextScores] = ()
    token_ids: bool = False

    def names(self) -> tuple[str, str, str]:
        return "cmpl", "text_completion", "text_completion"

    def head(self, index: int) -> dict[str, Any] | None:
        return _text_choice(index, self.echoes[index], None) if self.echoes and not self.scores else None

    def piece(self, delta: Delta) -> dict[str, Any]:
        if not self.scores:
            return {**_text_choice(delta.index, delta.text, delta.finish_reason), **self._ids(delta)}
        shower = self.scores[delta.index]
        text = delta.text if shower.begun or not self.echoes else self.echoes[delta.index] + delta.text
        logprobs = shower.shown(delta.scores, delta.prompt_scores)
        given = logprobs if logprobs["tokens"] else None
        return {**_text_choice(delta.index, text, delta.finish_reason, given), **self._ids(delta)}

    def _ids(self, delta: Delta) -> dict[str, Any]:
        return {"token_ids": [*delta.tokens]} if self.token_ids else {}

    def whole(self, answer: Delta) -> dict[str, Any]:
        text = (self.echoes[answer.index] if self.echoes else "") + answer.text
        logprobs = self.scores[answer.index].shown(answer.scores, answer.prompt_scores) if self.scores else None
        return {**_text_choice(answer.index, text, answer.finish_reason, logprobs), **self._ids(answer)}


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
        [token for delta in deltas for token in delta.tokens],
    )


PREFIXES: Mapping[str, str] = {"chat": "chatcmpl", "text": "cmpl", "response": "resp"}


def terms_of(job: Job, kind: str, **more: Any) -> Terms:
    """The terms of a new answer, under a new id."""
    base = secrets.token_hex(12)
    return Terms(
        id=f"{PREFIXES[kind]}-{base}" if kind != "response" else f"resp_{base}",
        base=base,
        kind=kind,
        created=int(time.time()),
        prompts=[len(prompt) for prompt in job.prompts],
        n=job.n,
        stops=job.stops,
        stop_ids=job.params.stop_token_ids,
        min_tokens=job.params.min_tokens,
        token_ids=job.token_ids,
        **more,
    )


def shape_of(terms: Terms) -> Shape:
    """How an answer is dressed of which nothing but its terms and tokens is there any more: no scores."""
    if terms.kind == "chat":
        return ChatShape(token_ids=terms.token_ids)
    return TextShape(terms.echoes, token_ids=terms.token_ids)


class Answer:
    """One answer to be: its generation, its terms, and how its choices are dressed, anew for every reader."""

    def __init__(self, state: ServerState, job: Job, terms: Terms, shape: Callable[[], Shape]) -> None:
        self._state = state
        self._terms = terms
        self._shape = shape
        self.generation = Generation(state, job, terms.background)
        self.generation.id, self.generation.base = terms.id, terms.base

    async def whole(self, request: Request) -> dict[str, Any]:
        """The answer in one piece. Raises ApiError, and ClientGone if nobody waits for it any more."""
        try:
            return await until_gone(request, self._collect())
        finally:
            self.generation.close()

    async def stream(self, request: Request) -> Response:
        """The answer as server-sent events, which can be read again. Raises ApiError while a status can carry it."""
        kept = await begin_kept(self._state, self.generation, self._terms, self._shape)
        try:
            await until_gone(request, self.generation.first())
        except ClientGone:
            self._part(kept)
            raise
        except BaseException:
            self.generation.close()
            self._state.shelf.drop(self._terms.id)
            raise
        frames = chunk_frames(self._terms, self._state.model_name, self._shape(), self.generation, None)
        return EventStream(frames, lambda: self._part(kept))

    async def begin_for(self, key: Key) -> Kept:
        """Begins it for all who ask under `key`, the first of them reading; it goes on by itself. Raises ApiError."""
        terms = dataclasses.replace(self._terms, key=key.name, body=key.body)
        kept = await begin_kept(self._state, self.generation, terms, self._shape)
        self._state.begin(self.generation.run())
        return kept

    def _part(self, kept: Kept) -> None:
        """The first reader, who also drives the generation, has come to the end or hung up."""
        kept.readers -= 1
        goes_on = kept.readers > 0 or self._state.options.on_disconnect == "continue"
        if goes_on and not kept.group.over:
            self._state.begin(self.generation.run())
        else:
            self.generation.close()

    async def _collect(self) -> dict[str, Any]:
        await self.generation.begin()
        deltas: list[list[Delta]] = [[] for _ in range(len(self._terms.prompts) * self._terms.n)]
        async for delta in self.generation:
            deltas[delta.index].append(delta)
        return _body(self._terms, self._state.model_name, self._shape(), deltas, self.generation)


def whole_of(state: ServerState, kept: Kept) -> dict[str, Any]:
    """A kept answer that has ended, in one piece. Raises the ApiError that ended it."""
    reading = Reading(kept, state.serving().tokenizer)
    deltas: list[list[Delta]] = [[] for _ in kept.group.choices]
    for delta in reading.there():
        deltas[delta.index].append(delta)
    shape = kept.shape() if kept.shape is not None else shape_of(kept.terms)
    return _body(kept.terms, state.model_name, shape, deltas, reading)


def _body(
    terms: Terms, model: str, shape: Shape, deltas: Sequence[Sequence[Delta]], source: Generation | Reading
) -> dict[str, Any]:
    _, kind, _ = shape.names()
    choices = [shape.whole(_joined(index, parts)) for index, parts in enumerate(deltas)]
    base = {"id": terms.id, "created": terms.created, "model": model, **_fingerprint(source)}
    return {**base, "object": kind, "choices": choices, "usage": source.usage}


async def begin_kept(
    state: ServerState, generation: Generation, terms: Terms, shape: Callable[[], Shape] | None = None
) -> Kept:
    """Begins a generation that can be read again, with one reader. Raises ApiError."""
    try:
        await state.shelf.announce(terms)
        generation.admit()
    except BaseException:
        state.shelf.drop(terms.id)
        raise
    kept = Kept(terms, generation.group, shape)
    kept.join()
    keep(state, kept)
    return kept


def keep(state: ServerState, kept: Kept) -> None:
    """On the shelf; what becomes of it when its last reader hangs up."""
    group = kept.group
    if state.options.on_disconnect == "abort" and not kept.terms.background:
        kept.leave = lambda: group.abort("client_gone")
    state.shelf.put(kept)


def _fingerprint(source: Generation | Reading) -> dict[str, str]:
    """The version of the weights, once an update has named one."""
    return {"system_fingerprint": source.version} if source.version else {}


async def chunk_frames(
    terms: Terms, model: str, shape: Shape, source: Generation | Reading, have: Cursor | None
) -> AsyncIterator[bytes]:
    """The events of a stream of chunks from a place on; each has the id of the place after it."""
    _, _, kind = shape.names()
    usage = {"usage": None} if terms.include_usage else {}
    base = {"id": terms.id, "created": terms.created, "model": model, "object": kind, **usage}
    count = len(terms.prompts) * terms.n
    heads = [head for index in range(count) if (head := shape.head(index)) is not None]
    at = list(have or [0] * count)
    for number, head in enumerate(heads if have is None else ()):
        yield frame({**base, "choices": [head]}, _id(terms, at) if number == count - 1 else None)
    async for delta in source:
        piece = shape.piece(delta)
        if delta.at > at[delta.index]:
            at[delta.index] = delta.at
            yield frame({**base, **_fingerprint(source), "choices": [piece]}, _id(terms, at))
    if terms.include_usage:
        yield frame({**base, **_fingerprint(source), "choices": [], "usage": source.usage})


def _id(terms: Terms, at: Cursor) -> str | None:
    return place(at) if terms.include_ids else None
