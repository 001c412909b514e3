"""What the routes share: bodies in, JSON out, the server's state, schemas for `/openapi.json`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import orjson
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from leftfold.server.errors import ApiError, invalid, unavailable
from leftfold.server.state import ServerState

_PIECE_SECONDS = 30.0
"""A body that stands still for so long is given up."""
_BODIES = 16
"""So many of the largest bodies are held at a time; smaller ones accordingly more."""


class Held:
    """The bytes of one request's body, counted among those of all requests until the request is over."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._bytes = 0

    def take(self, count: int) -> None:
        """Raises a 503 ApiError if all bodies together become too much."""
        if self._state.held_bytes + count > _BODIES * self._state.options.max_body_bytes:
            raise unavailable("body: the bodies of other requests take all the room there is; try again")
        self._bytes += count
        self._state.held_bytes += count

    def release(self) -> None:
        self._state.held_bytes -= self._bytes
        self._bytes = 0


def json_response(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """JSON, as orjson writes it."""
    return Response(orjson.dumps(data), status, headers, media_type="application/json")


def server_state(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


def documented(kind: type[BaseModel]) -> dict[str, Any]:
    """The body's schema for `/openapi.json` (the body itself is read by `read_body`, for errors in OpenAI's form)."""
    return {"requestBody": {"content": {"application/json": {"schema": kind.model_json_schema()}}, "required": True}}


async def read_body(request: Request) -> Any:
    """The JSON of a body.

    Raises ApiError: 413 when it is too large, 415 when compressed, 400 when it is no JSON, 408 when it does not come,
    503 when there is no room for it now.
    """
    limit = server_state(request).options.max_body_bytes
    declared = request.headers.get("content-length", "0")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "a compressed body is not read; send it plain", param="content-encoding")
    data = bytearray()
    too_big = declared.isdigit() and int(declared) > limit
    held: Held = request.scope["leftfold.held"]
    pieces = request.stream()
    while (piece := await _next_piece(pieces)) is not None:
        too_big = too_big or len(data) + len(piece) > limit
        if too_big:
            raise ApiError(413, f"body: has more than {limit} bytes", param="body", code="body_too_large")
        held.take(len(piece))
        data += piece
    try:
        return orjson.loads(bytes(data))
    except orjson.JSONDecodeError as error:
        raise invalid("body", f"is not valid JSON ({error})", bytes(data[:60]).decode(errors="replace")) from error


async def _next_piece(pieces: AsyncIterator[bytes]) -> bytes | None:
    try:
        async with asyncio.timeout(_PIECE_SECONDS):
            return await anext(pieces, None)
    except TimeoutError:
        raise ApiError(408, f"body: nothing more came for {_PIECE_SECONDS:.0f} seconds", param="body") from None


def installed_version() -> str:
    try:
        return version("leftfold")
    except PackageNotFoundError:
        return "unknown"
