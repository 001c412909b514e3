"""Answers that are kept: for how long, how many, under which keys; and the file that outlives the process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from leftfold.server import answer_file, kept
from leftfold.server.answer_file import AnswerFile
from leftfold.server.choices import Choice
from leftfold.server.group import EngineGone, Group
from leftfold.server.kept import Kept, Shelf, Terms
from leftfold.server.wire import Output


class Nobody:
    """What a group needs of an engine; it remembers who was aborted."""

    def __init__(self) -> None:
        self.ended: list[Any] = []

    def end(self, abort: Any) -> None:
        self.ended.append((abort.rid, abort.reason))

    def ask_again(self, choice: Choice) -> None:
        raise AssertionError("nothing is missing here")

    def forget(self, rid: str) -> None:
        pass


def terms(name: str, n: int = 1, **more: Any) -> Terms:
    return Terms(id=name, base=name, kind="text", created=1, prompts=[2], n=n, **more)


def made(name: str, n: int = 1, **more: Any) -> Kept:
    """An answer that has just begun."""
    return Kept(terms(name, n, **more), Group(Nobody(), [Choice(f"{name}-{i}", 2) for i in range(n)]))


def say(answer: Kept, tokens: int = 1, end: str | None = None, choice: int = 0, error: Any = None) -> Kept:
    of = answer.group.choices[choice]
    answer.group.put(Output(of.rid, 0, of.expected, [7] * tokens, end, error, None))
    return answer


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


# The shelf


def test_an_answer_is_kept_until_so_many_seconds_after_its_end() -> None:
    clock = Clock()
    shelf = Shelf(10, clock)
    answer = made("a")
    shelf.put(answer)
    clock.now += 1000  # while it is made it stays
    assert shelf.get("a") is answer
    say(answer, end="length")
    clock.now += 9
    assert shelf.get("a") is answer
    clock.now += 2
    assert shelf.get("a") is None


def test_of_too_many_the_oldest_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MOST_ANSWERS", 3)
    monkeypatch.setattr(kept, "MOST_TOKENS", 20)
    shelf = Shelf(10, Clock())
    for name in "abcde":
        shelf.put(say(made(name), 1, "length"))
    shelf.put(made("live"))
    assert [name for name in (*"abcde", "live") if shelf.get(name)] == ["c", "d", "e", "live"]
    shelf.put(say(made("long"), 19, "length"))
    assert [name for name in (*"abcde", "live", "long") if shelf.get(name)] == ["e", "live", "long"]
    shelf.drop("long")
    shelf.put(say(made("other"), 15, "length"))
    assert shelf.get("e") is not None, "what was dropped counts no more"


def test_a_dropped_answer_is_not_put_back_by_its_end() -> None:
    shelf, answer = Shelf(10, Clock()), made("a")
    shelf.put(answer)
    shelf.drop("a")
    say(answer, end="length")
    assert shelf.get("a") is None and not shelf._ended and shelf._tokens == 0


@pytest.mark.parametrize(("happens", "void"), [
    (lambda a: None, False),
    (lambda a: say(a, end="length"), False),
    (lambda a: say(say(a, end="stop"), choice=1, end="length"), False),
    (lambda a: say(a, end="abort"), True),
    (lambda a: say(say(a, end="length"), choice=1, end="abort"), True),
    (lambda a: say(a, 0, "error", error={"code": "failed", "text": "x"}), True),
    (lambda a: say(a, 0, "deadline"), True),
    (lambda a: say(a, 1, "deadline"), False),
    (lambda a: a.group.abort("client_gone"), True),
    (lambda a: say(say(a, end="length"), choice=1, end="length").group.abort("late"), False),
    (lambda a: a.group.put(EngineGone("it died")), True),
])  # fmt: skip
def test_what_is_no_answer_is_not_found_by_its_key(happens: Callable[[Kept], Any], void: bool) -> None:
    shelf, answer = Shelf(10, Clock()), made("a", n=2, key="k")
    shelf.put(answer)
    happens(answer)
    assert answer.void == void
    assert (shelf.asked("k") is None) == void
    assert shelf.get("a") is answer, "by its id it is"


def test_a_key_goes_over_to_the_next_answer_and_goes_with_it() -> None:
    clock = Clock()
    shelf, first, second = Shelf(10, clock), made("a", key="k"), made("b", key="k")
    shelf.put(first)
    say(first, end="abort")
    shelf.put(second)
    assert shelf.asked("k") is second
    say(second, end="length")
    clock.now += 5
    shelf.put(say(made("c", key="other"), end="length"))
    clock.now += 6  # the first two have been kept long enough
    assert shelf.asked("k") is None and list(shelf._keys) == ["other"]


def test_an_older_answer_does_not_take_the_key_of_a_newer_one() -> None:
    shelf, newer, older = Shelf(10, Clock()), made("b", key="k"), made("a", key="k")
    shelf.put(newer)
    shelf.put(older)
    assert shelf.asked("k") is newer
    shelf.drop("a")
    assert shelf.asked("k") is newer


def test_the_last_reader_who_leaves_before_the_end_is_noticed() -> None:
    left: list[str] = []
    answer = made("a")
    answer.leave = lambda: left.append("a")
    answer.join()
    answer.join()
    answer.part()
    assert left == []
    answer.part()
    assert left == ["a"]
    answer.join()
    say(answer, end="length")
    answer.part()
    assert left == ["a"]


# The file


def in_loop(work: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await asyncio.wait_for(work(), 60)

    asyncio.run(main())


def found(path: Path, now: float = 1000.0, seconds: float = 10.0) -> dict[str, Any]:
    """What the next process finds: the end, and the tokens of each choice."""
    return {
        one.id: (at, [choice.tokens.tolist() for choice in choices])
        for one, choices, at in AnswerFile(path, False, seconds).read(now)
    }


@pytest.mark.parametrize("durable", [False, True])
def test_the_next_process_finds_what_lives_and_what_is_still_kept(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "answers.jsonl"

    async def work() -> None:
        shelf = Shelf(10, Clock())
        file = shelf.file = AnswerFile(path, durable, 10)
        for name in ("live", "ended", "old", "gone"):
            answer = made(name, n=2, key=f"key of {name}")
            await shelf.announce(answer.terms)
            shelf.put(answer)
            if name != "live":
                shelf._clock = lambda name=name: 980.0 if name == "old" else 1000.0
                for choice in range(2):
                    say(answer, 3 + choice, "length", choice)
        shelf.drop("gone")
        await file.close()

    in_loop(work)
    assert oct(path.stat().st_mode & 0o777) == "0o600"
    assert found(path) == {"live": (None, [[], []]), "ended": (1000.0, [[7] * 3, [7] * 4])}
    (live, _, _), (ended, choices, _) = AnswerFile(path, durable, 10).read(1000.0)
    assert (live.key, ended.key) == ("key of live", "key of ended")
    assert [choice.end.finish_reason for choice in choices if choice.end] == ["length", "length"]
    assert len(path.read_bytes().splitlines()) == 3, "the file was written anew, without what is not kept"


def test_lines_that_cannot_be_read_are_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "answers.jsonl"
    good = orjson.dumps({"open": terms("a").to_dict()})
    wrong = [
        b"{", b"[]", b"7", b'{"open": {"id": "x"}}', b'{"end": "a", "at": 1, "choices": []}', b'{"what": 1}',
        b'{"open": {"id": "b", "base": "b", "kind": "text", "created": 1, "prompts": [1], "new": 2}}',
    ]  # fmt: skip
    path.write_bytes(b"\n".join([*wrong, good, b'{"end": "unknown", "at": 1, "choices": []}', good[:20]]))
    assert list(found(path)) == ["a"]
    assert caplog.text.count("was passed over") >= len(wrong)


def test_a_file_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    old = {name: value for name, value in terms("a").to_dict().items() if name not in ("key", "body")}
    (tmp_path / "answers.jsonl").write_bytes(orjson.dumps({"open": old}) + b"\n")
    ((one, _, _),) = AnswerFile(tmp_path / "answers.jsonl", False, 10).read(1000.0)
    assert (one.id, one.prompts, one.key, one.body) == ("a", [2], "", "")


def test_a_line_that_could_not_be_written_whole_spoils_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "answers.jsonl"
    write, room = os.write, [10**6]

    def short(fd: int, data: bytes) -> int:
        done = write(fd, data[: room[0]]) if room[0] else 0
        room[0] -= done
        if not done:
            raise OSError(28, "No space left on device")
        return done

    async def work() -> None:
        file = AnswerFile(path, False, 10)
        await file.opened(terms("a"))
        monkeypatch.setattr(os, "write", short)
        room[0] = 25
        await file.opened(terms("b"))
        await file.opened(terms("c"))
        room[0] = 10**6
        await file.opened(terms("d"))
        await file.close()

    in_loop(work)
    assert caplog.text.count("cannot be written") == 1, "said once, until it works again"
    assert list(found(path)) == ["a", "d"]


def test_who_waits_no_longer_takes_nobody_with_him(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"

    async def work() -> None:
        file = AnswerFile(path, False, 10)
        waiting = [asyncio.create_task(file.opened(terms(name))) for name in "abc"]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await file.close()

    in_loop(work)
    assert set(found(path)) == set("abc")


def test_the_file_is_written_anew_once_most_of_it_is_not_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_file, "_DEAD_BYTES", 20_000)
    path, largest, now = tmp_path / "answers.jsonl", 0, Clock()

    async def work() -> None:
        nonlocal largest
        shelf = Shelf(10, now)
        file = shelf.file = AnswerFile(path, False, 10)
        file.read(now.now)
        live = made("live", key="k")
        await shelf.announce(live.terms)
        shelf.put(live)
        for number in range(400):
            now.now += 1
            answer = made(f"a{number}")
            await shelf.announce(answer.terms)
            shelf.put(answer)
            say(answer, 20, "length")
            if number % 3 == 0:
                shelf.drop(f"a{number}")
            largest = max(largest, path.stat().st_size)
        await file.close()
        lines = [line for places in file._places.values() for line in places]
        assert file._live == sum(length for _, length in lines)
        assert file._size == path.stat().st_size

    in_loop(work)
    assert 20_000 < largest < 30_000, "without that it has 100,000"
    assert set(found(path, now.now)) == {"live", *(f"a{n}" for n in range(390, 400) if n % 3)}
    assert AnswerFile(path, False, 10).read(now.now)[0][0].key == "k"


def test_a_file_that_cannot_be_written_anew_goes_on_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(answer_file, "_DEAD_BYTES", 100)
    path = tmp_path / "answers.jsonl"

    async def work() -> None:
        file = AnswerFile(path, False, 10)
        await file.opened(terms("first"))
        await file.close()
        (tmp_path / "answers.new").mkdir()  # in the way
        file = AnswerFile(path, False, 10)
        assert len(file.read(1000.0)) == 1
        for number in range(5):
            await file.opened(terms(f"a{number}"))
            file.dropped(f"a{number}")
        await file.opened(terms("last"))
        await file.close()

    in_loop(work)
    assert "cannot be written" in caplog.text
    (tmp_path / "answers.new").rmdir()
    assert set(found(path)) == {"first", "last"}


def test_a_file_whose_new_name_may_not_last_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(answer_file, "_DEAD_BYTES", 2000)
    path = tmp_path / "answers.jsonl"

    def fail(folder: Path) -> None:
        raise OSError(5, "Input/output error")

    async def work() -> None:
        file = AnswerFile(path, True, 10)
        file.read(1000.0)
        await file.opened(terms("first"))
        monkeypatch.setattr(answer_file, "sync_folder", fail)
        for number in range(100):
            await file.opened(terms(f"a{number}"))
            file.dropped(f"a{number}")
        await file.opened(terms("last"))
        await file.close()
        assert file._size == path.stat().st_size < 5000

    in_loop(work)
    assert "cannot be written" in caplog.text
    assert set(found(path)) == {"first", "last"}
