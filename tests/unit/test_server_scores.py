"""`logprobs` in the API's shapes: of chats and of plain completions, streamed and whole, with and without echo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from leftfold.executor.base import Score
from leftfold.server.scores import LOWEST, ChatScores, TextScores, shown_token
from leftfold.text import Tokenizer, load_tokenizer
from tests.instant_engine import App
from tests.tiny_folder import byte_tokenizer, write_tokenizer


@pytest.fixture
def app(tmp_path: Path) -> App:
    return App(tmp_path)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return load_tokenizer(write_tokenizer(tmp_path / "tokenizer", {}))


def chunks(answer: httpx.Response) -> list[Any]:
    lines = [line.splitlines()[-1][6:] for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]


def test_a_chat_has_an_entry_for_every_token(app: App) -> None:
    answer = app.chat(logprobs=True, top_logprobs=2, max_tokens=3).json()["choices"][0]
    start = len(app.engine.admitted[0]["prompt"])
    assert app.engine.admitted[0]["want"] == {"logprobs": 2}
    assert answer["logprobs"]["refusal"] is None
    others = [{"token": "b", "bytes": [98], "logprob": -0.5}, {"token": "c", "bytes": [99], "logprob": -1.5}]
    first = {"token": "a", "bytes": [97], "logprob": -start / 4, "top_logprobs": others}
    assert answer["logprobs"]["content"][0] == first
    assert [entry["token"] for entry in answer["logprobs"]["content"]] == ["a", "b", "c"]


@pytest.mark.parametrize("ask", [{}, {"logprobs": False}, {"logprobs": None, "top_logprobs": None}])
def test_who_does_not_ask_gets_null(app: App, ask: dict[str, Any]) -> None:
    assert app.chat(**ask).json()["choices"][0]["logprobs"] is None
    assert app.engine.admitted[0]["want"] is None


def test_a_chat_without_alternatives(app: App) -> None:
    answer = app.chat(logprobs=True, max_tokens=2).json()["choices"][0]
    assert [entry["top_logprobs"] for entry in answer["logprobs"]["content"]] == [[], []]


@pytest.mark.parametrize("stop", [None, ["de"], ["xyz"]])
@pytest.mark.parametrize("n", [1, 2])
def test_streamed_entries_of_a_chat_are_the_whole_ones(app: App, stop: Any, n: int) -> None:
    asked = {"logprobs": True, "top_logprobs": 1, "max_tokens": 8, "stop": stop, "n": n}
    whole = app.chat(**asked).json()
    entries: list[list[Any]] = [[] for _ in range(n)]
    for choice in chunks(app.chat(**asked, stream=True)):
        entries[choice["index"]] += (choice["logprobs"] or {"content": []})["content"]
    assert entries == [choice["logprobs"]["content"] for choice in whole["choices"]]
    assert sum(map(len, entries)) == whole["usage"]["completion_tokens"]


def test_the_token_that_ends_an_answer_has_an_entry_by_its_name(app: App) -> None:
    app.engine.reply = "hey<|im_end|>never"
    answer = app.chat(logprobs=True).json()["choices"][0]
    assert answer["message"]["content"] == "hey"
    assert [entry["token"] for entry in answer["logprobs"]["content"]] == ["h", "e", "y", "<|im_end|>"]


def test_a_completion_has_parallel_lists(app: App) -> None:
    answer = app.complete(logprobs=1, max_tokens=2).json()["choices"][0]
    assert app.engine.admitted[0]["want"] == {"logprobs": 1}
    assert answer["logprobs"] == {
        "tokens": ["a", "b"], "token_logprobs": [-1.25, -1.5], "text_offset": [0, 1],
        "top_logprobs": [{"b": -0.5, "a": -1.25}, {"c": -0.5, "b": -1.5}],
    }  # fmt: skip


def test_an_echo_brings_the_prompts_entries_the_first_without_numbers(app: App) -> None:
    answer = app.complete(prompt=["xyz", "u"], echo=True, logprobs=0, max_tokens=2).json()["choices"]
    assert [request["want"] for request in app.engine.admitted] == [{"logprobs": 0, "logprobs_from": 0}] * 2
    assert [choice["text"] for choice in answer] == ["xyzab", "uab"]
    assert answer[0]["logprobs"] == {
        "tokens": ["x", "y", "z", "a", "b"], "token_logprobs": [None, -0.25, -0.5, -0.75, -1.0],
        "text_offset": [0, 1, 2, 3, 4], "top_logprobs": [None, {"y": -0.25}, {"z": -0.5}, {"a": -0.75}, {"b": -1.0}],
    }  # fmt: skip
    assert answer[1]["logprobs"]["tokens"] == ["u", "a", "b"]
    assert answer[1]["logprobs"]["token_logprobs"] == [None, -0.25, -0.5]


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("stop", [None, ["de"]])
@pytest.mark.parametrize("n", [1, 2])
def test_streamed_lists_are_the_whole_ones(app: App, echo: bool, stop: Any, n: int) -> None:
    asked = {"prompt": ["hé", "xy"], "logprobs": 1, "max_tokens": 7, "stop": stop, "n": n, "echo": echo}
    whole = app.complete(**asked).json()["choices"]
    lists: list[dict[str, list[Any]]] = [{name: [] for name in whole[0]["logprobs"]} for _ in whole]
    texts = [""] * len(whole)
    for choice in chunks(app.complete(**asked, stream=True)):
        texts[choice["index"]] += choice["text"]
        for name, values in (choice["logprobs"] or {}).items():
            lists[choice["index"]][name] += values
    assert lists == [choice["logprobs"] for choice in whole]
    assert texts == [choice["text"] for choice in whole]


def test_parts_of_a_character_are_spelled_as_bytes(app: App, tokenizer: Tokenizer) -> None:
    app.engine.reply = "aé"
    answer = app.complete(logprobs=0, max_tokens=3, echo=True, prompt="é").json()["choices"][0]
    assert answer["text"] == "éaé"
    assert answer["logprobs"]["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "a", "bytes:\\xc3", "bytes:\\xa9"]
    assert answer["logprobs"]["text_offset"] == [0, 0, 1, 2, 2]
    chat = app.chat(logprobs=True, max_tokens=3).json()["choices"][0]
    assert bytes(b for entry in chat["logprobs"]["content"] for b in entry["bytes"]).decode() == "aé"


def test_a_token_that_looks_like_another_takes_the_likeliest_place() -> None:
    class Twins:
        """Ids 1 and 2 are both "a"."""

        def token_bytes(self, token: int) -> bytes:
            return b"a" if token in (1, 2) else b"b"

        def detokenizer(self) -> Any:
            return Tokenizer(byte_tokenizer(), ()).detokenizer()

    scores = [Score(1, 2, -2.0, ((3, -0.5), (1, -1.0)))]
    assert TextScores(Twins(), (), None).shown(scores, ())["top_logprobs"] == [{"b": -0.5, "a": -1.0}]  # type: ignore[arg-type]


def test_an_impossible_token_has_a_number_that_json_can_say(tokenizer: Tokenizer) -> None:
    entry = ChatScores(tokenizer).shown([Score(0, 5, float("-inf"), ((6, float("-inf")),))])["content"][0]
    assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] == LOWEST


def test_tokens_by_themselves(tokenizer: Tokenizer) -> None:
    (space,) = tokenizer.encode(" ")
    assert shown_token(tokenizer.token_bytes(space)) == " "
    assert tokenizer.token_bytes(tokenizer.encode("<|im_end|>")[0]) == b"<|im_end|>"
    assert tokenizer.token_bytes(10**6) == b""


@pytest.mark.parametrize("ask", [{"top_logprobs": 2}, {"top_logprobs": 1, "logprobs": False}])
def test_alternatives_without_scores_are_refused(app: App, ask: dict[str, Any]) -> None:
    answer = app.chat(**ask)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "top_logprobs"


@pytest.mark.parametrize("ask", [{"logprobs": 1}, {"logprobs": 0, "echo": True}])
def test_c73_no_tokens_means_no_scores_either(app: App, ask: dict[str, Any]) -> None:
    assert app.complete(max_tokens=0, **ask).status_code == 400
    assert app.chat(max_tokens=0, logprobs=True, top_logprobs=1).status_code == 400
    assert app.engine.admitted == [] and app.state.idle.is_set()
