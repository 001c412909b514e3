"""`Idempotency-Key`: asked again under one key, one answer comes, made once; refusals and aborts are no answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from leftfold.server.answer_file import AnswerFile
from leftfold.server.idempotency import HEADER, REPLAYED
from leftfold.server.wire import Output
from tests.instant_engine import App

ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": ["hello", "there"], "n": 2, "max_tokens": 6, "echo": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "n": 3, "max_tokens": 6}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 6}),
]
ASKED = {"prompt": "hi", "max_tokens": 6}


@pytest.fixture
def app(tmp_path: Path) -> App:
    return App(tmp_path)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await asyncio.wait_for(scenario(), 60)

    asyncio.run(main())


async def ask(app: App, body: Any, key: str = "k", path: str = "/v1/completions", **headers: str) -> httpx.Response:
    return await app.send("POST", path, json=body, headers={HEADER: key, **headers})


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0)


class Client:
    """A client that can hang up; `task` ends when the application is done with it."""

    def __init__(self, app: App, body: Any, key: str = "k") -> None:
        self.sent: list[Any] = []
        self._gone = asyncio.Event()
        self._body: list[bytes] = [json.dumps(body).encode()]
        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "root_path": "",
            "headers": [(HEADER.lower().encode(), key.encode())], "http_version": "1.1", "scheme": "http",
            "server": ("toy", 80), "client": ("c", 1),
        }  # fmt: skip
        self.task = asyncio.create_task(app.app(scope, self._receive, self._send))

    async def hang_up(self) -> None:
        self._gone.set()
        await self.task

    async def _receive(self) -> Any:
        if self._body:
            return {"type": "http.request", "body": self._body.pop(), "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)


def say(app: App, text: str, end: str | None = None, number: int = 0, at: int = 2) -> None:
    """What the silent engine answers the request of a number with; prompts have two tokens."""
    group, rid = app.engine.groups[number], f"r{number}"
    group.put(Output(rid, 0, at, app.engine.tokenizer.encode(text), end, None, None))


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_the_same_answer_comes_again(app: App, path: str, body: dict[str, Any], stream: bool) -> None:
    async def scenario() -> None:
        first = await ask(app, {**body, "stream": stream}, path=path)
        admitted = len(app.engine.admitted)
        again = await ask(app, dict(reversed({**body, "stream": stream}.items())), path=path)
        other = await ask(app, {**body, "stream": stream}, key="another", path=path)
        assert (first.status_code, again.status_code, other.status_code) == (200, 200, 200), first.text
        assert joined(first) == joined(again)
        assert REPLAYED not in first.headers and again.headers[REPLAYED] == "true"
        assert len(app.engine.admitted) == 2 * admitted  # twice for two keys
        assert REPLAYED not in other.headers

    run(scenario)


def joined(answer: httpx.Response) -> Any:
    """All that an answer says, however a stream of it was cut."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return answer.json()
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    texts: dict[int, str] = {}
    for choice in (choice for event in events for choice in event.get("choices", ())):
        said = choice.get("text") or choice.get("delta", {}).get("content") or ""
        texts[choice["index"]] = texts.get(choice["index"], "") + said
    said = "".join(event["delta"] for event in events if event.get("type") == "response.output_text.delta")
    (name,) = {event.get("id") or event.get("response", {}).get("id") for event in events} - {None}
    last = [line for line in answer.text.splitlines() if line.startswith("id: ")][-1]
    return name, texts, said, last


@pytest.mark.parametrize("stream", [False, True])
def test_the_answer_is_that_of_a_request_without_a_key(app: App, stream: bool) -> None:
    more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    for path, body in ROUTES[:2]:
        for extra in ({}, {"stop": "de"}, {"logprobs": True if "chat" in path else 1}):
            asked = {**body, **extra, **more}
            key = json.dumps(asked)[:200].replace(" ", "").replace('"', "")

            async def scenario(path: str = path, asked: Any = asked, key: str = key) -> None:
                named, plain = await ask(app, asked, key, path), await app.send("POST", path, json=asked)
                if stream:
                    assert joined(named)[1:] == joined(plain)[1:]
                    assert last_of(named) == last_of(plain)
                else:
                    assert unnamed(named) == unnamed(plain)

            run(scenario)


def unnamed(answer: httpx.Response) -> Any:
    return {**answer.json(), "id": "", "created": 0}


def last_of(answer: httpx.Response) -> Any:
    """The last chunk, which has the usage."""
    chunk = json.loads([line for line in answer.text.splitlines() if line.startswith("data: {")][-1][6:])
    return {**chunk, "id": "", "created": 0}


def test_asked_at_once_it_is_admitted_once(app: App) -> None:
    async def scenario() -> None:
        app.engine.silent = True
        asking = [asyncio.create_task(ask(app, ASKED)) for _ in range(5)]
        await until(lambda: app.engine.groups)
        for _ in range(50):
            await asyncio.sleep(0)
        say(app, "ab")
        late = asyncio.create_task(ask(app, ASKED))
        for _ in range(50):
            await asyncio.sleep(0)
        say(app, "cd", "length", at=4)
        answers = [await one for one in (*asking, late)]
        assert len(app.engine.groups) == 1
        assert {answer.json()["choices"][0]["text"] for answer in answers} == {"abcd"}
        assert len({answer.json()["id"] for answer in answers}) == 1
        assert sum(REPLAYED in answer.headers for answer in answers) == 5

    run(scenario)


def test_who_comes_while_the_first_is_refused_asks_itself(app: App) -> None:
    async def scenario() -> None:
        admit, tries = app.engine.admit, []

        def full_at_first(*asked: Any) -> Any:
            tries.append(asked)
            app.engine.error = {"code": "queue_full", "text": "the queue is full"} if len(tries) == 1 else None
            return admit(*asked)

        app.engine.admit = full_at_first  # type: ignore[method-assign]
        for stream in (False, True):
            tries.clear()
            answers = await asyncio.gather(*(ask(app, {**ASKED, "stream": stream}, f"s{stream}") for _ in range(3)))
            assert sorted(answer.status_code for answer in answers) == [200, 200, 503]
            assert len(tries) == 2

    run(scenario)


def test_another_body_or_route_under_a_key_is_an_error_that_names_it(app: App) -> None:
    async def scenario() -> None:
        assert (await ask(app, ASKED)).status_code == 200
        for path, body in (("/v1/completions", {**ASKED, "max_tokens": 7}), *ROUTES[1:]):
            wrong = await ask(app, body, path=path)
            error = wrong.json()["error"]
            assert (wrong.status_code, error["param"], error["code"]) == (422, HEADER, "idempotency_key_reused")
        assert len(app.engine.groups) == 1

    run(scenario)


@pytest.mark.parametrize("key", [b"", b" ", b"a b", b"x" * 256, "é".encode(), b'a"b', b'""', b'"a', b'a"'])
def test_a_key_that_is_none(app: App, key: bytes) -> None:
    answer = app.post("/v1/completions", ASKED, headers={HEADER.encode(): key})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, HEADER)


def test_two_keys_are_none(app: App) -> None:
    answer = app.post("/v1/completions", ASKED, headers=[(HEADER, "a"), (HEADER, "b")])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, HEADER)
    assert not app.engine.groups


def test_a_body_that_cannot_be_compared(app: App) -> None:
    deep: Any = []
    for _ in range(400):
        deep = [deep]
    body = {**ASKED, "user": deep}
    assert app.post("/v1/completions", body).status_code == 200
    answer = app.post("/v1/completions", body, headers={HEADER: "k"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "body")


def test_of_one_who_is_cut_off_while_it_is_announced_nothing_stays(app: App, tmp_path: Path) -> None:
    async def scenario() -> None:
        file = app.state.shelf.file = AnswerFile(tmp_path / "answers.jsonl", False, 10)
        client = Client(app, ASKED)
        await until(lambda: file._places)
        client.task.cancel()
        await asyncio.gather(client.task, return_exceptions=True)
        await file.close()
        assert not app.engine.groups and not file._places and file._live == 0
        assert file.read(0) == []

    run(scenario)


def test_quotes_are_no_part_of_a_key(app: App) -> None:
    async def scenario() -> None:
        answers = [await ask(app, ASKED, key) for key in ('"k-1"', "k-1")]
        assert answers[0].json() == answers[1].json()

    run(scenario)


def test_keys_belong_to_an_api_key(tmp_path: Path) -> None:
    app = App(tmp_path, api_key="one", admin_api_key="two")

    async def scenario() -> None:
        told = ("Bearer one", "Bearer two", "Bearer one", "bearer  one")
        ids = [(await ask(app, ASKED, Authorization=who)).json()["id"] for who in told]
        assert ids[0] == ids[2] == ids[3] != ids[1]

    run(scenario)


def test_without_api_keys_all_clients_are_one(app: App) -> None:
    async def scenario() -> None:
        answers = [await ask(app, ASKED, Authorization=f"Bearer {who}") for who in ("one", "two")]
        assert answers[0].json() == answers[1].json()

    run(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_what_its_client_gave_up_is_asked_anew(app: App, stream: bool) -> None:
    async def scenario() -> None:
        app.engine.silent = True
        body = {**ASKED, "stream": stream}
        client = Client(app, body)
        await until(lambda: app.engine.groups)
        say(app, "ab")
        await asyncio.sleep(0)
        await client.hang_up()
        assert [abort.reason for abort in app.engine.aborted] == ["client_gone"]
        again = asyncio.create_task(ask(app, body))  # the engine has not said yet that it has ended
        await until(lambda: len(app.engine.groups) == 2)
        say(app, "", "abort", at=4)
        say(app, "xyz", "length", number=1)
        assert REPLAYED not in (await again).headers and "xyz" in (await again).text
        third = await ask(app, body)
        assert third.headers[REPLAYED] == "true" and "xyz" in third.text

    run(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_it_goes_on_while_one_of_them_waits(app: App, stream: bool) -> None:
    async def scenario() -> None:
        app.engine.silent = True
        body = {**ASKED, "stream": stream}
        first = Client(app, body)
        await until(lambda: app.engine.groups)
        second = asyncio.create_task(ask(app, body))
        for _ in range(50):
            await asyncio.sleep(0)
        await first.hang_up()
        assert app.engine.aborted == []
        say(app, "abc", "length")
        assert "abc" in (await second).text

    run(scenario)


def test_told_to_continue_it_is_there_for_who_comes_back(tmp_path: Path) -> None:
    app = App(tmp_path, on_disconnect="continue")

    async def scenario() -> None:
        app.engine.silent = True
        for stream in (False, True):
            number, body, key = len(app.engine.groups), {**ASKED, "stream": stream}, f"key-{stream}"
            client = Client(app, body, key)
            await until(lambda count=number: len(app.engine.groups) > count)
            await client.hang_up()
            say(app, "ab", number=number)
            again = asyncio.create_task(ask(app, body, key))
            for _ in range(50):
                await asyncio.sleep(0)
            say(app, "c", "length", number=number, at=4)
            assert (await again).headers[REPLAYED] == "true" and joined(await again)
        assert len(app.engine.groups) == 2 and app.engine.aborted == []

    run(scenario)


@pytest.mark.parametrize(("end", "text", "again"), [
    ("abort", "ab", False), ("abort", "", False), ("deadline", "", False), ("deadline", "ab", True),
    ("length", "", True), ("stop", "ab", True),
])  # fmt: skip
def test_what_counts_as_an_answer(app: App, end: str, text: str, again: bool) -> None:
    async def scenario() -> None:
        app.engine.silent = True
        first = asyncio.create_task(ask(app, ASKED))
        await until(lambda: app.engine.groups)
        say(app, text, end)
        assert (await first).status_code == (504 if (end, text) == ("deadline", "") else 200)
        second = asyncio.create_task(ask(app, ASKED))
        if not again:
            await until(lambda: len(app.engine.groups) == 2)
            say(app, "xy", "length", number=1)
        assert (REPLAYED in (await second).headers) == again
        assert len(app.engine.groups) == 2 - again

    run(scenario)


def test_a_key_is_remembered_as_long_as_its_answer(app: App) -> None:
    now = [1000.0]
    app.state.shelf._clock = lambda: now[0]

    async def scenario() -> None:
        first = (await ask(app, ASKED)).json()["id"]
        now[0] += app.state.options.retain_responses - 1
        assert (await ask(app, ASKED)).json()["id"] == first
        now[0] += 2
        anew = await ask(app, {**ASKED, "max_tokens": 3})
        assert anew.status_code == 200 and anew.json()["id"] != first
        assert len(app.state.shelf._keys) == len(app.state.shelf._answers) == 1

    run(scenario)


def test_nothing_stays_of_those_who_asked_at_once(app: App) -> None:
    async def scenario() -> None:
        await asyncio.gather(*(ask(app, ASKED, f"k{number % 4}") for number in range(12)))
        assert len(app.engine.groups) == 4
        assert not app.state.turns._locks

    run(scenario)


def test_a_response_in_the_background_is_made_once(app: App) -> None:
    confirmed: list[Any] = []

    async def confirm(group: Any) -> None:
        confirmed.append(group)

    app.engine.confirm = confirm  # type: ignore[attr-defined]
    body = {**ROUTES[2][1], "background": True}

    async def scenario() -> None:
        app.engine.silent = True
        first, again = [(await ask(app, body, path="/v1/responses")).json() for _ in range(2)]
        assert first["id"] == again["id"] and first["status"] == again["status"] == "queued"
        assert len(app.engine.groups) == 1 and len(confirmed) == 2
        prompt = len(app.engine.admitted[0]["prompt"])
        say(app, "abc", "stop", at=prompt)
        third = (await ask(app, body, path="/v1/responses")).json()
        assert (third["id"], third["status"]) == (first["id"], "completed")

    run(scenario)
