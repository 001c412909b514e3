"""The routes: OpenAI's, tokenization, models, health and metrics."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import orjson
from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from leftfold.server.admission import chat_job, check_token_ids, completion_job, render_messages
from leftfold.server.answers import Answer, ChatShape, TextShape
from leftfold.server.client import EngineGone
from leftfold.server.errors import ApiError, invalid, unavailable
from leftfold.server.generation import Generation
from leftfold.server.openai_types import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, parse_body
from leftfold.server.state import ServerState

router = APIRouter()


def json_response(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """JSON, as orjson writes it."""
    return Response(orjson.dumps(data), status, headers, media_type="application/json")


def _state(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


def _documented(kind: type[BaseModel]) -> dict[str, Any]:
    """The body's schema for `/docs` (the body itself is read by `_body`, for errors in OpenAI's form)."""
    return {"requestBody": {"content": {"application/json": {"schema": kind.model_json_schema()}}, "required": True}}


async def _body(request: Request) -> Any:
    limit = _state(request).options.max_body_bytes
    declared = request.headers.get("content-length", "0")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "a compressed body is not read; send it plain", param="content-encoding")
    data = bytearray()
    too_big = declared.isdigit() and int(declared) > limit
    async for piece in request.stream():
        too_big = too_big or len(data) + len(piece) > limit
        if too_big:
            raise ApiError(413, f"body: has more than {limit} bytes", param="body", code="body_too_large")
        data += piece
    try:
        return orjson.loads(bytes(data))
    except orjson.JSONDecodeError as error:
        raise invalid("body", f"is not valid JSON ({error})", bytes(data[:60]).decode(errors="replace")) from error


@router.post("/v1/chat/completions", openapi_extra=_documented(ChatBody))
async def chat_completions(request: Request) -> Response:
    state = _state(request)
    body = parse_body(ChatBody, await _body(request))
    state.check_model(body.model)
    job = await chat_job(body, state.serving(), state.options.max_n)
    answer = Answer(Generation(state, job), ChatShape(), state.model_name, job.n)
    if body.stream:
        return await answer.stream(request, body.include_usage)
    return json_response(await answer.whole(request))


@router.post("/v1/completions", openapi_extra=_documented(CompletionBody))
async def completions(request: Request) -> Response:
    state = _state(request)
    body = parse_body(CompletionBody, await _body(request))
    state.check_model(body.model)
    job = await completion_job(body, state.serving(), state.options.max_n)
    echoes = [_prompt_text(state, prompt) for prompt in body.prompt for _ in range(job.n)] if body.echo else []
    answer = Answer(Generation(state, job), TextShape(echoes), state.model_name, len(job.prompts) * job.n)
    if body.stream:
        return await answer.stream(request, body.include_usage)
    return json_response(await answer.whole(request))


def _prompt_text(state: ServerState, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else state.serving().tokenizer.decode(prompt)


@router.get("/v1/models")
async def models(request: Request) -> Response:
    return json_response({"object": "list", "data": [_model(_state(request))]})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    _state(request).check_model(name)
    return json_response(_model(_state(request)))


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


@router.post("/tokenize", openapi_extra=_documented(TokenizeBody))
async def tokenize(request: Request) -> Response:
    state = _state(request)
    body = parse_body(TokenizeBody, await _body(request))
    state.check_model(body.model)
    service = state.serving()
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "give either prompt or messages", body.prompt)
    if body.messages is not None:
        text = render_messages(body.messages, service.tokenizer, body.add_generation_prompt)
        tokens = service.tokenizer.encode(text, add_special_tokens=False)
    else:
        tokens = service.tokenizer.encode(body.prompt or "", add_special_tokens=body.add_special_tokens)
    return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": service.max_model_len})


@router.post("/detokenize", openapi_extra=_documented(DetokenizeBody))
async def detokenize(request: Request) -> Response:
    state = _state(request)
    body = parse_body(DetokenizeBody, await _body(request))
    state.check_model(body.model)
    check_token_ids(body.tokens, state.serving(), "tokens")
    return json_response({"prompt": state.serving().tokenizer.decode(body.tokens, skip_special_tokens=False)})


@router.get("/health")
async def health(request: Request) -> Response:
    """Alive: 200 while the process and its engine live, loading and long steps included."""
    state = _state(request)
    status = 200 if state.alive else 503
    return json_response({"status": state.phase}, status, {"x-leftfold-state": state.phase})


@router.get("/ready")
async def ready(request: Request) -> Response:
    """Takes work: 200 only then (the gate answers 503 in every other phase)."""
    return json_response({"status": _state(request).phase})


@router.get("/version")
async def read_version(request: Request) -> Response:
    return json_response({"version": installed_version()})


def installed_version() -> str:
    try:
        return version("leftfold")
    except PackageNotFoundError:
        return "unknown"


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Gauges are asked of the engine now; before it is ready, and when it is gone, they keep their last value."""
    state = _state(request)
    if state.service is not None and state.alive:
        try:
            state.metrics.observe_engine(await state.service.engine.stats())
        except TimeoutError as error:
            raise unavailable("the engine does not answer") from error
        except EngineGone:
            pass
    return Response(state.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")
