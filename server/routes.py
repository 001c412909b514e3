"""The routes: OpenAI's, tokenization, models, health and metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from leftfold.server.admission import Job, chat_job, chat_prompt, check_token_ids, completion_job
from leftfold.server.answers import Answer, ChatShape, TextShape, chunk_frames, shape_of, terms_of
from leftfold.server.bodies import documented, installed_version, json_response, read_body, server_state
from leftfold.server.errors import ApiError, invalid, unavailable
from leftfold.server.group import EngineGone
from leftfold.server.idempotency import KEYED
from leftfold.server.keyed import answered
from leftfold.server.openai_types import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, parse_body
from leftfold.server.reading import Reading, cursor, within
from leftfold.server.scores import ChatScores, TextScores
from leftfold.server.state import ServerState
from leftfold.server.streaming import EventStream

router = APIRouter()
_MOST_DECODED = 2**18


@router.post("/v1/chat/completions", openapi_extra={**documented(ChatBody), **KEYED})
async def chat_completions(request: Request) -> Response:
    state = server_state(request)
    data = await read_body(request)
    body = parse_body(ChatBody, data)
    state.check_model(body.model)

    async def make() -> Answer:
        job = await chat_job(body, state.serving(), state.options.max_n)
        tokenizer = state.serving().tokenizer
        terms = terms_of(job, "chat", include_usage=body.include_usage, include_ids=body.include_ids)
        scored, token_ids = body.logprobs, job.token_ids  # all that is kept of the request for as long as its answer
        return Answer(state, job, terms, lambda: ChatShape(ChatScores(tokenizer) if scored else None, token_ids))

    return await answered(request, data, body.stream, make)


@router.post("/v1/completions", openapi_extra={**documented(CompletionBody), **KEYED})
async def completions(request: Request) -> Response:
    state = server_state(request)
    data = await read_body(request)
    body = parse_body(CompletionBody, data)
    state.check_model(body.model)

    async def make() -> Answer:
        job = await completion_job(body, state.serving(), state.options.max_n)
        echoes = await _echoes(state, body.prompt, job.n) if body.echo else []
        terms = terms_of(job, "text", echoes=echoes, include_usage=body.include_usage, include_ids=body.include_ids)
        scores = partial(_text_scores, state, job, echoes) if body.logprobs is not None else tuple
        return Answer(state, job, terms, partial(_text_shape, echoes, scores, job.token_ids))

    return await answered(request, data, body.stream, make)


@router.get("/v1/streams/{name}")
async def read_again(request: Request, name: str) -> Response:
    """A stream of chunks from the place that `from` (or `Last-Event-ID`) names; without one from its beginning."""
    state = server_state(request)
    kept = state.shelf.get(name)
    if kept is None or kept.terms.kind == "response":
        raise ApiError(404, f"no stream {name[:80]!r} is kept here", param="id", code="stream_not_found")
    asked = request.query_params.get("from")
    given = request.headers.get("last-event-id") if asked is None else asked
    have = cursor(given, len(kept.group.choices), "from")
    within(have, kept, "from")
    reading = Reading(kept, state.serving().tokenizer, have)
    shape = kept.shape() if kept.shape is not None else shape_of(kept.terms)
    kept.join()
    return EventStream(chunk_frames(kept.terms, state.model_name, shape, reading, have), kept.part)


def _text_shape(echoes: Sequence[str], scores: Callable[[], Sequence[TextScores]], token_ids: bool) -> TextShape:
    """`scores` holds on to the prompts where they are wanted; nothing else does for as long as the answer is kept."""
    return TextShape(echoes, scores(), token_ids)


def _text_scores(state: ServerState, job: Job, echoes: Sequence[str]) -> list[TextScores]:
    """One per choice."""
    tokenizer, prompts = state.serving().tokenizer, [prompt for prompt in job.prompts for _ in range(job.n)]
    return [TextScores(tokenizer, prompt, echoes[i] if echoes else None) for i, prompt in enumerate(prompts)]


async def _echoes(state: ServerState, prompts: Sequence[str | list[int]], n: int) -> list[str]:
    """The text of each choice's prompt."""
    decode = state.serving().texts.decode
    texts = [prompt if isinstance(prompt, str) else await decode(prompt) for prompt in prompts]
    return [text for text in texts for _ in range(n)]


@router.get("/v1/models")
async def models(request: Request) -> Response:
    return json_response({"object": "list", "data": [_model(server_state(request))]})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    server_state(request).check_model(name)
    return json_response(_model(server_state(request)))


def _model(state: ServerState) -> dict[str, Any]:
    return {
        "id": state.model_name,
        "object": "model",
        "created": state.created,
        "owned_by": "leftfold",
        "root": state.options.model,
        "parent": None,
        "max_model_len": state.serving().max_model_len,
    }


@router.post("/tokenize", openapi_extra=documented(TokenizeBody))
async def tokenize(request: Request) -> Response:
    state = server_state(request)
    body = parse_body(TokenizeBody, await read_body(request))
    state.check_model(body.model)
    service = state.serving()
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "give either prompt or messages", body.prompt)
    if body.messages is not None:
        tokens = await chat_prompt(body.messages, service, body.add_generation_prompt)
    else:
        texts, special = service.texts, body.add_special_tokens
        tokens = await texts.encode(body.prompt or "", service.max_prompt_len, "prompt", add_special_tokens=special)
    return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": service.max_model_len})


@router.post("/detokenize", openapi_extra=documented(DetokenizeBody))
async def detokenize(request: Request) -> Response:
    state = server_state(request)
    body = parse_body(DetokenizeBody, await read_body(request))
    state.check_model(body.model)
    most = max(_MOST_DECODED, state.serving().max_model_len)
    if len(body.tokens) > most:
        raise invalid("tokens", f"at most {most} token ids", body.tokens)
    check_token_ids(body.tokens, state.serving(), "tokens")
    return json_response({"prompt": await state.serving().texts.decode(body.tokens, skip_special_tokens=False)})


@router.get("/health")
async def health(request: Request) -> Response:
    """Alive: 200 while the process and its engine live, loading and long steps included."""
    state = server_state(request)
    status = 200 if state.alive else 503
    return json_response({"status": state.phase}, status, {"x-leftfold-state": state.phase})


@router.get("/ready")
async def ready(request: Request) -> Response:
    """Takes work: 200 only then (the gate answers 503 in every other phase)."""
    state = server_state(request)
    state.check_awake()
    return json_response({"status": state.phase})


@router.get("/version")
async def read_version(request: Request) -> Response:
    return json_response({"version": installed_version()})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Gauges are asked of the engine now; before it is ready, and when it is gone, they keep their last value."""
    state = server_state(request)
    if state.service is not None and state.alive:
        try:
            state.metrics.observe_engine(await state.service.engine.stats())
        except TimeoutError as error:
            raise unavailable("the engine does not answer") from error
        except EngineGone:
            pass
    return Response(state.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")
