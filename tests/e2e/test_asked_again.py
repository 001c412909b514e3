"""Requests that their clients name and ask again: while they are made, and after the deaths of engine and server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from leftfold.events import Admit, EventLog
from tests.e2e.servers import PATIENCE, ServerProcess, free_port
from tests.e2e.test_engine_restarts import kill_engine
from tests.e2e.test_server_life import alive, engine_of, eventually
from tests.tiny_folder import write_tokenizer

SLOW = {"TOY_STEP_SECONDS": "0.01"}
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "one", "max_tokens": 90, "stream": True}),
    ("/v1/completions", {"prompt": ["two", "three"], "n": 2, "echo": True, "max_tokens": 60}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "four"}], "max_tokens": 90}),
    ("/v1/responses", {"input": "five", "max_output_tokens": 90, "stream": True}),
]
"""None has a seed: an answer that was made twice would be another one."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "toy", {})


class Asking:
    """Asks in a thread until it falls; `text` is what came."""

    def __init__(self, server: ServerProcess, number: int) -> None:
        path, body = ASKED[number]
        self._asked = {"json": body, "headers": {"Idempotency-Key": f"key-{number}"}, "timeout": PATIENCE}
        self._url = f"{server.url}{path}"
        self.status = 0
        self.text = ""
        self.headers: dict[str, str] = {}
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            with httpx.stream("POST", self._url, **self._asked) as answer:  # type: ignore[arg-type]
                self.status, self.headers = answer.status_code, dict(answer.headers)
                for piece in answer.iter_text():
                    self.text += piece
        except httpx.TransportError:
            pass

    def join(self) -> Asking:
        self._thread.join(PATIENCE)
        return self


def said(asking: Asking) -> Any:
    """The texts and the answer's id, whole or streamed."""
    assert asking.status == 200, asking.text
    if not asking.headers["content-type"].startswith("text/event-stream"):
        whole = json.loads(asking.text)
        return whole["id"], [c.get("text") or c["message"]["content"] for c in whole["choices"]]
    events = [json.loads(line[6:]) for line in asking.text.splitlines() if line.startswith("data: {")]
    assert not any("error" in event for event in events), events[-1]
    text = "".join(
        event["delta"] if event.get("type") == "response.output_text.delta" else event["choices"][0]["text"]
        for event in events
        if event.get("type") == "response.output_text.delta" or event.get("choices")
    )
    (name,) = {event.get("id") or event.get("response", {}).get("id") for event in events} - {None}
    return name, text


def admitted(folder: Path) -> list[str]:
    return [record.event.rid for record in EventLog.read(folder / "log") if isinstance(record.event, Admit)]


def start(folder: Path, port: int, env: dict[str, str] | None = None, **options: Any) -> ServerProcess:
    given = {"log_dir": str(folder / "log"), "max_num_seqs": 16, "on_disconnect": "continue", **options}
    return ServerProcess.toy(folder, {**SLOW, **(env or {})}, port=port, **given)


def kill(server: ServerProcess) -> None:
    engine = engine_of(server)
    server.process.kill()
    server.process.wait()
    eventually(lambda: not alive(engine))


@pytest.fixture(params=["log", "no log"])
def server(folder: Path, request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    more = {} if request.param == "log" else {"log_dir": None, "durability": "off"}
    with start(folder, free_port(), **more) as running:
        yield running.wait_until_ready()


def test_an_engine_dies_and_those_who_ask_again_join(server: ServerProcess, folder: Path) -> None:
    numbers = range(len(ASKED))
    first = [Asking(server, number) for number in numbers]
    eventually(lambda: len(first[0].text) > 2000 and len(first[3].text) > 2000)
    kill_engine(server)
    server.wait_until_ready()
    second = [Asking(server, number) for number in numbers]
    heard = [said(asking.join()) for asking in first]
    assert [said(asking.join()) for asking in second] == heard
    third = [Asking(server, number).join() for number in numbers]  # what has ended, too
    assert [said(asking) for asking in third] == heard
    assert all(asking.headers["idempotent-replayed"] == "true" for asking in (*second, *third))
    assert "idempotent-replayed" not in first[0].headers
    if (folder / "log").exists():
        assert server.interrupt() == 0
        assert len(admitted(folder)) == len(set(admitted(folder))) == 7


@pytest.mark.parametrize(("durability", "held"), [("async", True), ("strict", False)])
def test_a_server_dies_and_those_who_ask_again_find_their_answers(folder: Path, durability: str, held: bool) -> None:
    """`held`: before the first token of any answer, so that no client has an id."""
    port, numbers, hold = free_port(), range(len(ASKED)), folder / "hold"
    hold.write_text("1" if held else "")
    env = {"TOY_HOLD": str(hold)} if held else {}
    with start(folder, port, env, durability=durability) as server:
        server.wait_until_ready()
        first = [Asking(server, number) for number in numbers]
        if held:
            eventually(lambda: len(admitted(folder)) == 7)
        else:
            eventually(lambda: len(first[0].text) > 2000 and len(first[3].text) > 2000)
        kill(server)
        for asking in first:
            asking.join()
    before = admitted(folder)
    with start(folder, port, durability=durability) as server:
        server.wait_until_ready()
        again = [[said(Asking(server, number).join()) for number in numbers] for _ in range(2)]
        assert again[0] == again[1]
        if not held:
            assert again[0][0][1].startswith(_text_so_far(first[0]))
        kill(server)
    with start(folder, port, durability=durability) as server:  # now they lie in the file alone
        server.wait_until_ready()
        assert [said(Asking(server, number).join()) for number in numbers] == again[0]
        assert server.interrupt() == 0
        assert "Traceback" not in server.stderr
    assert admitted(folder) == before and len(set(before)) == 7


def _text_so_far(asking: Asking) -> str:
    whole = asking.text[: asking.text.rindex("\n\n")]
    events = [json.loads(line[6:]) for line in whole.splitlines() if line.startswith("data: {")]
    return "".join(event["choices"][0]["text"] for event in events)


def test_openais_client_names_a_request_in_a_header(folder: Path) -> None:
    with ServerProcess.toy(folder) as server:
        server.wait_until_ready()
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=PATIENCE)
        named: Any = {"model": "toy", "prompt": "hello", "extra_headers": {"Idempotency-Key": "mine"}}
        assert client.completions.create(**named) == client.completions.create(**named)
        with pytest.raises(openai.UnprocessableEntityError) as caught:
            client.completions.create(**named, max_tokens=3)
        assert caught.value.code == "idempotency_key_reused" and caught.value.param == "Idempotency-Key"
