"""Control routes around an engine that answers at once: what they ask of it, what they answer, who may use them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from leftfold.server.control import CONTROL_PATHS, control
from leftfold.server.deadlines import deadlines
from leftfold.server.group import EngineGone
from leftfold.server.metrics import waiting_by_reason
from leftfold.server.options import ServeOptions
from leftfold.server.wire import Answered, Output, Status
from tests.instant_engine import App
from tests.unit.test_server_app import until_admitted

BODIES: Mapping[str, Any] = {
    "/abort_requests": {"request_ids": []},
    "/update_weights": {"source": "/models/b", "version": "v2"},
    "/reconfigure": {"set": {"max_running": 3}},
    "/call": {"verb": "slow_down", "args": {"seconds": 1}},
}
CALLS = [
    ("/pause?mode=keep", "Pause", {"mode": "keep"}),
    ("/pause?mode=wait", "Pause", {"mode": "wait"}),
    ("/pause?mode=abort&timeout=1.5", "Pause", {"mode": "abort", "patience": 1.5}),
    ("/resume", "Resume", {}),
    ("/flush_cache", "FlushCache", {}),
    ("/sleep", "Sleep", {"tags": ("kv",)}),
    ("/sleep?level=1", "Sleep", {"tags": ("kv",)}),
    ("/sleep?level=2", "Sleep", {"tags": ("weights", "kv")}),
    ("/sleep?tags=weights", "Sleep", {"tags": ("weights",)}),
    ("/sleep?tags=kv_cache,weights", "Sleep", {"tags": ("weights", "kv")}),
    ("/wake_up", "Wake", {"tags": ("weights", "kv")}),
    ("/wake_up?tags=kv&tags=weights&timeout=9", "Wake", {"tags": ("weights", "kv"), "patience": 9.0}),
    ("/update_weights", "UpdateWeights", {"source": "/models/b", "version": "v2", "live": "recompute"}),
    ("/reconfigure", "Reconfigure", {"set": {"max_running": 3}}),
    ("/call", "Call", {"verb": "slow_down", "args": {"seconds": 1}}),
]
ADMIN = {"Authorization": "Bearer admin"}


@pytest.fixture
def app(tmp_path: Path) -> App:
    return App(tmp_path, admin_api_key="admin")


def post(app: App, path: str, **request: Any) -> Any:
    request = {"headers": ADMIN, **request}
    body = request.pop("json", BODIES.get(path.partition("?")[0]))
    return app.request("POST", path, json=body, **request)


@pytest.mark.parametrize(("path", "kind", "fields"), CALLS)
def test_what_a_route_asks_of_the_engine_and_answers(app: App, path: str, kind: str, fields: Any) -> None:
    app.engine.answer = Answered("c", True, {"done": 1})
    answer = post(app, path)
    assert (answer.status_code, answer.json()) == (200, {"ok": True, "info": {"done": 1}})
    assert app.engine.controls == [(kind, {"patience": None, **fields})]


@pytest.mark.parametrize(("path", "kind", "_fields"), CALLS)
def test_what_comes_of_a_call_that_is_not_carried_out(app: App, path: str, kind: str, _fields: Any) -> None:
    for outcome, status, code in [
        (Answered("c", False, "weights are asleep"), 409, "refused"),
        (TimeoutError(), 504, "still_pending"),
        (EngineGone("it fell"), 503, "unavailable"),
    ]:
        app.engine.answer = outcome
        answer = post(app, path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert "it fell" in answer.json()["error"]["message"]
    app.engine.answer = Answered("c", False, "weights are asleep")
    assert post(app, path).json()["error"]["message"] == "weights are asleep"


@pytest.mark.parametrize(("path", "param"), [
    ("/pause", "mode"), ("/pause?mode=", "mode"), ("/pause?mode=later", "mode"), ("/pause?mode=wait&mode=keep", "mode"),
    ("/pause?mode=wait&timeout=0", "timeout"), ("/pause?mode=wait&timeout=soon", "timeout"),
    ("/pause?mode=wait&timeout=nan", "timeout"), ("/pause?mode=wait&tiemout=1", "tiemout"),
    ("/sleep?level=0", "level"), ("/sleep?level=3", "level"), ("/sleep?level=one", "level"),
    ("/sleep?tags=", "tags"), ("/sleep?tags=disk", "tags"), ("/sleep?level=1&tags=kv", "tags"),
    ("/wake_up?level=1", "level"), ("/wake_up?tags=kv,disk", "tags"), ("/resume?now=1", "now"),
])  # fmt: skip
def test_a_wrong_parameter_is_a_400_that_names_it_and_nothing_happens(app: App, path: str, param: str) -> None:
    answer = post(app, path)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert app.engine.controls == []


@pytest.mark.parametrize(("path", "known"), [
    ("/pause?mode=keep", "mode, timeout"), ("/resume?", "timeout"), ("/flush_cache?", "timeout"),
    ("/sleep?level=1", "level, tags, timeout"), ("/wake_up?", "tags, timeout"),
])  # fmt: skip
def test_what_is_not_known_is_told_with_what_is(app: App, path: str, known: str) -> None:
    assert post(app, f"{path}&foo=1").json()["error"]["message"] == f"foo: is not known here; known: {known}, got '1'"


@pytest.mark.parametrize("body", ["/abort_requests", "/update_weights", "/reconfigure", "/call"])
def test_a_field_that_is_not_known_is_told_with_those_that_are(app: App, body: str) -> None:
    message = post(app, body, json={**BODIES[body], "foo": 1}).json()["error"]["message"]
    assert message.startswith("foo: is not known here; known: ") and next(iter(BODIES[body])) in message


@pytest.mark.parametrize(("asked", "holds", "told"), [
    ("wait", "wait", False), ("wait", "keep", True), ("wait", "abort", False), ("keep", "keep", False),
    ("keep", "abort", False), ("abort", "abort", False),
])  # fmt: skip
def test_a_wait_that_is_answered_by_a_keep_says_that_answers_stand_unfinished(
    app: App, asked: str, holds: str, told: bool
) -> None:
    app.engine.answer = Answered("c", True, {"mode": holds})
    info = post(app, f"/pause?mode={asked}").json()["info"]
    assert info.pop("mode") == holds
    assert ("has not ended" in info.get("note", "")) is told is bool(info)


@pytest.mark.parametrize(("value", "shown"), [
    (2**48 + 1, "281474976710657"), (2**63, "9223372036854775808"), (-(2**48) - 1, "-281474976710657"),
    (99999999999999999999999, "a number beyond 64 bits"), (1e300, "a number beyond 64 bits"),
])  # fmt: skip
def test_numbers_that_no_limit_can_be_are_told_as_they_are(app: App, value: Any, shown: str) -> None:
    error = post(app, "/reconfigure", json={"set": {"max_running": value}}).json()["error"]
    assert error["message"] == f"set.max_running: must be within ±281474976710656, got {shown}"
    assert app.engine.controls == []


@pytest.mark.parametrize(("path", "body", "param"), [
    ("/abort_requests", {}, "request_ids"), ("/abort_requests", {"request_ids": None}, "request_ids"),
    ("/abort_requests", {"request_ids": "x"}, "request_ids"), ("/abort_requests", {"request_ids": [1]}, "request_ids"),
    ("/abort_requests", {"request_ids": ["x"] * 10_001}, "request_ids"), ("/abort_requests", [], "body"),
    ("/update_weights", {"version": "v"}, "source"), ("/update_weights", {"source": "s"}, "version"),
    ("/update_weights", {"source": "s", "version": "a\nb"}, "version"),
    ("/update_weights", {"source": "s", "version": "v", "live": "drop"}, "live"),
    ("/update_weights", {"source": "s", "version": "v", "lives": "keep"}, "lives"),
    ("/reconfigure", {}, "set"), ("/reconfigure", {"set": {}}, "set"), ("/reconfigure", {"set": [1]}, "set"),
    ("/call", {"args": {}}, "verb"), ("/call", {"verb": "__init__"}, "verb"),
    ("/call", {"verb": "x", "args": 1}, "args"),
])  # fmt: skip
def test_a_wrong_body_is_a_400_that_names_the_field(app: App, path: str, body: Any, param: str) -> None:
    answer = post(app, path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert app.engine.controls == [] and app.engine.aborted == []


def test_a_change_of_limits_shows_in_what_the_server_says_of_itself(app: App) -> None:
    app.engine.answer = Answered("c", False, "no")
    assert post(app, "/reconfigure").status_code == 409
    assert "max_running" not in app.request("GET", "/server_info", headers=ADMIN).json()["config"]
    app.engine.answer = Answered("c", True)
    assert post(app, "/reconfigure").status_code == 200
    assert app.request("GET", "/server_info", headers=ADMIN).json()["config"]["max_running"] == 3


def test_what_there_is_to_know(app: App) -> None:
    app.engine.values = {
        "gate": "paused", "asleep": "weights kv", "live": 3, "running": 2, "waiting": 1, "queued_tokens": 9,
        "num_pages": 8, "pages_free": 2, "pages_cached": 2,
    }  # fmt: skip
    assert app.request("GET", "/is_paused", headers=ADMIN).json() == {"is_paused": True, "gate": "paused"}
    sleeping = app.request("GET", "/is_sleeping", headers=ADMIN).json()
    assert sleeping == {"is_sleeping": True, "asleep": ["weights", "kv"]}
    assert app.request("GET", "/load").json() == {
        "server_load": 3, "num_requests_running": 2, "num_requests_waiting": 1, "num_queued_tokens": 9,
        "kv_cache_usage_perc": 0.5,
    }  # fmt: skip
    text = app.request("GET", "/metrics").text
    labels = 'engine="0",model_name="toy"'
    assert 'leftfold:engine_gate{engine="0",gate="paused",model_name="toy"} 1.0' in text
    assert 'leftfold:engine_gate{engine="0",gate="running",model_name="toy"} 0.0' in text
    assert f'leftfold:engine_asleep{{{labels},part="kv"}} 1.0' in text
    assert f'leftfold:num_requests_waiting_by_reason{{{labels},reason="asleep"}} 1.0' in text
    app.engine.gone = "it fell"
    for path in ("/is_paused", "/is_sleeping", "/server_info", "/load"):
        assert app.request("GET", path, headers=ADMIN).status_code == 503


@pytest.mark.parametrize(("stats", "reason"), [
    ({}, "capacity"), ({"gate": "running", "executor_present": True, "asleep": ""}, "capacity"),
    ({"gate": "draining"}, "paused"), ({"gate": "paused", "asleep": "kv"}, "asleep"),
    ({"gate": "paused", "asleep": "kv", "executor_present": False}, "no_executor"),
])  # fmt: skip
def test_everybody_in_line_waits_for_the_same_thing_first(stats: Any, reason: str) -> None:
    counts = waiting_by_reason({"waiting": 4, **stats})
    assert {name: count for name, count in counts.items() if count} == {reason: 4}


# Who may


def test_the_admin_key_guards_exactly_the_control_routes(tmp_path: Path) -> None:
    routes = {route.path for route in control.routes}  # type: ignore[attr-defined]
    assert routes == CONTROL_PATHS | {"/load"}
    app = App(tmp_path, api_key="user", admin_api_key="admin")
    assert {path: app.request("POST", path, headers=_bearer("user")).status_code for path in CONTROL_PATHS} == (
        dict.fromkeys(CONTROL_PATHS, 401)
    )
    assert 401 not in {app.request("POST", path, headers=_bearer("admin")).status_code for path in CONTROL_PATHS}
    for key, status in (("user", 200), ("admin", 200), ("other", 401)):
        assert app.request("GET", "/load", headers=_bearer(key)).status_code == status
        assert app.request("GET", "/v1/models", headers=_bearer(key)).status_code == status


def test_without_an_admin_key_the_api_key_opens_them_and_without_any_nobody_is_asked(tmp_path: Path) -> None:
    app = App(tmp_path / "a", api_key="user")
    assert app.request("POST", "/resume").status_code == 401
    assert app.request("POST", "/resume", headers=_bearer("user")).status_code == 200
    assert App(tmp_path / "b").request("POST", "/resume").status_code == 200
    only_admin = App(tmp_path / "c", admin_api_key="admin")
    assert only_admin.request("GET", "/v1/models").status_code == 200
    assert only_admin.request("POST", "/resume").status_code == 401


def test_a_verb_for_the_executor_wants_an_admin_key(tmp_path: Path) -> None:
    app = App(tmp_path, api_key="user")
    answer = app.request("POST", "/call", json=BODIES["/call"], headers=_bearer("user"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "needs_admin_key")
    assert app.engine.controls == []


def test_no_key_is_ever_shown(tmp_path: Path) -> None:
    app = App(tmp_path, api_key="user-secret", admin_api_key="admin-secret")
    answer = app.request("GET", "/server_info", headers=_bearer("admin-secret"))
    assert answer.status_code == 200 and "secret" not in answer.text
    assert "secret" not in str(app.state.options.without_keys())


def test_pages_of_other_origins_control_nothing(tmp_path: Path) -> None:
    app = App(tmp_path)
    for origin in ("http://evil.example", "null", "http://toy.evil.example", "http://toy:81"):
        assert app.request("POST", "/resume", headers={"Origin": origin}).status_code == 403
    assert app.engine.controls == []
    assert app.request("POST", "/resume", headers={"Origin": "http://toy"}).status_code == 200


@pytest.mark.parametrize("phase", ["starting", "loading", "refusing", "draining", "failed"])
def test_until_ready_control_routes_answer_503(app: App, phase: str) -> None:
    app.state.phase = phase
    for path in (*CONTROL_PATHS, "/load"):
        assert app.request("POST", path, headers=ADMIN).status_code == 503
    assert app.engine.controls == []


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# Aborts


def test_an_abort_finds_the_answers_choices_and_waits_for_their_end(app: App) -> None:
    async def scenario() -> tuple[Any, Any]:
        app.engine.silent = True
        asked = asyncio.create_task(app.send("POST", "/v1/completions", json={"prompt": "hi", "n": 2}))
        group = await until_admitted(app)
        group.put(Output("r0", 0, 2, app.engine.tokenizer.encode("a"), None, None, None))
        (name,) = app.state.open
        body = {"request_ids": [name, name, "unknown"]}
        aborting = asyncio.create_task(app.send("POST", "/abort_requests", json=body, headers=ADMIN))
        while len(app.engine.aborted) < 2:
            await asyncio.sleep(0)
        assert not aborting.done()
        group.put(Output("r1", 0, 2, [], "abort", None, None))
        group.put(Output("r0", 0, 3, [], "abort", None, None))
        done = (await aborting).json()
        assert done == {"ok": True, "info": {"aborted": [name], "unknown": ["unknown"]}}
        return name, (await asked).json()

    name, answer = asyncio.run(scenario())
    assert answer["id"] == name and app.state.open == {}
    assert [(c["text"], c["finish_reason"]) for c in answer["choices"]] == [("a", "length"), ("", "length")]
    assert [(a.rid, a.reason) for a in app.engine.aborted] == [("r0", "abort_requests"), ("r1", "abort_requests")]


def test_an_abort_of_everything_reaches_what_no_client_waits_for(app: App) -> None:
    assert post(app, "/abort_requests").json() == {"ok": True, "info": {"aborted": [], "unknown": []}}
    (abort,) = app.engine.aborted
    assert (abort.rid, abort.reason) == (None, "abort_requests")


# Sleep policy, deadlines, versions


@pytest.mark.parametrize(("status", "state"), [
    (Status("paused"), "paused"), (Status("draining"), "paused"), (Status("paused", ["kv"]), "asleep"),
    (Status("running", ["weights"]), "asleep"),
])  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_c60_told_to_refuse_while_paused_or_asleep(tmp_path: Path, status: Status, state: str, stream: bool) -> None:
    app = App(tmp_path, sleep_policy="refuse")
    app.engine.status = status
    for answer in (app.complete(stream=stream), app.chat(stream=stream), app.request("GET", "/ready")):
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.headers["x-leftfold-state"] == state
    assert app.engine.admitted == []
    assert f'reason="{state}"}} 2.0' in app.request("GET", "/metrics").text
    app.engine.status = Status("running")
    assert app.complete(stream=stream).status_code == app.request("GET", "/ready").status_code == 200


def test_c60_told_to_wait_requests_are_admitted(app: App) -> None:
    app.engine.status = Status("paused", ["weights", "kv"])
    assert app.complete().status_code == app.request("GET", "/ready").status_code == 200


def test_an_engine_that_cannot_write_its_log_is_not_ready_and_says_why(app: App) -> None:
    app.engine.status = Status("running", [], "the log cannot be written: No space left on device")
    for answer in (app.complete(), app.complete(stream=True), app.chat(), app.request("GET", "/ready")):
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.headers["x-leftfold-state"] == "refusing" and "No space left" in answer.text
    assert app.engine.admitted == [] and app.request("GET", "/health").status_code == 200
    app.engine.values |= {"log_failure": "No space left on device", "log_failures": 2, "log_waiting_bytes": 70}
    metrics = app.request("GET", "/metrics").text
    for name, value in (("log_failing", 1), ("log_failures_total", 2), ("log_waiting_bytes", 70)):
        assert re.search(rf"^leftfold:{name}{{.*}} {value}\.0$", metrics, re.MULTILINE)
    app.engine.status = Status("running")
    assert app.complete().status_code == app.request("GET", "/ready").status_code == 200


@pytest.mark.parametrize(("asked", "limits", "expected"), [
    ((None, None), (0.0, 0.0), (0, 0)),
    ((None, None), (30.0, 0.5), (30_000_000, 500_000)),
    ((2.0, 1e-9), (0.0, 0.0), (2_000_000, 1)),
    ((60.0, 1.0), (30.0, 2.0), (30_000_000, 1_000_000)),
])  # fmt: skip
def test_the_earlier_deadline_counts(asked: Any, limits: Any, expected: Any) -> None:
    options = ServeOptions(request_timeout=limits[0], queue_timeout=limits[1])
    assert tuple(deadlines(*asked, options).values()) == expected


def test_deadlines_reach_the_engine(tmp_path: Path) -> None:
    app = App(tmp_path, request_timeout=100.0)
    assert app.complete(n=2, timeout=1.5).status_code == 200
    assert [(r["deadline"], r["queue_deadline"]) for r in app.engine.admitted] == [(1_500_000, 600_000_000)] * 2
    assert app.chat(queue_timeout=2).status_code == 200
    assert (app.engine.admitted[2]["deadline"], app.engine.admitted[2]["queue_deadline"]) == (100_000_000, 2_000_000)
    for wrong in (0, -1, "1", float(10**8), True):
        answer = app.complete(timeout=wrong)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "timeout")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("heard", [0, 1])
def test_a_deadline_ends_an_answer_early_and_without_a_token_is_a_504(app: App, stream: bool, heard: int) -> None:
    async def scenario() -> Any:
        app.engine.silent = True
        task = asyncio.create_task(app.send("POST", "/v1/completions", json={"prompt": "hi", "stream": stream}))
        group = await until_admitted(app)
        for i in range(heard):
            group.put(Output("r0", 0, 2 + i, app.engine.tokenizer.encode("a"), None, None, None))
        group.put(Output("r0", 0, 2 + heard, [], "deadline", None, {"completion_tokens": heard}))
        return await task

    answer = asyncio.run(scenario())
    assert answer.status_code == (200 if heard else 504)
    if not heard:
        assert answer.json()["error"]["code"] == "deadline_exceeded"
    elif not stream:
        (choice,) = answer.json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("a", "length")
    assert 'finished_reason="deadline"' in app.request("GET", "/metrics").text
    assert app.state.open == {}


@pytest.mark.parametrize("route", ["complete", "chat"])
def test_the_version_of_the_weights_is_the_fingerprint(app: App, route: str) -> None:
    ask = getattr(app, route)
    assert "system_fingerprint" not in ask(max_tokens=2).json()
    app.engine.version = "v2"
    assert ask(max_tokens=2).json()["system_fingerprint"] == "v2"
    assert '"system_fingerprint":"v2"' in ask(max_tokens=2, stream=True).text
