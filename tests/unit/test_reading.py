"""Reading an answer from any place on gives the rest of the same text, whenever and however it came."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leftfold.server.choices import Choice
from leftfold.server.errors import ApiError
from leftfold.server.generation import Delta
from leftfold.server.group import EngineGone, EngineStopping, Group
from leftfold.server.kept import Kept, Terms
from leftfold.server.reading import Reading, cursor, place
from leftfold.server.wire import Output
from leftfold.text import AnswerText, Tokenizer, load_tokenizer
from tests.tiny_folder import write_tokenizer
from tests.unit.test_kept_answers import Nobody

TEXT = "Zürich, 東京 and 🌍🌎 — that is all"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tiny"), {}))


class Told:
    """An answer of `n` choices that the test tells token by token."""

    def __init__(self, tokenizer: Tokenizer, n: int = 1, **more: Any) -> None:
        self.tokens = tokenizer.encode(TEXT)
        self.tokenizer = tokenizer
        self.terms = Terms(id="a", base="a", kind="text", created=1, prompts=[2], n=n, **more)
        self.group = Group(Nobody(), [Choice(f"a-{i}", 2) for i in range(n)])
        self.kept = Kept(self.terms, self.group)

    def tell(self, count: int, end: str | None = None, choice: int = 0, error: Any = None) -> Told:
        of = self.group.choices[choice]
        at = of.expected - of.first
        usage = {"cached_tokens": 1} if end else None
        self.group.put(Output(of.rid, 0, of.expected, self.tokens[at : at + count], end, error, usage, "v2"))
        return self

    def reading(self, have: Any = None) -> Reading:
        return Reading(self.kept, self.tokenizer, have)


def text_of(deltas: list[Delta], choice: int = 0) -> str:
    return "".join(delta.text for delta in deltas if delta.index == choice)


@settings(deadline=None)
@given(data=st.data())
def test_from_any_place_it_is_the_rest(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """What a reader has up to a place, and what it gets from there, is the whole; tokens as well as text."""
    stops = data.draw(st.sampled_from([(), (" and",), ("京",), ("🌎", "x")]))
    told = Told(tokenizer, stops=stops)
    end = data.draw(st.sampled_from(["length", "stop", "abort", "deadline"]))
    whole = list(told.tell(len(told.tokens), end).reading().there())
    counted = sum(len(delta.tokens) for delta in whole)
    have = data.draw(st.integers(0, counted + 1))
    if have == counted < len(told.tokens):
        have += 1  # the token that completes a stop string comes with the end: its place has no other id
    everything = list(told.reading([have]).there())
    behind = [delta for delta in everything if delta.at > have]  # as whoever sends it leaves out what is there
    assert len(everything) - len(behind) == (have > 0), "and that comes in one piece"
    assert _shown(tokenizer, told, have) + text_of(behind) == text_of(whole) == text_of(everything)
    if have > counted:
        assert behind == [], "it has the end as well"
    else:
        assert [t for d in behind for t in d.tokens] == told.tokens[have:counted]
        assert behind[-1].finish_reason == whole[-1].finish_reason and behind[-1].at == counted + 1


def _shown(tokenizer: Tokenizer, told: Told, have: int) -> str:
    """What a reader sees of the first `have` tokens, or of all with the end."""
    text = AnswerText(tokenizer, told.terms.stops)
    over = have > len(told.tokens)
    return text.take(told.tokens[:have], "length" if over else None)


@settings(deadline=None)
@given(pieces=st.lists(st.integers(1, 5), min_size=1, max_size=30), n=st.integers(1, 3))
def test_however_it_comes_the_readers_get_the_same(tokenizer: Tokenizer, pieces: list[int], n: int) -> None:
    async def scenario() -> None:
        told = Told(tokenizer, n)
        early: list[list[Delta]] = [[], []]

        async def read(deltas: list[Delta]) -> None:
            deltas += [delta async for delta in told.reading()]

        readers = [asyncio.create_task(read(deltas)) for deltas in early]
        for piece in pieces:
            for choice in range(n):
                told.tell(piece, choice=choice)
            await asyncio.sleep(0)
        for choice in range(n):
            told.tell(len(told.tokens), "length", choice)
        await asyncio.wait_for(asyncio.gather(*readers), 20)
        late = list(told.reading().there())
        for choice in range(n):
            texts = {text_of(deltas, choice) for deltas in (*early, late)}
            assert texts == {TEXT}
        assert told.group.listeners == []

    asyncio.run(scenario())


def test_there_is_what_has_come_and_no_more(tokenizer: Tokenizer) -> None:
    told = Told(tokenizer, n=2)
    reading = told.reading()
    assert list(reading.there()) == []
    told.tell(3)
    (delta,) = reading.there()
    assert (delta.index, len(delta.tokens), delta.at, delta.finish_reason) == (0, 3, 3, None)
    assert list(reading.there()) == []
    assert reading.version == "v2"


def test_usage_counts_what_is_in_the_text(tokenizer: Tokenizer) -> None:
    told = Told(tokenizer, stops=["and"])
    told.tell(len(told.tokens), "length")
    reading = told.reading()
    list(reading.there())
    upto = len(tokenizer.encode(TEXT[: TEXT.index("and") + 3]))
    assert reading.usage["completion_tokens"] == upto and reading.usage["prompt_tokens"] == 2
    assert reading.usage["prompt_tokens_details"] == {"cached_tokens": 1}


def test_after_a_stop_string_its_end_is_waited_for(tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        told = Told(tokenizer, stops=["and"])
        reading, deltas = told.reading(), []

        async def read() -> None:
            deltas.extend([delta async for delta in reading])

        task = asyncio.create_task(read())
        told.tell(len(told.tokens) - 2)
        for _ in range(10):
            await asyncio.sleep(0)
        assert not task.done()
        told.tell(1, "stop")
        await asyncio.wait_for(task, 20)
        assert text_of(deltas) == TEXT[: TEXT.index("and")] and deltas[-1].finish_reason == "stop"
        assert reading.usage["prompt_tokens_details"] == {"cached_tokens": 1}

    asyncio.run(scenario())


@pytest.mark.parametrize(("happens", "status", "heard"), [
    (lambda told: told.tell(0, "error", error={"code": "failed", "text": "lost"}), 500, 0),
    (lambda told: told.tell(0, "error", error={"code": "queue_full", "text": "full"}), 503, 0),
    (lambda told: told.group.put(EngineGone("it fell over")), 500, 4),
    (lambda told: told.group.put(EngineStopping("stopping")), 503, 4),
])  # fmt: skip
@pytest.mark.parametrize("waiting", [False, True])
def test_what_ended_it_is_raised(tokenizer: Tokenizer, happens: Any, status: int, heard: int, waiting: bool) -> None:
    """An error that the engine gave replaces the answer; one that is gone has said what it said."""
    told, deltas = Told(tokenizer).tell(4), list[Delta]()
    happens(told)

    async def read() -> None:
        async for delta in told.reading():
            deltas.append(delta)

    def look() -> None:
        for delta in told.reading().there():
            deltas.append(delta)

    with pytest.raises(ApiError) as caught:
        asyncio.run(read()) if waiting else look()
    assert caught.value.status == status
    assert sum(len(delta.tokens) for delta in deltas) == heard


@pytest.mark.parametrize(("text", "count", "have"), [
    (None, 1, None), ("", 2, None), ("0", 1, [0]), ("7", 1, [7]), ("7.3.9", 3, [7, 3, 9]),
])  # fmt: skip
def test_places(text: str | None, count: int, have: list[int] | None) -> None:
    assert cursor(text, count, "from") == have
    if have is not None:
        assert place(have) == text


@pytest.mark.parametrize(("text", "count"), [
    ("x", 1), ("-1", 1), ("1.2", 1), ("1", 2), ("1..2", 3), ("1e3", 1), ("٣", 1), ("9" * 10, 1), (" 1", 1), ("1.", 2),
])  # fmt: skip
def test_places_that_are_none(text: str, count: int) -> None:
    with pytest.raises(ApiError) as caught:
        cursor(text, count, "from")
    assert (caught.value.status, caught.value.param) == (400, "from")
