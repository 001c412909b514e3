"""A client whose connection broke reads on where it was: from the server that lives, or from the next one."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.servers import PATIENCE, ServerProcess, free_port
from tests.e2e.test_server_life import alive, engine_of, eventually
from tests.tiny_folder import write_tokenizer

SLOW = {"TOY_STEP_SECONDS": "0.01"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "toy", {})


class Reader:
    """What one client has of a stream: text by choice, the place, and whether the end has come."""

    def __init__(self) -> None:
        self.id = ""
        self.place = ""
        self.texts: dict[int, str] = {}
        self.ends: dict[int, str] = {}
        self.usage: Any = None
        self.done = False

    def take(self, line: str) -> None:
        if line.startswith("id: "):
            assert line[4:] != self.place
            self.place = line[4:]
        elif line == "data: [DONE]":
            self.done = True
        elif line.startswith("data: "):
            chunk = json.loads(line[6:])
            assert "error" not in chunk, chunk
            assert self.id in ("", chunk["id"])
            self.id, self.usage = chunk["id"], chunk.get("usage")
            for choice in chunk["choices"]:
                index = choice["index"]
                assert index not in self.ends
                text = choice.get("text") or choice.get("delta", {}).get("content") or ""
                self.texts[index] = self.texts.get(index, "") + text
                if choice["finish_reason"]:
                    self.ends[index] = choice["finish_reason"]

    def read(self, answer: httpx.Response, characters: int | None = None) -> Reader:
        """Takes events, of so many characters at least if that is given."""
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            self.take(line)
            if not line and characters is not None and sum(map(len, self.texts.values())) >= characters:
                break
        return self

    def go_on(self, server: ServerProcess, characters: int | None = None, header: bool = False) -> Reader:
        params, headers = {"from": self.place}, {"Last-Event-ID": self.place}
        given: Any = {"headers": headers} if header else {"params": params if self.place else {}}
        with httpx.stream("GET", f"{server.url}/v1/streams/{self.id}", timeout=PATIENCE, **given) as answer:
            return self.read(answer, characters)


ASKED = [
    ("/v1/completions", {"prompt": "one", "max_tokens": 120, "seed": 1}),
    ("/v1/completions", {"prompt": ["two", "three"], "n": 2, "echo": True, "max_tokens": 60, "seed": 2}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "four"}], "max_tokens": 120, "seed": 3}),
]


def ask(server: ServerProcess, path: str, body: dict[str, Any], characters: int | None = None) -> Reader:
    whole = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", f"{server.url}{path}", json=whole, timeout=PATIENCE) as answer:
        return Reader().read(answer, characters)


def results(reader: Reader) -> Any:
    """All but what the prefix cache gave, which depends on who came before."""
    assert reader.done
    return reader.texts, reader.ends, {**reader.usage, "prompt_tokens_details": None}


@pytest.mark.parametrize(("path", "body"), ASKED)
def test_a_stream_that_goes_on_without_its_client_is_read_on(folder: Path, path: str, body: dict[str, Any]) -> None:
    with ServerProcess.toy(folder, SLOW, on_disconnect="continue") as server:
        server.wait_until_ready()
        expected = results(ask(server, path, body))
        reader = ask(server, path, body, characters=30)
        for header in (False, True):
            characters = sum(map(len, reader.texts.values())) + 20
            reader.go_on(server, characters, header)
        assert not reader.done
        assert results(reader.go_on(server)) == expected
        late = Reader()
        late.id = reader.id  # from the beginning, and after the end
        assert results(late.go_on(server)) == expected


def test_places_that_are_none(folder: Path) -> None:
    with ServerProcess.toy(folder) as server:
        server.wait_until_ready()
        reader = ask(server, *ASKED[0])
        url = f"{server.url}/v1/streams/{reader.id}"
        assert httpx.get(url, params={"from": reader.place}).status_code == 200
        for wrong in ("x", "-1", "1.2", "1e3", str(int(reader.place) + 1), "999999999"):
            answer = httpx.get(url, params={"from": wrong})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "from")


def test_what_is_not_kept_any_more(folder: Path) -> None:
    with ServerProcess.toy(folder, retain_responses=1.0) as server:
        server.wait_until_ready()
        url = f"{server.url}/v1/streams/{ask(server, *ASKED[0]).id}"
        eventually(lambda: httpx.get(url).status_code == 404)
        assert httpx.get(url).json()["error"]["code"] == "stream_not_found"


def test_a_stream_ends_with_its_last_reader_unless_told_otherwise(folder: Path) -> None:
    with ServerProcess.toy(folder, SLOW, max_model_len=4096) as server:
        server.wait_until_ready()
        body = {"prompt": "x", "max_tokens": 3000}
        first, second = Reader(), Reader()
        with httpx.stream("POST", f"{server.url}/v1/completions", json={**body, "stream": True}) as answer:
            asked = answer.iter_lines()  # kept: the connection ends with it
            while len(first.texts.get(0, "")) < 10:
                first.take(next(asked))
            second.id = first.id
            with httpx.stream("GET", f"{server.url}/v1/streams/{first.id}", timeout=PATIENCE) as again:
                lines = again.iter_lines()
                while len(second.texts.get(0, "")) < 20:
                    second.take(next(lines))
                answer.close()
                while len(second.texts[0]) < 100:  # it goes on for the one who is left
                    second.take(next(lines))
        server.wait_until_idle()
        first.go_on(server)
        assert first.ends == {0: "length"} and len(first.texts[0]) < 3000


@pytest.mark.parametrize("durability", ["async", "strict"])
def test_after_a_kill_the_next_server_goes_on(folder: Path, durability: str) -> None:
    port, log = free_port(), str(folder / "log")

    def start() -> ServerProcess:
        options = {"port": port, "log_dir": log, "durability": durability, "max_num_seqs": 8}
        return ServerProcess.toy(folder, SLOW, **options)

    with start() as server:
        server.wait_until_ready()
        expected = [results(ask(server, *asked)) for asked in ASKED]
        ended = ask(server, *ASKED[0])
        readers = [Reader() for _ in ASKED]
        parts = [
            threading.Thread(target=_read_until_it_falls, args=(server, reader, *asked))
            for reader, asked in zip(readers, ASKED, strict=True)
        ]
        for part in parts:
            part.start()
        eventually(lambda: all(sum(map(len, reader.texts.values())) > 12 for reader in readers))
        engine = engine_of(server)
        server.process.kill()
        server.process.wait()
        for part in parts:
            part.join(PATIENCE)
        eventually(lambda: not alive(engine))
    assert not any(reader.done for reader in readers)
    with start() as server:
        server.wait_until_ready()
        assert [results(reader.go_on(server)) for reader in readers] == expected
        again = Reader()
        again.id = ended.id
        assert results(again.go_on(server)) == results(ended)
        server.wait_until_idle()
        assert server.interrupt() == 0
        assert "Traceback" not in server.stderr


def _read_until_it_falls(server: ServerProcess, reader: Reader, path: str, body: dict[str, Any]) -> None:
    whole = {**body, "stream": True, "stream_options": {"include_usage": True}}
    try:
        with httpx.stream("POST", f"{server.url}{path}", json=whole, timeout=PATIENCE) as answer:
            reader.read(answer)
    except httpx.TransportError:
        pass
