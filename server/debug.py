"""`/debug`: the debugger on the server's own log, for who has the admin key.

The page itself holds nothing and needs no key; it asks for one and sends it with every question. What answers is a
process of its own, `leftfold replay ui`, so that folding takes no time from those who are being served; it reads the
log as it is when it starts, ends with this process, and `POST /debug/api/again` starts it anew.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import RedirectResponse, Response

from leftfold.replay.ui.page import HEADERS, MOST_BODY, Answer, static_files
from leftfold.server.bodies import json_response, server_state
from leftfold.server.errors import ApiError, invalid, unavailable

debug = APIRouter(tags=["debug"], include_in_schema=False)
QUESTIONS = ("meta", "strip", "lanes", "moment", "explain", "search", "compare", "jump", "request", "differences")
DEBUG_PATHS = frozenset(f"/debug/api/{name}" for name in (*QUESTIONS, "worlds", "again"))
"""What the admin key guards; without an admin key they are closed."""
DEBUG_PAGE = frozenset({"/debug", "/debug/", *(f"/debug/{name}" for name in static_files())})
"""What needs no key, since it is the same everywhere."""
_SECONDS = 60.0


class Debugger:
    """The process that answers; started at the first question."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._url = ""

    def ask(self, folder: Path, policies: Sequence[str], method: str, path: str, body: bytes) -> Answer:
        """Carry a question over. Raises `OSError` where the process does not answer."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start(folder, policies)
            url = urlsplit(self._url)
        connection = http.client.HTTPConnection(url.hostname or "", url.port or 0, timeout=_SECONDS)
        try:
            connection.request(method, url.path + path, body or None, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return Answer(answer.status, "application/json", answer.read())
        except http.client.HTTPException as error:
            raise OSError(str(error)) from error
        finally:
            connection.close()

    def _start(self, folder: Path, policies: Sequence[str]) -> None:
        allowed = [word for policy in policies if ":" in policy for word in ("--allow-policy", policy)]
        command = [sys.executable, "-m", "leftfold", "replay", "ui", str(folder)]
        command += ["--no-browser", "--json", "--until-eof"]
        self._process = subprocess.Popen(
            [*command, *allowed], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        found = json.loads(line) if line.strip() else {"error": "it ended at once"}
        if "url" not in found:
            raise OSError(str(found.get("error")))
        self._url = found["url"]

    def stop(self) -> None:
        """End the process, if there is one."""
        with self._lock:
            if self._process is not None:
                self._process.kill()
                self._process.wait()
                self._process = None


@debug.get("/debug")
async def root() -> Response:
    return RedirectResponse("/debug/", 307)


@debug.get("/debug/")
async def index() -> Response:
    return _page("index.html")


@debug.get("/debug/{name}")
async def page(name: str) -> Response:
    return _page(name)


def _page(name: str) -> Response:
    files = static_files()
    if name not in files:
        raise ApiError(404, f"/debug/{name[:80]}: there is no such file", code="not_found")
    kind, content = files[name]
    return Response(content, headers={**HEADERS, "Content-Type": kind})


@debug.api_route("/debug/api/{name}", methods=["GET", "POST"])
async def question(request: Request, name: str) -> Response:
    state = server_state(request)
    if state.options.admin_api_key is None:
        message = "/debug shows what clients asked: start the server with --admin-api-key"
        raise ApiError(403, message, code="no_admin_key")
    debugger: Debugger = request.app.state.debugger
    if name == "again" and request.method == "POST":
        await run_in_threadpool(debugger.stop)
        return json_response({"ok": True})
    if state.log_folder is None or not state.log_folder.is_dir():
        raise ApiError(404, "there is no log to look at (--durability off keeps none)", code="no_log")
    body = await _body(request)
    query = f"?{request.url.query}" if request.url.query else ""
    policies = [state.options.policy or "", *state.options.allow_policy]
    given: Any = (state.log_folder, policies, request.method, f"api/{name}{query}", body)
    try:
        answer = await run_in_threadpool(debugger.ask, *given)
    except (OSError, ValueError) as error:
        raise unavailable(f"the debugger does not answer: {error}") from error
    return Response(answer.body, answer.status, {**HEADERS, "Content-Type": answer.type})


async def _body(request: Request) -> bytes:
    if request.method != "POST":
        return b""
    found = b""
    async for part in request.stream():
        found += part
        if len(found) > MOST_BODY:
            raise invalid("body", f"at most {MOST_BODY} bytes", None)
    return found


__all__ = ["DEBUG_PAGE", "DEBUG_PATHS", "Debugger", "debug"]
