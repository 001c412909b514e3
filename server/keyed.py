"""Answers of completions and chats, each made once: for the one who asks, or for all who ask under the same key."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from leftfold.server.answers import Answer, chunk_frames, shape_of, whole_of
from leftfold.server.bodies import json_response, server_state
from leftfold.server.errors import ApiError, engine_error, stopping, too_late
from leftfold.server.generation import FIRST_OUTPUT_SECONDS
from leftfold.server.idempotency import key_of, marked
from leftfold.server.kept import Kept
from leftfold.server.reading import Reading
from leftfold.server.state import ServerState
from leftfold.server.streaming import EventStream, until_gone


async def answered(request: Request, data: Any, stream: bool, make: Callable[[], Awaitable[Answer]]) -> Response:
    """The answer to a request whose body says `data`. `make`: what is asked, read once. Raises ApiError, ClientGone."""
    state = server_state(request)
    key = key_of(request, data, state.options)
    if key is None:
        answer = await make()
        return await answer.stream(request) if stream else json_response(await answer.whole(request))
    async with state.turns.turn(key) as found:
        if found is None:
            kept = await (await make()).begin_for(key)
        else:
            kept = found
            kept.join()
    give = _stream if stream else _whole
    return marked(await give(request, state, kept), found is not None)


async def _stream(request: Request, state: ServerState, kept: Kept) -> Response:
    """From its beginning, what is yet to come included; whoever reads it, it is made by itself."""
    try:
        await until_gone(request, hear_first(state, kept))
    except BaseException:
        kept.part()
        raise
    shape = kept.shape() if kept.shape is not None else shape_of(kept.terms)
    reading = Reading(kept, state.serving().tokenizer)
    return EventStream(chunk_frames(kept.terms, state.model_name, shape, reading, None), kept.part)


async def _whole(request: Request, state: ServerState, kept: Kept) -> Response:
    try:
        await until_gone(request, kept.group.ended())
    finally:
        kept.part()
    refuse(state, kept)
    return json_response(whole_of(state, kept))


async def hear_first(state: ServerState, kept: Kept) -> None:
    """Waits a while for the first output. Raises the ApiError if it says that there is no answer."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(kept.group.begun(), FIRST_OUTPUT_SECONDS)
    refuse(state, kept)


def refuse(state: ServerState, kept: Kept) -> None:
    """Raises the ApiError of an answer that ended without a token; there is nothing of it to keep."""
    error = _refusal(state, kept)
    if error is not None:
        state.shelf.drop(kept.terms.id)
        raise error


def _refusal(state: ServerState, kept: Kept) -> ApiError | None:
    choices = kept.group.choices
    ends = [choice.end for choice in choices if choice.end is not None]
    if any(choice.tokens for choice in choices):
        return None
    for end in ends:
        if end.error is not None or end.finish_reason == "error":
            return engine_error(end.error)
    reasons = {end.finish_reason for end in ends}
    if "deadline" in reasons:
        return too_late()
    return stopping() if "abort" in reasons and not state.ready else None


__all__ = ["answered", "hear_first"]
