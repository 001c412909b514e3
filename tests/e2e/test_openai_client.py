"""The `openai` client against a real server: HTTP process, engine process, log and all; the model is a formula."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.servers import ServerProcess
from tests.tiny_folder import write_tokenizer

HI: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = write_tokenizer(tmp_path_factory.mktemp("toy"), {})
    with ServerProcess.toy(folder, log_dir=str(folder / "log")) as server:
        yield server.wait_until_ready()


@pytest.fixture
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, client.models.retrieve("toy").id) == ("toy", "toy")


@pytest.mark.parametrize("options", [{}, {"stop": ["aB"]}, {"n": 3}, {"max_tokens": 1}])
def test_chat_streamed_and_whole_are_the_same(client: openai.OpenAI, options: Any) -> None:
    asked = {"model": "toy", "messages": HI, "max_tokens": 40, **options}
    whole = client.chat.completions.create(**asked)
    stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    texts = [""] * len(whole.choices)
    ends: dict[int, str] = {}
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    assert [ends[i] for i in range(len(texts))] == [choice.finish_reason for choice in whole.choices]
    assert usage is not None and whole.usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


def test_what_the_cache_gave_is_told_even_when_a_stop_string_ends_the_answer(client: openai.OpenAI) -> None:
    prompt = "the same beginning, told again and again" * 2
    asked = {"model": "toy", "prompt": prompt, "max_tokens": 60}
    full = client.completions.create(**asked).choices[0].text  # type: ignore[call-overload]
    answer = client.completions.create(**asked, stop=full[5:9])  # type: ignore[call-overload]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens_details.cached_tokens >= 16


def test_stop_strings_cut_the_text_and_count_its_tokens(client: openai.OpenAI) -> None:
    full = client.completions.create(model="toy", prompt="ab", max_tokens=60).choices[0].text
    assert len(full) == 60
    for start in (0, 7, 30, 55):
        stop = full[start : start + 4]
        answer = client.completions.create(model="toy", prompt="ab", max_tokens=60, stop=stop)
        cut = full.index(stop)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (full[:cut], "stop")
        assert answer.usage is not None and answer.usage.completion_tokens == cut + 4


def test_an_answer_ends_at_the_models_length(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="toy", messages=HI)
    assert answer.usage is not None and answer.usage.total_tokens == 512
    assert answer.choices[0].finish_reason == "length"


def test_prompts_as_texts_and_token_ids(client: openai.OpenAI, server: ServerProcess) -> None:
    ids = httpx.post(f"{server.url}/tokenize", json={"prompt": "ab"}).json()["tokens"]
    text = client.completions.create(model="toy", prompt="ab", max_tokens=8).choices[0].text
    for prompt in (ids, [ids, ids], ["ab", "ab"]):
        answer = client.completions.create(model="toy", prompt=prompt, max_tokens=8, echo=True)
        assert {choice.text for choice in answer.choices} == {"ab" + text}


def test_bad_input_is_a_bad_request_that_names_the_field(client: openai.OpenAI) -> None:
    bad: list[tuple[str, dict[str, Any]]] = [
        ("max_tokens", {"max_tokens": 0}),
        ("temperature", {"temperature": -1}),
        ("logprobs", {"logprobs": 21}),
        ("prompt", {"prompt": ""}),
        ("prompt", {"prompt": [10**6]}),
        ("prompt", {"prompt": "x" * 512}),
    ]
    for field, change in bad:
        with pytest.raises(openai.BadRequestError) as error:
            client.completions.create(**{"model": "toy", "prompt": "ab", **change})
        assert error.value.param == field
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="ab")


def test_nothing_is_left_running(server: ServerProcess) -> None:
    gauges = server.wait_until_idle()
    assert gauges["leftfold:kv_cache_usage_perc"] == 0
    assert gauges['leftfold:kv_pages{use="free"}'] + gauges['leftfold:kv_pages{use="cached"}'] == 256


def test_scores_of_a_chat_streamed_and_whole_are_the_same(client: openai.OpenAI) -> None:
    asked: Any = {"model": "toy", "messages": HI, "max_tokens": 12, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.logprobs is not None and whole.logprobs.content is not None
    assert "".join(entry.token for entry in whole.logprobs.content) == whole.message.content
    assert all(len(entry.top_logprobs) == 2 and entry.bytes for entry in whole.logprobs.content)
    streamed = []
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            streamed += (choice.logprobs and choice.logprobs.content) or []
    assert streamed == whole.logprobs.content
    plain = client.chat.completions.create(model="toy", messages=HI, max_tokens=12).choices[0]
    assert plain.logprobs is None and plain.message.content == whole.message.content


@pytest.mark.parametrize("echo", [False, True])
def test_scores_of_a_completion_streamed_and_whole_are_the_same(client: openai.OpenAI, echo: bool) -> None:
    asked: Any = {"model": "toy", "prompt": "a long prompt: é", "max_tokens": 6, "logprobs": 1, "echo": echo}
    whole = client.completions.create(**asked).choices[0]
    assert whole.logprobs is not None
    lists = whole.logprobs.model_dump()
    assert {len(values) for values in lists.values()} == {6 + (17 if echo else 0)}
    assert (lists["token_logprobs"][0] is None) == echo
    merged: dict[str, list[Any]] = {name: [] for name in lists}
    text = ""
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            text += choice.text
            for name, values in (choice.logprobs.model_dump() if choice.logprobs else {}).items():
                merged[name] += values
    assert (text, merged) == (whole.text, lists)
