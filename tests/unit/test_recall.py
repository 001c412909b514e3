"""What an engine says again: everything that a listener lacks of what the log holds, whoever has ended meanwhile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from leftfold import recall
from leftfold.engine import Engine
from leftfold.events import Event, EventLog, Pause
from leftfold.fsm import State, step
from leftfold.recall import Memory, Recall, answer
from leftfold.replay.fold import Fold
from tests.engines import CONFIG, Listener, Spied, admit, engine

KEYS = [("a", 0, 0), ("b", 0, 0)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A log of requests a (30 tokens) and b (4 tokens), of 3 prompt tokens each, to their ends."""
    listener = Listener(2)
    made = engine(listener, log=EventLog.open(tmp_path / "log"))
    admit(made, "a", [1, 2, 3], max_tokens=30)
    admit(made, "b", [4, 5, 6], max_tokens=4)
    made.run()
    return tmp_path / "log"


@pytest.fixture
def log(folder: Path) -> list[Event]:
    return [record.event for record in EventLog.read(folder)]


def heard(outputs: Any) -> dict[str, tuple[dict[int, int], str | None]]:
    """Of each request its tokens by position, and its end; no position twice."""
    found: dict[str, tuple[dict[int, int], str | None]] = {}
    for output in outputs:
        tokens, end = found.setdefault(output.rid, ({}, None))
        for at, token in enumerate(output.tokens, output.position):
            assert at not in tokens
            tokens[at] = int(token)
        found[output.rid] = (tokens, output.finish_reason or end)
    return found


def folded(events: list[Event], begin: int = 0) -> tuple[Fold, Memory]:
    """The fold of `events`, and the memory of one that began after `begin` of them."""
    fold, memory = Fold(), Memory()
    for seq, event in enumerate(events, start=1):
        effects = fold.take(seq, event)
        if seq == begin:
            memory.begin(fold.state)  # type: ignore[arg-type]
        elif seq > begin:
            memory.take(effects)
    return fold, memory


def test_at_every_place_of_the_log_nothing_is_missing_and_nothing_twice(log: list[Event]) -> None:
    events, fold = log, Fold()
    whole = heard(row for seq, event in enumerate(events, 1) for row in fold.take(seq, event).outputs)
    for cut in range(len(events) // 2, len(events) + 1):
        for begin in (0, cut // 2, cut):
            fold, memory = folded(events[:cut], begin)
            for have in (3, 5, 7, 20):
                wanted = [(key, have) for key in KEYS] + [(("x", 0, 0), 3)]
                told = answer(Recall("c", wanted), fold.state, memory)  # type: ignore[arg-type]
                (ack,) = told.acks
                got = heard(told.outputs)
                unknown = [tuple(key) for key in ack.info["unknown"]]
                assert ("x", 0, 0) in unknown and ack.call == "c"
                for key in KEYS:
                    tokens, end = got.get(key[0], ({}, None))
                    live = key in fold.state.live  # type: ignore[union-attr]
                    assert live or key in unknown or end is not None
                    everything = whole[key[0]][0]
                    assert all(everything[at] == token for at, token in tokens.items())
                    if end is not None:
                        assert {at for at in everything if at >= have} <= tokens.keys()
                    if begin == 0:
                        assert key not in unknown
                    if live:
                        known = fold.state.known(fold.state.live[key])  # type: ignore[union-attr]
                        assert set(tokens) == set(range(have, known))


def test_what_lies_too_far_back_is_unknown_rather_than_half(
    log: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recall, "MOST_TOKENS", 6)
    fold, memory = folded(log)
    told = answer(Recall("c", [(key, 3) for key in KEYS]), fold.state, memory)  # type: ignore[arg-type]
    assert told.acks[0].info["unknown"] == [list(key) for key in KEYS] and not told.outputs
    near = answer(Recall("c", [(KEYS[0], 30)]), fold.state, memory)  # type: ignore[arg-type]
    assert heard(near.outputs)["a"][1] == "length"


def test_an_engine_answers_in_its_place_and_forgets(folder: Path) -> None:
    listener = Listener(-1)
    made = Engine(
        log=EventLog.open(folder), executor=Spied(), config=CONFIG, model="oracle", on_effects=listener, backoff=0.0
    )
    made.memory = Memory()
    made.start()
    made.recall(Recall("first", [(key, 3) for key in KEYS], ["never heard of"]))
    made.recall(Recall("second", [(KEYS[0], 3)]))
    made.stop()
    made.run()
    first, second = listener.acks
    assert (first.call, first.info) == ("first", {"unknown": [], "calls": ["never heard of"]})
    assert second.info["unknown"] == [list(KEYS[0])]  # who did not ask when the process began has lost the chance
    assert {rid: len(tokens) for rid, (tokens, _) in heard(listener.outputs).items()} == {"a": 30, "b": 4}


def test_answers_to_control_calls_are_said_again() -> None:
    state, memory = State(CONFIG), Memory()
    for t, event in enumerate((Pause(t=0, call="p", mode="keep"), Pause(t=0, call="q", mode="wait"))):
        memory.take(step(state, replace(event, t=t)))
    told = answer(Recall("c", [], ["p", "q", "r"]), state, memory)
    assert [ack.call for ack in told.acks] == ["p", "q", "c"]
    assert told.acks[-1].info == {"unknown": [], "calls": ["r"]}
    assert [ack.call for ack in answer(Recall("c", [], ["p"]), state, None).acks] == ["c"]
