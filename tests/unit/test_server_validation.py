"""What clients send: null is absent, wrong is a 400 that names field and value, never a 5xx (C73, C74, C75)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.instant_engine import App

BOTH: dict[str, tuple[Any, list[Any]]] = {
    # field: (a value that is right, values that are wrong in type or out of range)
    "model": ("toy", [5, ["toy"], {}]),
    "stream": (False, ["yes", 1, []]),
    "n": (2, [0, -1, "2", 1.5, True, 10**9, 129]),
    "max_tokens": (3, [0, -1, "3", 2.5, True, 2**31, [3]]),
    "min_tokens": (1, [-1, "1", 0.5, 2**31, True]),
    "temperature": (0.5, [-0.1, "hot", [1], True, 101, {}]),
    "top_p": (0.9, [-0.1, 1.1, "x", True]),
    "top_k": (5, [-2, "5", 1.5, 2**31, True]),
    "min_p": (0.1, [-0.1, 1.1, "x", True]),
    "seed": (7, ["7", 1.5, 2**64, -(2**63) - 1, True]),
    "stop": (["x", "y"], [5, [5], [""], "", {"a": 1}, ["x"] * 33, ["x" * 513], [None]]),
    "stop_token_ids": ([1, 2], [5, ["1"], [-1], [True], [10**6], [1.5], list(range(257))]),
    "ignore_eos": (True, ["true", 1]),
    "presence_penalty": (0.5, [-2.1, 2.1, "x", True]),
    "frequency_penalty": (0.5, [-2.1, 2.1, "x", True]),
    "repetition_penalty": (1.1, [0, -1, "x", 101, True]),
    "logit_bias": ({"5": 1.5, "6": -100}, [5, [1], {"x": 1}, {"5": "a"}, {"5": 101}, {"5": True}, {"999999": 1}]),
    "priority": (1, ["1", 1.5, 2**31, True]),
    "user": ("me", []),
    "some_field_of_tomorrow": ({"any": "thing"}, []),
}
TEXT: dict[str, tuple[Any, list[Any]]] = {
    **BOTH,
    "echo": (True, ["yes", 1]),
    "logprobs": (2, [-1, 21, "2", 1.5, True, [], {}]),
    "best_of": (1, [2, "1", 1.5, True]),
    "suffix": ("", ["tail"]),
}
CHAT: dict[str, tuple[Any, list[Any]]] = {
    **BOTH,
    "max_completion_tokens": (3, [0, -1, "3", 2.5, 2**31]),
    "add_generation_prompt": (False, ["no", 0]),
    "response_format": ({"type": "text"}, [{"type": "json_object"}, {"type": "json_schema"}, {}, "text", 5]),
    "tools": ([], [[{"type": "function"}]]),
    "logprobs": (True, [1, "true", []]),
    "top_logprobs": (0, [2, -1, 21, "2", 1.5, True]),
    "metadata": ({"a": "b"}, []),
    "store": (False, []),
    "service_tier": ("auto", []),
}
TABLES = {"complete": TEXT, "chat": CHAT}
CASES = [(route, field, *values) for route, table in TABLES.items() for field, values in table.items()]


@pytest.fixture
def app(tmp_path: Path) -> App:
    return App(tmp_path)


@pytest.mark.parametrize(("route", "field", "right", "wrong"), CASES)
def test_c75_each_optional_field(app: App, route: str, field: str, right: Any, wrong: list[Any]) -> None:
    ask = getattr(app, route)
    plain, null = ask(), ask(**{field: None})
    assert plain.status_code == null.status_code == 200
    null_answer, plain_answer = ({**answer.json(), "id": "", "created": 0} for answer in (null, plain))
    assert null_answer == plain_answer
    assert ask(**{field: right}).status_code == 200
    admitted = len(app.engine.admitted)
    for value in wrong:
        answer = ask(**{field: value})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, field), (value, error)
        assert error["type"] == "invalid_request_error"
        assert error["message"].startswith(field)
    assert len(app.engine.admitted) == admitted


@pytest.mark.parametrize("route", ["complete", "chat"])
@pytest.mark.parametrize("more", [{}, {"echo": True}, {"logprobs": 1}, {"echo": True, "logprobs": 0}])
def test_c73_max_tokens_zero(app: App, route: str, more: dict[str, Any]) -> None:
    answer = getattr(app, route)(max_tokens=0, **more)
    assert answer.status_code == 400
    assert "max_tokens" in answer.json()["error"]["message"]
    assert app.engine.admitted == [] and app.state.idle.is_set()


@pytest.mark.parametrize(("prompt", "words"), [
    ("", "must not be empty"),
    ([], "must be a non-empty"),
    ([""], "must not be empty"),
    ([[]], "must not be empty"),
    (["good", ""], "must not be empty"),
    ([1, 10**6], "got 1000000"),
    ([1, -1], "got -1"),
    ([[1], [2, 259]], "got 259"),
    ([1.5], "must be a non-empty"),
    ([True], "must be a non-empty"),
    ([1, "a"], "must be a non-empty"),
    ({"a": 1}, "must be a non-empty"),
    (5, "must be a non-empty"),
    ("x" * 33, "has 33 tokens"),
    ([5] * 64, "has 64 tokens"),
    (["a"] * 129, "prompt: at most 128 prompts, got 129"),
])  # fmt: skip
def test_c74_prompts_that_cannot_run(app: App, prompt: Any, words: str) -> None:
    answer = app.complete(prompt=prompt)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert len(answer.content) < 500
    assert app.engine.admitted == []
    assert app.complete(prompt="good").status_code == 200


@pytest.mark.parametrize(("messages", "param"), [
    (None, "messages"),
    ([], "messages"),
    ("hi", "messages"),
    ([5], "messages.0"),
    ([{"content": "x"}], "messages.0.role"),
    ([{"role": 5, "content": "x"}], "messages.0.role"),
    ([{"role": "", "content": "x"}], "messages.0.role"),
    ([{"role": "user"}], "messages.0.content"),
    ([{"role": "user", "content": 5}], "messages.0.content"),
    ([{"role": "user", "content": []}], "messages.0.content"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}], "messages.0.content.0"),
    ([{"role": "user", "content": ["x"]}], "messages.0.content.0"),
    ([{"role": "user", "content": "ok"}, {"role": "user", "content": None}], "messages.1.content"),
    ([{"role": "forbidden", "content": "x"}], "messages"),
    ([{"role": "user", "content": "x" * 100}], "messages"),
])  # fmt: skip
def test_messages_that_cannot_be(app: App, messages: Any, param: str) -> None:
    answer = app.chat(messages=messages)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


PARTS = '{"type": "input_text", "text": "…"} (types input_text, output_text, text)'


@pytest.mark.parametrize("instructions", [None, "be brief"])
@pytest.mark.parametrize(("given", "param", "told"), [
    ([5], "input.0", "an object"),
    ([{"content": "x"}], "input.0.role", "a string"),
    ([{"role": "user"}], "input.0.content", "a string or a list"),
    ([{"role": "user", "content": []}], "input.0.content", "a string or a list"),
    ([{"role": "user", "content": "ok"}, {"role": "user", "content": 5}], "input.1.content", "a string or a list"),
    ([{"role": "user", "content": ["x"]}], "input.0.content.0", PARTS),
    ([{"role": "user", "content": [{"type": "input_image"}]}], "input.0.content.0", PARTS),
    ([{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text"}]}], "input.0.content.1", PARTS),
    ([{"type": "reasoning"}], "input.0.type", '"message"'),
    ([{"role": "forbidden", "content": "x"}], "input", "refuses"),
    ([{"role": "user", "content": "x" * 100}], "input", "tokens"),
    ("x" * 100, "input", "tokens"),
])  # fmt: skip
def test_an_input_that_cannot_be_is_told_by_its_own_name(
    app: App, instructions: str | None, given: Any, param: str, told: str
) -> None:
    answer = app.post("/v1/responses", {"input": given, "instructions": instructions})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert error["message"].startswith(f"{param}:") and told in error["message"]
    assert "messages." not in error["message"]


@pytest.mark.parametrize("kind", ["input_text", "output_text", "text"])
def test_every_type_of_part_that_is_named_is_taken(app: App, kind: str) -> None:
    body = {"input": [{"role": "user", "content": [{"type": kind, "text": "a"}]}], "max_output_tokens": 1}
    assert app.post("/v1/responses", body).status_code == 200


def test_instructions_count_among_the_messages(app: App) -> None:
    most = [{"role": "user", "content": ""}] * 10_000
    error = app.post("/v1/responses", {"input": most, "instructions": "be brief"}).json()["error"]
    assert error["message"] == "input: must be at most 10000 messages, instructions included"


@pytest.mark.parametrize("form", [5, "text", [1], {"type": "json_object"}])
def test_a_form_of_text_that_is_not_known(app: App, form: Any) -> None:
    answer = app.post("/v1/responses", {"input": "x", "text": {"format": form}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "text.format")


WHOLE = {name for name, (_, wrong) in BOTH.items() if 1.5 in wrong} - {"stop_token_ids"}


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 10**30])
@pytest.mark.parametrize(("route", "field"), [
    *(("complete", name) for name in sorted(WHOLE | {"logprobs", "best_of"})),
    *(("chat", name) for name in sorted(WHOLE | {"top_logprobs", "max_completion_tokens"})),
])  # fmt: skip
def test_whole_numbers_beyond_64_bits_are_not_told_as_fractions(app: App, route: str, field: str, number: int) -> None:
    error = getattr(app, route)(**{field: number}).json()["error"]
    assert error["message"] == f"{field}: must be an integer of 64 bits, got a number beyond 64 bits"


@pytest.mark.parametrize("field", ["stop_token_ids", "prompt"])
def test_token_ids_beyond_64_bits_neither(app: App, field: str) -> None:
    assert app.complete(**{field: [1, 2**64]}).json()["error"]["message"].endswith("got [1, a number beyond 64 bits]")


def test_fractions_are_told_as_they_are(app: App) -> None:
    for number in (100.5, 1e300):
        assert app.chat(temperature=number).json()["error"]["message"].endswith(f"got {number}")


def test_messages_as_clients_send_them(app: App) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts, "name": "me"}, {"role": "assistant", "content": None}]
    assert app.chat(messages=messages, add_generation_prompt=False).status_code == 200
    text = app.engine.tokenizer.decode(app.engine.admitted[0]["prompt"])
    assert text == "user\na\nb\nassistant\n\n"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"5", b"null", b'"x"', b"\xff\xfe", b'{"prompt":"\\ud800"}', b"[" * 5000]
)
def test_bodies_that_are_not_what_they_should_be(app: App, body: bytes) -> None:
    answer = app.request("POST", "/v1/completions", content=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "body")


def test_a_body_too_large_or_compressed_is_not_read(tmp_path: Path) -> None:
    app = App(tmp_path, max_body_bytes=1000)
    assert app.complete(prompt="x" * 2000).status_code == 413
    assert app.request("POST", "/v1/completions", content=b"x", headers={"content-encoding": "gzip"}).status_code == 415


def test_options_that_need_each_other(app: App) -> None:
    assert app.complete(stream_options={"include_usage": True}).json()["error"]["param"] == "stream_options"
    answer = app.complete(stream=True, stream_options={"include_usage": "yes"})
    assert answer.json()["error"]["param"] == "stream_options.include_usage"
    assert app.complete(stream=True, stream_options={"include_usage": None}).status_code == 200
    assert app.complete(min_tokens=5, max_tokens=3).json()["error"]["param"] == "min_tokens"


def test_the_parameters_that_reach_the_engine(app: App) -> None:
    app.complete(
        seed=-1, n=2, temperature=0.7, top_p=0.9, top_k=-1, min_p=0.1, min_tokens=2, max_tokens=9, logit_bias={"7": 2},
        stop_token_ids=[9, 9], presence_penalty=1, frequency_penalty=-1, repetition_penalty=1.5, priority=3,
    )  # fmt: skip
    first, second = app.engine.admitted
    params = first["params"]
    assert (params.seed, second["params"].seed, params.n) == (2**64 - 1, 0, 1)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.7, 0.9, 0, 0.1)
    assert (params.min_tokens, params.max_tokens, params.logit_bias) == (2, 9, {7: 2.0})
    assert params.stop_token_ids == [258, 9]
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1, -1, 1.5)
    assert first["priority"] == 3


def test_defaults_and_what_the_server_adds(app: App) -> None:
    app.complete()
    app.chat()
    app.complete(ignore_eos=True, temperature=1e-9, stop_token_ids=[3])
    text, chat, ignoring = (request["params"] for request in app.engine.admitted)
    assert (text.max_tokens, chat.max_tokens) == (16, 64)
    assert text.seed is not None and text.seed != chat.seed
    assert text.stop_token_ids == [258]
    assert (ignoring.stop_token_ids, ignoring.ignore_eos, ignoring.temperature) == ([3], True, 0.0)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**65), 2**65)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(st.sampled_from(["complete", "chat"]), st.data())
def test_never_a_5xx_whatever_comes(app: App, route: str, data: st.DataObject) -> None:
    names = sorted(TEXT if route == "complete" else CHAT)
    fields = st.sampled_from([*names, "prompt", "messages", "stream_options", "echo"])
    body = data.draw(st.dictionaries(fields, json_values, max_size=4))
    try:
        answer = getattr(app, route)(**body)
    except (OverflowError, UnicodeEncodeError):
        return  # httpx itself cannot write it
    assert answer.status_code < 500
    assert app.state.idle.is_set()


def test_tokenize_and_detokenize(app: App) -> None:
    tokens = app.post("/tokenize", {"prompt": "hé"}).json()
    assert tokens["count"] == 3 and tokens["max_model_len"] == 64
    assert app.post("/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": "hé"}
    chat = app.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]}).json()
    assert chat["tokens"][0] == 257
    for path, body, param in [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [259]}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ]:  # fmt: skip
        answer = app.post(path, body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("stop", ["", ["x", ""]])
def test_an_empty_stop_string_is_called_so(app: App, stop: Any) -> None:
    answer = app.complete(stop=stop)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stop")
    assert "a stop string must not be empty" in answer.json()["error"]["message"]
