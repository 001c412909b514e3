"""`/v1/responses`: answers with a name, made in the background if asked, read while they come and again later."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from leftfold.server.admission import chat_job
from leftfold.server.answers import begin_kept, terms_of
from leftfold.server.bodies import documented, json_response, read_body, server_state
from leftfold.server.errors import ApiError, invalid
from leftfold.server.generation import Delta, Generation, gone_error
from leftfold.server.group import EngineGone
from leftfold.server.idempotency import KEYED, Key, key_of, marked
from leftfold.server.kept import Kept, Terms
from leftfold.server.keyed import hear_first
from leftfold.server.openai_types import parse_body
from leftfold.server.reading import Reading
from leftfold.server.response_types import ResponseBody, chat_of, place_of
from leftfold.server.state import ServerState
from leftfold.server.streaming import EventStream, frame, until_gone

responses = APIRouter(tags=["responses"])
_HEADS = 4
"""Events before the first text; the event after which a reader has k tokens has the number _HEADS - 1 + k."""
_SAID = {"true": True, "1": True, "false": False, "0": False}
"""What `stream` may be in a query."""


@responses.post("/v1/responses", openapi_extra={**documented(ResponseBody), **KEYED})
async def create(request: Request) -> Response:
    state = server_state(request)
    data = await read_body(request)
    body = parse_body(ResponseBody, data)
    state.check_model(body.model)
    key = key_of(request, data, state.options)
    if key is None:
        return await _answer(request, state, body, await _begin(state, body, None))
    async with state.turns.turn(key) as found:
        kept = found or await _begin(state, body, key)
        if found is not None:
            kept.join()
    return marked(await _answer(request, state, body, kept), found is not None)


async def _begin(state: ServerState, body: ResponseBody, key: Key | None) -> Kept:
    """It is made by itself from here on, with one reader. Raises ApiError."""
    job = await chat_job(chat_of(body), state.serving(), state.options.max_n, place_of(body))
    named = {} if key is None else {"key": key.name, "body": key.body}
    terms = terms_of(job, "response", response=_asked(body, job.params.temperature), **named)
    generation = Generation(state, job, body.background)
    generation.id, generation.base = terms.id, terms.base
    kept = await begin_kept(state, generation, terms)
    state.begin(_run(state, generation, kept, body.store))
    return kept


async def _answer(request: Request, state: ServerState, body: ResponseBody, kept: Kept) -> Response:
    """For one reader, who reads until it ends; or as it is now, if it is made in the background."""
    reads = False
    try:
        if body.background:
            await _confirmed(state, kept)
        else:
            await until_gone(request, hear_first(state, kept) if body.stream else kept.group.ended())
        reads = body.stream
    finally:
        if not reads:
            kept.part()
    return _stream(state, kept, None) if body.stream else json_response(_whole(state, kept))


async def _confirmed(state: ServerState, kept: Kept) -> None:
    """What is acknowledged is in the log."""
    try:
        await state.serving().engine.confirm(kept.group)
    except EngineGone as gone:
        raise gone_error(gone) from gone


async def _run(state: ServerState, generation: Generation, kept: Kept, store: bool) -> None:
    await generation.run()
    if not store:
        state.shelf.drop(kept.terms.id)


@responses.get("/v1/responses/{name}")
async def retrieve(request: Request, name: str) -> Response:
    """The response as it is now; with `stream=true` its events, those after number `starting_after` alone."""
    state, kept = _found(request, name)
    query = request.query_params
    stream = _SAID.get(query.get("stream", "false").lower())
    if stream is None:
        raise invalid("stream", "must be true or false", query["stream"])
    if not stream:
        return json_response(_whole(state, kept))
    after = query.get("starting_after", request.headers.get("last-event-id"))
    if after is not None and not (after.isascii() and after.isdigit() and len(after) < 10):
        raise invalid("starting_after", "must be the number of an event", after)
    kept.join()
    return _stream(state, kept, None if after is None else int(after))


@responses.post("/v1/responses/{name}/cancel")
async def cancel(request: Request, name: str) -> Response:
    """End a response that is made in the background; one that has ended stays as it is."""
    state, kept = _found(request, name)
    if not kept.terms.background:
        raise invalid("id", "only a background response can be cancelled; hang up to end another", name)
    kept.group.abort("cancelled")
    await until_gone(request, kept.group.ended())
    return json_response(_whole(state, kept))


@responses.delete("/v1/responses/{name}")
async def delete(request: Request, name: str) -> Response:
    """Forget a response, and end it if it is still being made."""
    state, kept = _found(request, name)
    kept.group.abort("deleted")
    state.shelf.drop(name)
    return json_response({"id": name, "object": "response", "deleted": True})


def _found(request: Request, name: str) -> tuple[ServerState, Kept]:
    state = server_state(request)
    kept = state.shelf.get(name)
    if kept is None or kept.terms.kind != "response":
        raise ApiError(404, f"no response {name[:80]!r} is kept here", param="id", code="response_not_found")
    return state, kept


def _stream(state: ServerState, kept: Kept, after: int | None) -> Response:
    return EventStream(_events(state, kept, after), kept.part, last=b"")


def _asked(body: ResponseBody, temperature: float) -> Mapping[str, Any]:
    """What a response object repeats of its request."""
    return {
        "background": body.background,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "store": body.store,
        "temperature": temperature,
        "top_p": body.top_p,
    }


def _object(state: ServerState, terms: Terms, status: str, text: str | None, more: Mapping[str, Any]) -> dict[str, Any]:
    output = [] if text is None else [_item(terms, "completed" if status == "completed" else "incomplete", text)]
    return {
        "id": terms.id, "object": "response", "created_at": terms.created, "status": status, "model": state.model_name,
        **(terms.response or {}), "output": output, "error": None, "incomplete_details": None,
        "parallel_tool_calls": False, "previous_response_id": None, "reasoning": {"effort": None, "summary": None},
        "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [], "truncation": "disabled",
        "usage": None, "user": None, **more,
    }  # fmt: skip


def _item(terms: Terms, status: str, text: str | None) -> dict[str, Any]:
    content = [] if text is None else [_part(text)]
    return {"id": f"msg_{terms.base}", "type": "message", "role": "assistant", "status": status, "content": content}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


def _whole(state: ServerState, kept: Kept) -> dict[str, Any]:
    """The response as it is now."""
    reading = Reading(kept, state.serving().tokenizer)
    try:
        text, reason = "", None
        for delta in reading.there():
            text, reason = text + delta.text, delta.finish_reason or reason
    except ApiError as error:
        return _failed(state, kept.terms, error)
    if reason is None:
        begun = bool(kept.group.choices[0].tokens)
        return _object(state, kept.terms, "in_progress" if begun else "queued", text or None, {})
    return _ended(state, kept, reason, text, reading.usage)


def _ended(state: ServerState, kept: Kept, reason: str, text: str, usage: Mapping[str, Any]) -> dict[str, Any]:
    end = kept.group.choices[0].end
    aborted = end is not None and end.finish_reason == "abort" and reason != "stop"
    status = "completed" if reason == "stop" else "cancelled" if aborted else "incomplete"
    details = {"reason": "max_output_tokens"} if status == "incomplete" else None
    return _object(state, kept.terms, status, text, {"usage": _usage(usage), "incomplete_details": details})


def _failed(state: ServerState, terms: Terms, error: ApiError) -> dict[str, Any]:
    return _object(state, terms, "failed", None, {"error": {"code": "server_error", "message": error.message}})


async def _events(state: ServerState, kept: Kept, after: int | None) -> AsyncIterator[bytes]:
    """The events after number `after`. Numbers follow from the tokens, so that they are the same in every reading."""
    terms, item = kept.terms, {"item_id": f"msg_{kept.terms.base}", "output_index": 0}
    piece = {**item, "content_index": 0}

    def event(kind: str, number: int, **fields: Any) -> bytes:
        name = f"response.{kind}"
        return frame({"type": name, "sequence_number": number, **fields}, str(number), name)

    begun = _object(state, terms, "in_progress", None, {})
    heads = [
        event("created", 0, response=begun),
        event("in_progress", 1, response=begun),
        event("output_item.added", 2, output_index=0, item=_item(terms, "in_progress", None)),
        event("content_part.added", 3, **piece, part=_part("")),
    ]
    last = -1 if after is None else after
    for head in heads[last + 1 :]:
        yield head
    reading = Reading(kept, state.serving().tokenizer, [max(0, last - _HEADS + 1)])
    text, delta = "", Delta(0, "")
    try:
        async for delta in reading:
            text += delta.text
            tokens = reading.usage["completion_tokens"]
            if delta.text and (number := _HEADS - 1 + tokens) > last:
                yield event("output_text.delta", number, **piece, delta=delta.text, logprobs=[])
    except ApiError as error:
        yield event("failed", _HEADS + len(kept.group.choices[0].tokens), response=_failed(state, terms, error))
        return
    number = _HEADS + reading.usage["completion_tokens"]
    ended = _ended(state, kept, delta.finish_reason or "length", text, reading.usage)
    done = _item(terms, ended["output"][0]["status"], text)
    kind = ended["status"] if ended["status"] in ("completed", "incomplete") else "incomplete"
    tail = [
        event("output_text.done", number, **piece, text=text, logprobs=[]),
        event("content_part.done", number + 1, **piece, part=_part(text)),
        event("output_item.done", number + 2, output_index=0, item=done),
        event(kind, number + 3, response=ended),
    ]
    for place, one in enumerate(tail, number):
        if place > last:
            yield one


__all__ = ["responses"]
