"""Nobody holds up the others: long texts, many at once, large bodies, clients that neither send nor read."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from leftfold.server import app as server_app
from leftfold.server import bodies, errors
from leftfold.server.errors import ApiError, shown
from leftfold.server.texts import Texts
from leftfold.server.workers import Workers
from leftfold.text import Tokenizer, template_limits
from tests.instant_engine import INFO, App

ROOM = min(INFO["max_model_len"] - 1, INFO["num_pages"] * INFO["page_size"])


class Stuck:
    """Encodes, decodes and renders only once it is let go."""

    def __init__(self, app: App, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.begun = threading.Event()
        for name in ("encode", "decode", "render_chat"):
            monkeypatch.setattr(Tokenizer, name, self._late(getattr(Tokenizer, name)))

    def _late(self, method: Any) -> Any:
        def late(*args: Any, **kwargs: Any) -> Any:
            self.begun.set()
            self.go.wait()
            return method(*args, **kwargs)

        return late


@pytest.fixture
def app(tmp_path: Path) -> App:
    return App(tmp_path)


@pytest.fixture
def stuck(app: App, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stuck]:
    stuck = Stuck(app, monkeypatch)
    yield stuck
    stuck.go.set()


HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/completions", {"prompt": "hello", "max_tokens": 1}),
    ("/v1/completions", {"prompt": [1, 2], "echo": True, "max_tokens": 1}),
    ("/v1/chat/completions", {"messages": HI, "max_tokens": 1}),
    ("/tokenize", {"prompt": "hello"}),
    ("/tokenize", {"messages": HI}),
    ("/detokenize", {"tokens": [1, 2]}),
])  # fmt: skip
def test_the_server_answers_while_a_text_is_encoded(app: App, stuck: Stuck, path: str, body: dict[str, Any]) -> None:
    async def scenario() -> None:
        app.engine.silent = True
        asked = asyncio.create_task(app.send("POST", path, json=body))
        while not stuck.begun.is_set():
            await asyncio.sleep(0)
        assert (await app.send("GET", "/health")).status_code == 200
        assert not asked.done()
        stuck.go.set()
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)

    asyncio.run(scenario())


def test_short_texts_pass_long_ones(app: App, stuck: Stuck, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = Texts(app.engine.tokenizer)

    async def scenario() -> None:
        long = asyncio.create_task(texts.encode("x" * 20_000, 10**6, "prompt"))
        while not stuck.begun.is_set():
            await asyncio.sleep(0)
        monkeypatch.setattr(Tokenizer, "encode", lambda *_, **__: [7])
        assert await texts.encode("y", 10**6, "prompt") == [7]
        assert not long.done()
        stuck.go.set()
        assert len(await long) == 20_000

    asyncio.run(scenario())


def test_a_text_that_no_prompt_can_be_is_not_even_read(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = ROOM * app.engine.tokenizer.longest_piece
    assert app.complete(prompt="x" * longest).json()["error"]["code"] == "context_length_exceeded"  # by its tokens
    monkeypatch.setattr(Tokenizer, "encode", lambda *_, **__: pytest.fail("it was read"))
    long = "x" * (longest + 1)
    for path, body in (
        ("/v1/completions", {"prompt": long}),
        ("/v1/completions", {"prompt": [long, "a"]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]}),
        ("/tokenize", {"prompt": long}),
    ):
        answer = app.post(path, body)
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"


def test_only_so_many_ids_are_decoded_at_a_time(app: App) -> None:
    answer = app.post("/detokenize", {"tokens": [1] * (2**18 + 1)})
    assert answer.status_code == 400 and "at most 262144" in answer.json()["error"]["message"]
    assert len(app.post("/detokenize", {"tokens": [70] * 2**18}).json()["prompt"]) == 2**18


def test_every_token_is_within_the_longest_piece(app: App) -> None:
    tokenizer = app.engine.tokenizer
    assert tokenizer.longest_piece == max(len(tokenizer.backend.id_to_token(i)) for i in range(tokenizer.vocab_size))


def test_workers_are_few_and_what_waits_is_bounded() -> None:
    go, running, most = threading.Event(), set(), []

    def work() -> int:
        running.add(threading.get_ident())
        most.append(len(running))
        go.wait()
        running.discard(threading.get_ident())
        return 1

    async def scenario() -> None:
        workers = Workers("work", count=2, most=5)
        tasks = [asyncio.create_task(workers.run(work)) for _ in range(5)]
        while len(running) < 2:
            await asyncio.sleep(0)
        with pytest.raises(ApiError) as refused:
            await workers.run(work)
        assert refused.value.status == 503
        tasks[4].cancel()  # it has not begun, and never will
        await asyncio.gather(tasks[4], return_exceptions=True)
        go.set()
        assert await asyncio.gather(*tasks[:4]) == [1] * 4
        with pytest.raises(ZeroDivisionError):
            await workers.run(lambda: 1 // 0)
        assert await workers.run(lambda: 2) == 2

    asyncio.run(scenario())
    assert max(most) == 2 and len(most) == 4


def test_a_template_that_takes_too_long_is_a_400(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.0)
    answer = app.chat()
    assert answer.status_code == 400 and "too long" in answer.json()["error"]["message"]


# Bodies and answers


def test_bodies_are_bounded_together_and_give_their_room_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = App(tmp_path, max_body_bytes=1000)
    monkeypatch.setattr(bodies, "_BODIES", 2)
    assert app.complete(max_tokens=1).status_code == 200
    assert app.state.held_bytes == 0
    app.state.held_bytes = 1990  # of others
    answer = app.complete(max_tokens=1)
    assert answer.status_code == 503 and answer.headers["retry-after"]
    assert app.state.held_bytes == 1990


def test_a_body_that_never_comes_is_given_up(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_PIECE_SECONDS", 0.01)

    async def scenario() -> None:
        never: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        await app.app(scope("/v1/completions"), lambda: never, send)
        assert sent[0]["status"] == 408

    asyncio.run(scenario())


def scope(path: str) -> dict[str, Any]:
    return {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "root_path": "", "scheme": "http",
        "query_string": b"", "headers": [], "server": ("toy", 80), "client": ("c", 1), "http_version": "1.1",
    }  # fmt: skip


def test_a_client_that_does_not_read_ends_its_generation(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_app, "_SEND_SECONDS", 0.01)
    app.engine.silent = True  # nothing ends by itself

    async def scenario() -> None:
        body = b'{"prompt": "hi", "stream": true}'
        pieces = [{"type": "http.request", "body": body, "more_body": False}]
        never: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        async def receive() -> Any:
            return pieces.pop() if pieces else await never

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()  # as with a full socket

        task = asyncio.create_task(app.app(scope("/v1/completions"), receive, send))
        while not app.engine.groups:
            await asyncio.sleep(0)
        app.engine.groups[0].put(app.engine.output("a"))
        await task
        assert app.state.idle.is_set()
        assert [abort.reason for abort in app.engine.aborted] == ["client_gone"]

    asyncio.run(scenario())


def test_only_so_many_requests_are_answered_at_a_time(tmp_path: Path, stuck: Stuck) -> None:
    app = App(tmp_path / "one", max_open_requests=1)

    async def scenario() -> None:
        first = asyncio.create_task(app.send("POST", "/tokenize", json={"prompt": "x"}))
        while not stuck.begun.is_set():
            await asyncio.sleep(0)
        assert (await app.send("POST", "/tokenize", json={"prompt": "x"})).status_code == 503
        assert (await app.send("GET", "/health")).status_code == 200
        stuck.go.set()
        assert (await first).status_code == 200
        assert (await app.send("POST", "/tokenize", json={"prompt": "x"})).status_code == 200

    asyncio.run(scenario())


@pytest.mark.parametrize("value", [
    "x" * 10**6, ["x" * 10**6] * 10**4, {"a" * 10**6: ["b"] * 10**6, **{str(i): i for i in range(10**5)}}, b"x" * 10**6,
])  # fmt: skip
def test_values_in_messages_are_short_and_only_begun_to_be_read(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    monkeypatch.setattr(errors, "repr", lambda part: read.append(len(part)) or repr(part), raising=False)
    assert len(shown(value)) <= 80
    assert all(size <= 160 for size in read)
    assert (shown({"a": [1, "b"]}), shown("x\n"), shown(None)) == ("{'a': [1, 'b']}", "'x\\n'", "None")
