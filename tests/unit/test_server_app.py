"""The application around the engine: shapes of answers, streams, errors, the gate, ids, metrics, clients that go."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from leftfold.server.errors import engine_error
from leftfold.server.generation import FINISH_REASONS
from leftfold.server.group import EngineGone
from leftfold.server.wire import Output
from tests.instant_engine import App


@pytest.fixture
def app(tmp_path: Path) -> App:
    return App(tmp_path)


def frames(answer: httpx.Response) -> list[Any]:
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [event.splitlines() for event in answer.text.split("\n\n") if event]
    assert all(line.startswith(("id: ", "data: ")) for event in events for line in event)
    assert events[-1] == ["data: [DONE]"]
    return [json.loads(event[-1][6:]) for event in events[:-1]]


def chunk_texts(chunks: list[Any], count: int) -> list[str]:
    texts = [""] * count
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content") or ""
    return texts


@pytest.mark.parametrize("route", ["complete", "chat"])
@pytest.mark.parametrize("stop", [None, ["f"], ["de", "xyz"], ["a"], ["nothing"]])
@pytest.mark.parametrize("n", [1, 3])
def test_streamed_text_is_the_whole_text(app: App, route: str, stop: Any, n: int) -> None:
    ask = getattr(app, route)
    whole = ask(stop=stop, n=n, max_tokens=10).json()
    chunks = frames(ask(stop=stop, n=n, max_tokens=10, stream=True, stream_options={"include_usage": True}))
    texts = [c["text"] if route == "complete" else c["message"]["content"] for c in whole["choices"]]
    assert chunk_texts(chunks, n) == texts
    ends = {c["index"]: c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]}
    assert [ends[i] for i in range(n)] == [c["finish_reason"] for c in whole["choices"]]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_a_chat_stream_opens_with_the_role(app: App) -> None:
    chunks = frames(app.chat(stream=True, max_tokens=2))
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert "usage" not in chunks[0]


def test_a_stop_string_ends_the_request_at_the_token_that_completed_it(app: App) -> None:
    answer = app.complete(stop="de", max_tokens=10).json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("abc", "stop")
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    (abort,) = app.engine.aborted
    assert (abort.reason, abort.keep) == ("stop_string", 5)


def test_an_answer_that_a_stop_string_ended_survives_the_engine(app: App) -> None:
    async def scenario() -> httpx.Response:
        app.engine.silent = True
        body = {"prompt": "hi", "stop": "b", "max_tokens": 9}
        task = asyncio.create_task(app.send("POST", "/v1/completions", json=body))
        group = await until_admitted(app)
        for i, token in enumerate(app.engine.tokenizer.encode("abc")):
            group.put(Output("r0", 0, 2 + i, [token], None, None, None))
        group.put(EngineGone("it fell over"))
        return await task

    answer = asyncio.run(scenario()).json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("a", "stop")


def test_a_stop_token_ends_the_text_without_being_shown(app: App) -> None:
    app.engine.reply = "bonjour<|im_end|>never"
    answer = app.chat().json()
    assert answer["choices"][0]["message"]["content"] == "bonjour"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 8
    assert app.engine.aborted == []
    assert app.chat(ignore_eos=True, max_tokens=9).json()["choices"][0]["message"]["content"] == "bonjourn"


def test_prompts_choices_and_echo(app: App) -> None:
    ids = app.engine.tokenizer.encode("xy")
    answer = app.complete(prompt=["ab", "cd"], n=2, echo=True, max_tokens=3).json()
    assert [c["text"] for c in answer["choices"]] == ["ababc", "ababc", "cdabc", "cdabc"]
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"] == {
        "prompt_tokens": 4, "completion_tokens": 12, "total_tokens": 16, "prompt_tokens_details": {"cached_tokens": 8},
    }  # fmt: skip
    for prompt in (ids, [ids]):
        assert app.complete(prompt=prompt, echo=True, max_tokens=2).json()["choices"][0]["text"] == "xyab"
    chunks = frames(app.complete(prompt=ids, echo=True, max_tokens=2, stream=True))
    assert chunk_texts(chunks, 1) == ["xyab"]


@pytest.mark.parametrize(("code", "status", "retry"), [
    ("invalid", 400, None), ("queue_full", 503, "1"), ("closing", 503, "1"), ("failed", 500, None),
])  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses(app: App, code: str, status: int, retry: str | None, stream: bool) -> None:
    app.engine.error = {"code": code, "text": "because"}
    answer = app.complete(stream=stream)
    assert (answer.status_code, answer.headers.get("retry-after")) == (status, retry)
    assert answer.json()["error"]["message"] == "because"
    assert app.state.idle.is_set()
    metrics = app.request("GET", "/metrics").text
    assert f'reason="{code}"' in metrics
    assert 'leftfold:prompt_tokens_total{engine="0",model_name="toy"} 0.0' in metrics
    app.engine.error = None
    app.complete()
    assert 'leftfold:prompt_tokens_total{engine="0",model_name="toy"} 5.0' in app.request("GET", "/metrics").text


def test_an_error_without_words_is_still_an_answer() -> None:
    assert engine_error(None).status == 500


def test_an_error_midway_is_the_last_event_of_a_stream(app: App) -> None:
    async def scenario() -> httpx.Response:
        app.engine.silent = True
        task = asyncio.create_task(app.send("POST", "/v1/completions", json={"prompt": "hi", "stream": True}))
        group = await until_admitted(app)
        token = app.engine.tokenizer.encode("a")
        group.put(Output("r0", 0, 2, token, None, None, None))
        group.put(Output("r0", 0, 3, [], "error", {"code": "failed", "text": "lost"}, None))
        return await task

    answer = asyncio.run(scenario())
    assert answer.status_code == 200
    first, last = frames(answer)
    assert first["choices"][0]["text"] == "a"
    assert last["error"]["message"] == "lost"


async def until_admitted(app: App) -> Any:
    """The group of the first request that the silent engine gets."""
    seen: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    admit = app.engine.admit

    def spy(*asked: Any) -> Any:
        group = admit(*asked)
        seen.set_result(group)
        return group

    app.engine.admit = spy  # type: ignore[method-assign]
    return await seen


def test_every_finish_reason_of_the_engine_has_a_word(app: App) -> None:
    assert set(FINISH_REASONS) == {"stop", "length", "abort", "deadline"}  # "error" is an error, never a finish
    assert set(FINISH_REASONS.values()) <= {"stop", "length"}


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_died_is_a_500(app: App, stream: bool) -> None:
    app.engine.gone = "it fell over"
    answer = app.complete(stream=stream)
    assert answer.status_code == 500
    assert "it fell over" in answer.json()["error"]["message"]
    assert app.request("GET", "/metrics").status_code == 200


@pytest.mark.parametrize(("stream", "status"), [("true", 200), ("0", 200), ("maybe", 400), ("", 400)])
def test_how_a_response_is_read_again(app: App, stream: str, status: int) -> None:
    name = app.post("/v1/responses", {"input": "hi", "max_output_tokens": 6}).json()["id"]
    answer = app.request("GET", f"/v1/responses/{name}?stream={stream}")
    assert answer.status_code == status
    assert answer.headers["content-type"].startswith("text/event-stream" if stream == "true" else "application/json")
    assert status == 200 or answer.json()["error"]["param"] == "stream"


# Clients that go


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [0, 2])
def test_a_client_that_hangs_up_aborts_its_request(app: App, stream: bool, after: int) -> None:
    async def scenario() -> list[Any]:
        app.engine.silent = True
        body = json.dumps({"prompt": "hi", "stream": stream, "n": 2}).encode()
        hung_up = asyncio.Event()
        requests = iter([{"type": "http.request", "body": body, "more_body": False}])
        sent: list[Any] = []

        async def receive() -> Any:
            try:
                return next(requests)
            except StopIteration:
                await hung_up.wait()
                return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b"",
            "http_version": "1.1", "scheme": "http", "server": ("toy", 80), "client": ("c", 1), "root_path": "",
        }  # fmt: skip
        task = asyncio.create_task(app.app(scope, receive, send))
        group = await until_admitted(app)
        for i in range(after):
            group.put(Output("r0", 0, 2 + i, app.engine.tokenizer.encode("a"), None, None, None))
            await asyncio.sleep(0)
        hung_up.set()
        await task
        return sent

    asyncio.run(scenario())
    assert sorted(a.rid or "" for a in app.engine.aborted) == ["r0", "r1"]
    assert {a.reason for a in app.engine.aborted} == {"client_gone"}
    assert app.state.idle.is_set()
    metrics = app.request("GET", "/metrics").text
    assert 'request_success_total{engine="0",finished_reason="abort",model_name="toy"} 2.0' in metrics
    assert f'leftfold:prompt_tokens_total{{engine="0",model_name="toy"}} {2.0 if after else 0.0}' in metrics


@pytest.mark.parametrize("path", ["/v1/completions", "/pause?mode=wait"])
def test_what_a_stop_does_not_wait_for_is_a_503(app: App, path: str) -> None:
    async def scenario() -> list[Any]:
        app.engine.silent = True
        waits = asyncio.Event()

        async def never(*_: Any, **__: Any) -> Any:
            waits.set()
            await asyncio.Event().wait()

        app.engine.control = never  # type: ignore[method-assign]
        sent: list[Any] = []
        requests = iter([{"type": "http.request", "body": b'{"prompt": "hi"}', "more_body": False}])

        async def receive() -> Any:
            return next(requests, None) or await never()

        async def send(message: Any) -> None:
            sent.append(message)

        bare, _, query = path.partition("?")
        scope = {
            "type": "http", "method": "POST", "path": bare, "headers": [], "query_string": query.encode(),
            "http_version": "1.1", "scheme": "http", "server": ("toy", 80), "client": ("c", 1), "root_path": "",
        }  # fmt: skip
        task = asyncio.create_task(app.app(scope, receive, send))
        await waits.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return sent

    start, body = asyncio.run(scenario())
    headers = {name.decode().lower(): value.decode() for name, value in start["headers"]}
    assert (start["status"], headers["retry-after"]) == (503, "1")
    assert json.loads(body["body"])["error"]["message"] == "the server is stopping"


def test_a_stop_admits_nobody_whose_prompt_was_still_read(app: App) -> None:
    encode = app.state.serving().texts.encode

    async def slow(*args: Any, **kwargs: Any) -> Any:
        app.state.phase = "draining"
        return await encode(*args, **kwargs)

    app.state.serving().texts.encode = slow  # type: ignore[method-assign]
    answer = app.complete()
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert app.engine.admitted == []


def test_a_choice_that_ended_is_not_aborted_when_its_sibling_fails(app: App) -> None:
    async def scenario() -> httpx.Response:
        app.engine.silent = True
        task = asyncio.create_task(app.send("POST", "/v1/completions", json={"prompt": "hi", "n": 3}))
        group = await until_admitted(app)
        group.put(Output("r1", 0, 2, app.engine.tokenizer.encode("a"), "length", None, None))
        group.put(Output("r0", 0, 2, [], "error", {"code": "failed", "text": "lost"}, None))
        return await task

    assert asyncio.run(scenario()).status_code == 500
    assert [a.rid for a in app.engine.aborted] == ["r2"]


# The gate


@pytest.mark.parametrize("phase", ["starting", "fetching", "loading", "refusing", "draining", "failed"])
def test_until_ready_every_route_but_two_answers_503(app: App, phase: str) -> None:
    app.state.phase = phase
    for method, path in [("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/ready"), ("GET", "/nope")]:
        answer = app.request(method, path)
        assert (answer.status_code, answer.headers["x-leftfold-state"]) == (503, phase)
        assert answer.headers["retry-after"] == "1"
    assert app.request("GET", "/metrics").status_code == 200
    health = app.request("GET", "/health")
    assert (health.status_code, health.json()["status"]) == (503 if phase == "failed" else 200, phase)


def test_ready_version_models(app: App) -> None:
    assert app.request("GET", "/ready").status_code == 200
    assert app.request("GET", "/version").json()["version"]
    (model,) = app.request("GET", "/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("toy", 64)
    assert app.request("GET", "/v1/models/toy").json() == model
    answers = [app.request("GET", "/v1/models/x"), app.complete(model="gpt-4"), app.chat(model="gpt-4")]
    for answer in answers:
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert app.request("GET", "/openapi.json").status_code == 200


def test_unknown_routes_and_methods_answer_in_the_apis_form(app: App) -> None:
    assert app.request("GET", "/nope").json()["error"]["code"] == "not_found"
    assert app.request("GET", "/v1/completions").json()["error"]["code"] == "method_not_allowed"


def test_the_key_guards_every_route_but_the_probes(tmp_path: Path) -> None:
    app = App(tmp_path, api_key="secret")
    for path in ("/v1/models", "/metrics", "/version", "/openapi.json", "/nope"):
        assert app.request("GET", path).status_code == 401
        for wrong in ("Bearer wrong", "Bearer ", "secret", "Basic secret", "Bearer sécret"):
            assert app.request("GET", path, headers={"Authorization": wrong.encode()}).status_code == 401
        assert app.request("GET", path, headers={"Authorization": "Bearer secret"}).status_code != 401
    assert app.request("GET", "/health").status_code == app.request("GET", "/ready").status_code == 200


def test_request_ids_are_echoed_and_never_used_inside(app: App) -> None:
    assert app.complete().headers["x-request-id"] != app.complete().headers["x-request-id"]
    body = {"prompt": "hi", "max_tokens": 1}
    answer = app.post("/v1/completions", body, headers={"X-Request-Id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    assert "mine-1" not in answer.text
    for bad in (b"a b", b"x" * 129, "é".encode(), b"a\tb"):
        echoed = app.post("/v1/completions", body, headers={b"X-Request-Id": bad}).headers["x-request-id"]
        assert echoed.isalnum() and len(echoed) == 24


def test_a_fault_of_ours_is_a_500_in_the_apis_form_and_hurts_nobody_else(app: App) -> None:
    def broken(_: Any) -> Any:
        raise ZeroDivisionError("secret detail")

    admit, app.engine.admit = app.engine.admit, broken  # type: ignore[method-assign]
    answer = app.complete()
    assert answer.status_code == 500
    assert "secret" not in answer.text and answer.headers["x-request-id"] in answer.text
    app.engine.admit = admit  # type: ignore[method-assign]
    assert app.complete().status_code == 200


# Metrics


def test_c76_gauges_are_functions_of_state_at_the_scrape(app: App) -> None:
    app.engine.values = {"running": 2, "waiting": 3, "num_pages": 8, "pages_free": 2, "pages_cached": 2}
    text = app.request("GET", "/metrics").text
    assert 'leftfold:num_requests_running{engine="0",model_name="toy"} 2.0' in text
    assert 'leftfold:num_requests_waiting{engine="0",model_name="toy"} 3.0' in text
    assert 'leftfold:kv_cache_usage_perc{engine="0",model_name="toy"} 0.5' in text
    app.engine.values = {"running": 0, "waiting": 0, "num_pages": 8, "pages_free": 6, "pages_cached": 2}
    text = app.request("GET", "/metrics").text
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert f'leftfold:{name}{{engine="0",model_name="toy"}} 0.0' in text


def test_engine_counters(app: App) -> None:
    app.engine.values = {"preemptions": 3, "prefix_queries": 10, "prefix_hits": 4}
    text = app.request("GET", "/metrics").text
    for name, value in (("num_preemptions", 3), ("prefix_cache_queries", 10), ("prefix_cache_hits", 4)):
        assert f"# TYPE leftfold:{name}_total counter" in text
        assert f'leftfold:{name}_total{{engine="0",model_name="toy"}} {value}.0' in text


def test_counters_and_histograms(app: App) -> None:
    app.complete(prompt="abc", max_tokens=5)
    app.complete(prompt="abc", stop="c")
    text = app.request("GET", "/metrics").text
    labels = 'engine="0",model_name="toy"'
    assert f"leftfold:prompt_tokens_total{{{labels}}} 6.0" in text
    assert f"leftfold:generation_tokens_total{{{labels}}} 8.0" in text
    assert 'leftfold:request_success_total{engine="0",finished_reason="length",model_name="toy"} 1.0' in text
    assert 'leftfold:request_success_total{engine="0",finished_reason="stop",model_name="toy"} 1.0' in text
    assert f"leftfold:time_to_first_token_seconds_count{{{labels}}} 2.0" in text
    assert f"leftfold:inter_token_latency_seconds_count{{{labels}}} 6.0" in text
    assert f"leftfold:e2e_request_latency_seconds_count{{{labels}}} 2.0" in text
