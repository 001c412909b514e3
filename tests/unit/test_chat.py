"""The terminal chat: turns, a model in this process, a server over its API."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from leftfold.cli import main
from leftfold.commands.chat import talk
from leftfold.commands.common import UsageError
from leftfold.commands.remote import RemoteChat
from tests import tiny_models
from tests.tiny_folder import VOCAB_SIZE, write_tokenizer


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_a_conversation_grows_by_both_sides_and_can_be_forgotten(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[list[str]] = []

    def ask(messages: list[dict[str, str]]) -> Iterator[str]:
        asked.append([f"{message['role']}: {message['content']}" for message in messages])
        yield from ("one ", "two")

    typed(monkeypatch, "hello", "", "more", "/reset", "again", "/exit", "unheard")
    talk(ask, "be brief")
    system = "system: be brief"
    first = [system, "user: hello"]
    assert asked == [first, [*first, "assistant: one two", "user: more"], [system, "user: again"]]
    assert capsys.readouterr().out == "one two\n" * 3


def test_ctrl_c_ends_the_answer_and_keeps_the_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[list[dict[str, str]]] = []

    def ask(messages: list[dict[str, str]]) -> Iterator[str]:
        asked.append(list(messages))
        yield "half"
        if len(asked) == 1:
            raise KeyboardInterrupt
        yield " whole"

    typed(monkeypatch, "go", "on")
    talk(ask, None)
    assert asked[1][1] == {"role": "assistant", "content": "half"}
    assert capsys.readouterr().out == "half\nhalf whole\n"


def test_chat_with_a_model_in_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(tiny_models.KINDS, "text", ("Llama", {"vocab_size": VOCAB_SIZE}))
    torch.set_num_threads(1)
    tiny_models.make("text", tmp_path / "tiny")
    write_tokenizer(tmp_path / "tiny")
    capsys.readouterr()
    typed(monkeypatch, "hello", "once more")
    options = ["--temperature", "0", "--max-tokens", "5", "--threads", "1", "--kv-tokens", "2048", "--device", "cpu"]
    assert main(["chat", str(tmp_path / "tiny"), *options]) == 0
    assert capsys.readouterr().out.count("\n") >= 2


class Handler(BaseHTTPRequestHandler):
    """A server that echoes the last message in pieces, or says what it is told to say."""

    seen: list[dict[str, Any]] = []
    status = 200

    def do_GET(self) -> None:
        self._json(200, {"data": [{"id": "served"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Handler.seen.append({**body, "key": self.headers.get("Authorization")})
        if Handler.status != 200:
            return self._json(Handler.status, {"error": {"message": "temperature 9 is out of range"}})
        self.send_response(200)
        self.end_headers()
        text = body["messages"][-1]["content"]
        for delta in ({"role": "assistant", "content": ""}, *({"content": char} for char in text), {}):
            self.wfile.write(f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n".encode())
        self.wfile.write(b'data: {"choices": [], "usage": {}}\n\ndata: [DONE]\n\n')

    def _json(self, status: int, body: Any) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: Any) -> None:
        pass  # quiet


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Handler, "seen", [])
    monkeypatch.setattr(Handler, "status", 200)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_chat_with_a_server(url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    typed(monkeypatch, "hällo")
    assert main(["chat", "--url", f"{url}/v1/", "--api-key", "k", "--seed", "3", "--max-tokens", "9"]) == 0
    assert capsys.readouterr().out == "hällo\n"
    (asked,) = Handler.seen
    assert asked["model"] == "served" and asked["key"] == "Bearer k" and asked["stream"] is True
    assert (asked["seed"], asked["max_tokens"]) == (3, 9)


def test_what_a_server_refuses_is_said_in_one_line(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Handler, "status", 400)
    typed(monkeypatch, "hello")
    assert main(["chat", "m", "--url", url]) == 2
    err = capsys.readouterr().err
    assert "answers 400: temperature 9 is out of range" in err and err.count("\n") == 1


def test_a_refused_turn_is_forgotten_and_the_conversation_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[list[str]] = []

    def ask(messages: list[dict[str, str]]) -> Iterator[str]:
        asked.append([message["content"] for message in messages])
        if messages[-1]["content"] == "too long":
            raise UsageError("answers 400: too long")
        yield "yes"

    typed(monkeypatch, "one", "too long", "two")
    assert talk(ask, None)
    assert asked == [["one"], ["one", "yes", "too long"], ["one", "yes", "two"]]
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("yes\nyes\n", "leftfold: answers 400: too long\n")


def test_the_key_can_come_from_the_environment(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LEFTFOLD_API_KEY", "secret")
    typed(monkeypatch, "x")
    assert main(["chat", "--url", url]) == 0
    assert Handler.seen[0]["key"] == "Bearer secret"
    monkeypatch.setenv("LEFTFOLD_API_KEY", "")
    assert main(["chat", "--url", url]) == 2
    assert "LEFTFOLD_API_KEY is empty" in capsys.readouterr().err


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(UsageError, match="no server at"):
        RemoteChat("http://127.0.0.1:9", None, None, {})
