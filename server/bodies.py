"""What the routes share: bodies in, JSON out, the server's state, schemas for `/docs`."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import orjson
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from leftfold.server.errors import ApiError, invalid
from leftfold.server.state import ServerState


def json_response(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """JSON, as orjson writes it."""
    return Response(orjson.dumps(data), status, headers, media_type="application/json")


def server_state(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


def documented(kind: type[BaseModel]) -> dict[str, Any]:
    """The body's schema for `/docs` (the body itself is read by `read_body`, for errors in OpenAI's form)."""
    return {"requestBody": {"content": {"application/json": {"schema": kind.model_json_schema()}}, "required": True}}


async def read_body(request: Request) -> Any:
    """The JSON of a body. Raises ApiError: 413 when it is too large, 415 when compressed, 400 when it is no JSON."""
    limit = server_state(request).options.max_body_bytes
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


def installed_version() -> str:
    try:
        return version("leftfold")
    except PackageNotFoundError:
        return "unknown"
