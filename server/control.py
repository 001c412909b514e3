"""Control routes, for those who run the server: pause, sleep, caches, weights, limits, what there is to know of it all.

Every call is an event in the log; its answer comes when its effect has happened. A client that stops waiting does not
take its call back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from leftfold.checking import MOST
from leftfold.events import Abort, Call, Event, FlushCache, Pause, Reconfigure, Resume, Sleep, UpdateWeights, Wake
from leftfold.server.bodies import documented, installed_version, json_response, read_body, server_state
from leftfold.server.control_types import (
    LEVELS,
    AbortBody,
    CallBody,
    PauseQuery,
    ReconfigureBody,
    SleepQuery,
    UpdateWeightsBody,
    WaitQuery,
    WakeQuery,
    parse_query,
)
from leftfold.server.errors import ApiError, invalid, unavailable
from leftfold.server.group import EngineGone
from leftfold.server.openai_types import parse_body
from leftfold.server.streaming import until_gone
from leftfold.server.wire import Answered

control = APIRouter(tags=["control"])
_ABORT_SECONDS = 30.0
_STANDS = (
    "a pause with mode=keep holds: what had not ended when it came stands still and has not ended since; "
    "to let it end, POST /resume and then /pause?mode=wait"
)

CONTROL_PATHS = frozenset({
    "/pause", "/resume", "/is_paused", "/abort_requests", "/flush_cache", "/sleep", "/wake_up", "/is_sleeping",
    "/update_weights", "/reconfigure", "/call", "/server_info",
})  # fmt: skip
"""What the admin key guards, if there is one."""


def _queried(kind: type[BaseModel]) -> dict[str, Any]:
    """A query's parameters for `/docs`."""
    schema = kind.model_json_schema()
    required = schema.get("required", ())
    return {
        "parameters": [
            {"name": name, "in": "query", "required": name in required, "schema": part}
            for name, part in schema["properties"].items()
        ]
    }


async def _carry_out(request: Request, kind: type[Event], timeout: float | None = None, **fields: Any) -> Response:
    """Make a control call and answer when the engine has."""
    return json_response({"ok": True, "info": (await _made(request, kind, timeout, **fields)).info})


async def _made(request: Request, kind: type[Event], timeout: float | None, **fields: Any) -> Answered:
    """The engine's answer to a control call; its refusal is a 409 with the engine's reason."""
    engine = server_state(request).serving().engine
    try:
        answer = await until_gone(request, engine.control(kind, timeout, **fields))
    except TimeoutError:
        name = request.url.path.strip("/")
        message = f"{name}: not done after {timeout} seconds; the call stands and goes on"
        raise ApiError(504, message, kind="timeout_error", param="timeout", code="still_pending") from None
    except EngineGone as gone:
        raise unavailable(f"the engine stopped before it answered: {gone}") from gone
    if not answer.ok:
        raise ApiError(409, str(answer.info), kind="conflict_error", code="refused")
    return answer


@control.post("/pause", openapi_extra=_queried(PauseQuery))
async def pause(request: Request) -> Response:
    """Stop running requests: `wait` until they are done, `keep` them as they are, or `abort` them. Then answer.

    A pause may become stricter, never laxer: `info.mode` is the one that holds. Where that is `keep` and `wait` was
    asked for, `info.note` says that answers stand unfinished.
    """
    query = parse_query(PauseQuery, request)
    answer = await _made(request, Pause, query.timeout, mode=query.mode)
    info = answer.info
    if query.mode == "wait" and isinstance(info, Mapping) and info.get("mode") == "keep":
        info = {**info, "note": _STANDS}
    return json_response({"ok": True, "info": info})


@control.post("/resume", openapi_extra=_queried(WaitQuery))
async def resume(request: Request) -> Response:
    """Run again, in the order of the line."""
    return await _carry_out(request, Resume, parse_query(WaitQuery, request).timeout)


@control.get("/is_paused")
async def is_paused(request: Request) -> Response:
    gate = (await _stats(request)).get("gate", "")
    return json_response({"is_paused": gate == "paused", "gate": gate})


@control.post("/abort_requests", openapi_extra=documented(AbortBody))
async def abort_requests(request: Request) -> Response:
    """End answers by the ids that clients see, or with an empty list everything that lives; answers when they have."""
    state = server_state(request)
    ids = list(dict.fromkeys(parse_body(AbortBody, await read_body(request)).request_ids))
    named = {i: state.open[i] for i in ids or state.open if i in state.open}
    if ids:
        for group in named.values():
            group.abort("abort_requests")
    else:
        state.serving().engine.submit(Abort(t=0, reason="abort_requests"))
    try:
        await until_gone(request, _all_ended(named))
    except TimeoutError:
        raise unavailable("the engine does not answer; the requests end as soon as it does") from None
    info = {"aborted": list(named), "unknown": [i for i in ids if i not in named]}
    return json_response({"ok": True, "info": info})


async def _all_ended(groups: Mapping[str, Any]) -> None:
    async with asyncio.timeout(_ABORT_SECONDS):
        for group in groups.values():
            await group.ended()


@control.post("/flush_cache", openapi_extra=_queried(WaitQuery))
async def flush_cache(request: Request) -> Response:
    """Nothing that the prefix cache holds now is found any more."""
    return await _carry_out(request, FlushCache, parse_query(WaitQuery, request).timeout)


@control.post("/sleep", openapi_extra=_queried(SleepQuery))
async def sleep(request: Request) -> Response:
    """Give memory back: level 1 the KV cache, level 2 the weights as well; or `tags`."""
    query = parse_query(SleepQuery, request)
    if query.level is not None and query.tags is not None:
        raise invalid("tags", "give either level or tags", ",".join(query.tags))
    return await _carry_out(request, Sleep, query.timeout, tags=query.tags or LEVELS[query.level or 1])


@control.post("/wake_up", openapi_extra=_queried(WakeQuery))
async def wake_up(request: Request) -> Response:
    """Take memory again; the KV cache comes back empty."""
    query = parse_query(WakeQuery, request)
    return await _carry_out(request, Wake, query.timeout, tags=query.tags or LEVELS[2])


@control.get("/is_sleeping")
async def is_sleeping(request: Request) -> Response:
    asleep = str((await _stats(request)).get("asleep", "")).split()
    return json_response({"is_sleeping": bool(asleep), "asleep": asleep})


@control.post("/update_weights", openapi_extra=documented(UpdateWeightsBody))
async def update_weights(request: Request) -> Response:
    """Load other weights of the same architecture; answers from then on carry `version`."""
    body = parse_body(UpdateWeightsBody, await read_body(request))
    fields = {"source": body.source, "version": body.version, "live": body.live}
    return await _carry_out(request, UpdateWeights, body.timeout, **fields)


@control.post("/reconfigure", openapi_extra=documented(ReconfigureBody))
async def reconfigure(request: Request) -> Response:
    """Change limits while the engine runs; one that cannot be leaves all as they are."""
    body = parse_body(ReconfigureBody, await read_body(request))
    for name, value in body.set.items():
        if isinstance(value, int | float) and abs(value) > MOST:
            raise invalid(f"set.{name}", f"must be within ±{MOST}", value)
    service = server_state(request).serving()
    answer = await _carry_out(request, Reconfigure, body.timeout, set=body.set)
    service.info = {**service.info, **body.set}
    return answer


@control.post("/call", openapi_extra=documented(CallBody))
async def call(request: Request) -> Response:
    """A verb that the executor knows, in its place among the steps."""
    if not server_state(request).options.admin_api_key:
        message = "call: verbs may write files and slow everybody down; to use them, give --admin-api-key"
        raise ApiError(403, message, kind="permission_error", code="needs_admin_key")
    body = parse_body(CallBody, await read_body(request))
    return await _carry_out(request, Call, body.timeout, verb=body.verb, args=body.args)


@control.get("/server_info")
async def server_info(request: Request) -> Response:
    """What this server is: versions, options (no keys), the engine's limits and how it stands."""
    state = server_state(request)
    options = {name: value for name, value in state.options.to_dict().items() if not name.endswith("api_key")}
    return json_response({
        "version": installed_version(),
        "model": state.model_name,
        "options": options,
        "config": dict(state.serving().info),
        "engine": dict(await _stats(request)),
    })  # fmt: skip


@control.get("/load")
async def load(request: Request) -> Response:
    """How busy the engine is, for those who spread requests over several."""
    stats = await _stats(request)
    total = int(stats.get("num_pages", 0))
    used = total - int(stats.get("pages_free", 0)) - int(stats.get("pages_cached", 0))
    return json_response({
        "server_load": int(stats.get("live", 0)),
        "num_requests_running": int(stats.get("running", 0)),
        "num_requests_waiting": int(stats.get("waiting", 0)),
        "num_queued_tokens": int(stats.get("queued_tokens", 0)),
        "kv_cache_usage_perc": used / total if total else 0.0,
    })  # fmt: skip


async def _stats(request: Request) -> Mapping[str, Any]:
    try:
        return await server_state(request).serving().engine.stats()
    except TimeoutError as error:
        raise unavailable("the engine does not answer") from error
    except EngineGone as gone:
        raise unavailable(f"the engine stopped: {gone}") from gone


__all__ = ["CONTROL_PATHS", "control"]
