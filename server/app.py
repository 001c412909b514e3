"""The HTTP application: the routes behind a gate (ready? allowed?) and one boundary for errors."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from leftfold.server.bodies import Held, installed_version, json_response
from leftfold.server.control import CONTROL_PATHS, control
from leftfold.server.debug import DEBUG_PAGE, DEBUG_PATHS, Debugger, debug
from leftfold.server.errors import ApiError, stopping, unavailable
from leftfold.server.keys import Keys
from leftfold.server.responses import responses
from leftfold.server.routes import router
from leftfold.server.state import ServerState
from leftfold.server.streaming import ClientGone

_log = logging.getLogger("leftfold.server")
_ALWAYS_OPEN = ("/health", "/metrics")
_NO_KEY = frozenset({"/health", "/ready"}) | DEBUG_PAGE
_SEND_SECONDS = 30.0
"""A client that takes nothing for so long is given up, and what it asked for ends."""
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def create_app(state: ServerState) -> FastAPI:
    """The application over `state`; it answers at once, and takes work when `state` says so."""
    # No pages for people: theirs load scripts from elsewhere. The schema is at /openapi.json.
    app = FastAPI(title="Leftfold", version=installed_version(), docs_url=None, redoc_url=None)
    app.state.server = state
    app.include_router(router)
    app.include_router(control)
    app.state.debugger = Debugger()
    app.include_router(debug)
    app.include_router(responses)
    app.add_exception_handler(ApiError, _answer_api_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(ClientGone, _answer_nobody)
    app.add_middleware(Gate, state=state)
    return app


def _error_response(error: ApiError) -> Response:
    return json_response(error.body(), error.status, error.headers)


async def _answer_api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _error_response(error)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    message = f"{request.method} {request.url.path[:200]!r}: {error.detail}"
    return _error_response(ApiError(error.status_code, message, code=code, headers=error.headers))


async def _answer_nobody(_request: Request, _error: Exception) -> Response:
    return Response(status_code=499)  # the client has hung up; this only ends up in the access log


class _Unread(OSError):
    """The client has stopped reading."""


class Gate:
    """Before the routes: an id for every request, 503 until ready, the keys, and no fault without an answer.

    It counts who is being answered, and gives up on clients that stop reading.
    """

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state
        self._keys = Keys(state.options.api_key, state.options.admin_api_key, CONTROL_PATHS | DEBUG_PATHS)
        self._open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(12)
        begun = False

        async def send_with_id(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            try:
                async with asyncio.timeout(_SEND_SECONDS):
                    await send(message)
            except TimeoutError:
                raise _Unread from None

        refusal = self._refusal(scope)
        if refusal is not None:
            await _error_response(refusal)(scope, receive, send_with_id)
            return
        held = scope["leftfold.held"] = Held(self._state)
        self._open += 1
        try:
            await self._app(scope, receive, send_with_id)
        except asyncio.CancelledError:  # a stop does not wait any longer
            if not begun:
                await _error_response(stopping())(scope, receive, send_with_id)
            raise
        except _Unread:
            _log.info("request %s: the client has stopped reading its answer", request_id)
        except Exception:  # the boundary: a fault of ours is logged, answered, and hurts nobody else
            _log.exception("request %s failed", request_id)
            if not begun:
                error = ApiError(500, f"internal error; the log has it under {request_id}", kind="server_error")
                await _error_response(error)(scope, receive, send_with_id)
        finally:
            self._open -= 1
            held.release()

    def _refusal(self, scope: Scope) -> ApiError | None:
        path, headers = scope["path"], Headers(scope=scope)
        if self._keys.foreign(path, headers):
            return ApiError(403, "control routes take no requests from pages of other origins", code="foreign_origin")
        if path not in _NO_KEY and not self._keys.allow(path, headers):
            return ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
        if path not in _ALWAYS_OPEN and not self._state.ready:
            return self._state.unready()
        most = self._state.options.max_open_requests
        if path not in _ALWAYS_OPEN and self._open >= most:
            return unavailable(f"{most} requests are being answered, the most at a time; try again")
        return None
