"""What `leftfold bench recovery` counts: a token that is missing, came twice or is another one is found."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from leftfold.bench import recovery
from leftfold.bench.recovery import Bench, Stream, add_arguments, run
from leftfold.commands.common import UsageError

TOKENS = [11, 12, 13, 14]


def chunk(ids: list[int], end: str | None = None) -> dict[str, Any]:
    text = "".join(chr(token + 86) for token in ids)
    return {"id": "cmpl-1", "choices": [{"token_ids": ids, "finish_reason": end, "text": text}]}


def read(*chunks: tuple[list[int], str, str | None]) -> Stream:
    """A stream that got these tokens with these places."""
    stream = Stream(0, "k")
    for ids, place, end in chunks:
        stream.take(chunk(ids, end), place)
    return stream


WHOLE = ((TOKENS[:2], "2", None), (TOKENS[2:], "5", "length"))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    made = Bench(parser.parse_args(["--kills", "3", "--streams", "1"]), 1, tmp_path)
    made._expected = [read(*WHOLE)]
    return made


@pytest.mark.parametrize(("chunks", "lost", "duplicated", "different"), [
    (WHOLE, 0, 0, 0),
    (((TOKENS, "5", "length"),), 0, 0, 0),
    (((TOKENS[:3], "3", None), ([14], "4", None), ([], "5", "length")), 0, 0, 0),
    (((TOKENS[:2], "2", None),), 2, 0, 0),
    ((), 4, 0, 0),
    (((TOKENS[:2], "2", None), ([12, 13, 14], "5", "length")), 0, 1, 1),  # its text as well
    ((([11, 12, 99, 14], "5", "length"),), 0, 0, 1),
    (((TOKENS, "5", "stop"),), 0, 0, 1),
    (((TOKENS, "4", None), ([15], "6", "length")), 0, 0, 1),
])  # fmt: skip
def test_every_fault_is_counted(bench: Bench, chunks: Any, lost: int, duplicated: int, different: int) -> None:
    bench._done = [read(*WHOLE), read(*chunks)]
    found = bench._verdict(1.0)
    assert (found["lost"], found["duplicated"], found["different"]) == (lost, duplicated, different)
    assert bool(found["findings"]) == (lost + duplicated + different > 0)
    assert found["streams"] == 2


def test_an_event_that_was_cut_off_is_not_taken(bench: Bench) -> None:
    first, second = json.dumps(chunk(TOKENS[:2])), json.dumps(chunk([13]))

    class Answer:
        async def aiter_lines(self) -> Any:
            for line in ("id: 2", f"data: {first}", "", "id: 3", f"data: {second}"):
                yield line

    stream = Stream(0, "k")
    asyncio.run(bench._take(Answer(), stream))
    assert (stream.tokens, stream.place) == ({0: 11, 1: 12}, "2")


def test_without_an_id_it_asks_again_under_its_key_and_then_reads_on(bench: Bench) -> None:
    class Client:
        def stream(self, method: str, path: str, **more: Any) -> Any:
            return method, path, more.get("headers"), more.get("params")

    stream, other = bench._stream(0), bench._stream(0)
    assert stream.key != other.key
    for _ in range(2):
        assert bench._asked(Client(), stream)[:3] == ("POST", "/v1/completions", {"Idempotency-Key": stream.key})
    stream.take(chunk(TOKENS[:2]), "2")
    assert bench._asked(Client(), stream) == ("GET", "/v1/streams/cmpl-1", None, {"from": "2"})


@pytest.mark.parametrize(("found", "code"), [({}, 0), ({"lost": 1}, 1), ({"duplicated": 1}, 1), ({"different": 1}, 1)])
def test_the_exit_code_says_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], found: dict[str, int], code: int
) -> None:
    verdict = {"kills": 3, "engine_kills": 1, "streams": 2, "tokens": 8, "lost": 0, "duplicated": 0, "different": 0,
               "seed": 1, "durability": "strict", "seconds": 1.0, "findings": [], **found}  # fmt: skip

    async def measured(_: Bench) -> dict[str, Any]:
        return verdict

    monkeypatch.setattr(recovery.Bench, "run", measured)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert run(parser.parse_args(["--json", "--seed", "1"])) == code
    assert json.loads(capsys.readouterr().out) == verdict
    with pytest.raises(UsageError, match="--longest is 0"):
        run(parser.parse_args(["--longest", "0"]))
