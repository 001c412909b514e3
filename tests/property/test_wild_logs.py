"""A log whose every checksum is right may still hold anything: nothing but a `LogError` comes of reading it."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leftfold.events import EventLog, LogError, LogUnreadable
from leftfold.events.framing import frame, header
from leftfold.events.reader import LogReader
from leftfold.events.stores import MemoryStore
from leftfold.replay.verify import verify
from tests.logs import record

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
anything = st.recursive(
    st.none() | st.booleans() | st.integers(2**52, 2**64 - 1) | st.integers(-2, 9) | st.floats(allow_nan=False)
    | texts | st.sampled_from(["abort", "keep", "a", "b", "c", "kv"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=2), max_leaves=6,
)  # fmt: skip


def sound_records() -> list[dict[str, Any]]:
    log = EventLog.memory()
    record(log)
    log.flush()
    return [orjson.loads(line) for line in LogReader(log._store).lines()]


RECORDS = sound_records()


def framed(records: list[Any]) -> MemoryStore:
    """A store with one segment that holds these records under right checksums."""
    line, crc = header(1, 0)
    lines = [line]
    for one in records:
        line, crc = frame(one if isinstance(one, bytes) else orjson.dumps(one), crc)
        lines.append(line)
    store = MemoryStore()
    store.data["00000001.jsonl"] = bytearray(b"".join(lines))
    return store


def spoilt(draw: st.DataObject) -> list[dict[str, Any]]:
    """A sound log with something else in one place of one record (its number stays: that is the frame's)."""
    records = orjson.loads(orjson.dumps(RECORDS))
    at = draw.draw(st.integers(0, len(records) - 1))
    target: Any = records[at]
    names = [name for name in target if name != "seq"]
    name = draw.draw(st.sampled_from(names))
    while isinstance(target[name], dict | list) and target[name] and draw.draw(st.booleans()):
        target = target[name]
        name = draw.draw(st.sampled_from([*target] if isinstance(target, dict) else range(len(target))))
    if isinstance(target, dict) and draw.draw(st.integers(0, 4)) == 0:
        del target[name]
    else:
        target[name] = draw.draw(anything)
    return records[: at + 1] if draw.draw(st.booleans()) else records


@settings(max_examples=250)
@given(st.data())
def test_reading_opening_and_verifying_raise_nothing_else(draw: st.DataObject) -> None:
    store = framed(spoilt(draw))
    verdict = verify(LogReader(store))
    assert verdict.events <= len(RECORDS)
    try:
        with EventLog(store=store) as log:
            list(log)
    except LogError:
        pass
    try:
        assert LogReader(store).last_t >= -(1 << 63)
    except LogError:
        pass


@pytest.mark.parametrize(
    "body",
    [b'{"seq":1,"type":"tick"}', b'{"seq":1,"t":"x"}', b'{"seq":1,"t":null}', b'{"seq":1,}', b'{"seq":1,"t":1.5}'],
)
def test_a_last_record_without_a_time_is_unreadable(body: bytes) -> None:
    store = framed([body])
    for attempt in (lambda: EventLog(store=store), lambda: LogReader(store).last_t, lambda: list(LogReader(store))):
        with pytest.raises(LogUnreadable, match="record 1: "):
            attempt()


@pytest.mark.parametrize(
    "body",
    [
        b'{"type":"segment","schema":1,"first_seq":"1","prev":"00000000"}',
        b'{"type":"segment","schema":1,"first_seq":null,"prev":"00000001"}',
        b'{"type":"segment","schema":1,"first_seq":1,"prev":12345678}',
        b'{"type":"segment","schema":1,"first_seq":1,"prev":null}',
    ],
)
def test_a_header_with_other_kinds_of_values_is_damage(body: bytes) -> None:
    for previous in (0, 1, 0x12345678):
        store = MemoryStore()
        store.data["00000001.jsonl"] = bytearray(frame(body, previous)[0])
        with pytest.raises(LogError):
            list(LogReader(store))
