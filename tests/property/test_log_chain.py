"""Whatever happens to a line of a log is found, and found where it happened."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leftfold.events import EventLog, LogDamaged, read_lines
from leftfold.events.stores import MemoryStore
from leftfold.events.walk import Tail, walk
from tests.log_samples import events

Log = dict[str, bytearray]


def written(count: int, segment_bytes: int) -> Log:
    store = MemoryStore()
    with EventLog(store=store, segment_bytes=segment_bytes) as log:
        for event in events(count):
            log.append(event)
    return store.data


def read(data: Log) -> tuple[int, Tail]:
    """How many records a walk yields, and where it ends."""
    store = MemoryStore()
    store.data = data
    tail = Tail()
    return sum(1 for _ in walk(store, tail)), tail


def places(data: Log) -> list[tuple[str, int, int, int]]:
    """(segment, line, offset, end) of every line."""
    found = []
    for name in sorted(data):
        offset = 0
        for number, line in enumerate(bytes(data[name]).splitlines(keepends=True), 1):
            found.append((name, number, offset, offset + len(line)))
            offset += len(line)
    return found


logs = st.builds(written, st.integers(2, 25), st.sampled_from([200, 700, 1 << 20]))


def expect_damage(data: Log, segment: str, line: int, offset: int) -> None:
    with pytest.raises(LogDamaged) as error:
        read(data)
    assert (error.value.segment, error.value.line, error.value.offset) == (segment, line, offset)


@given(logs, st.data())
def test_a_flipped_bit_is_found_on_its_line(data: Log, draw: st.DataObject) -> None:
    where = places(data)
    segment, line, offset, end = draw.draw(st.sampled_from(where))
    place = draw.draw(st.integers(offset, end - 1))
    data[segment][place] ^= 1 << draw.draw(st.integers(0, 7))
    if (segment, line) == where[-1][:2] and place == end - 1:
        count, tail = read(data)  # the log's very last newline: a torn tail by definition
        assert tail.dropped is not None and tail.dropped[:3] == (segment, line, offset)
        assert count == sum(1 for _, number, _, _ in where if number > 1) - 1
    else:
        expect_damage(data, segment, line, offset)


@given(logs, st.data())
def test_a_dropped_line_is_missed_where_the_next_one_stands(data: Log, draw: st.DataObject) -> None:
    where = places(data)
    index = draw.draw(st.integers(0, len(where) - 2))
    segment, line, offset, end = where[index]
    del data[segment][offset:end]
    next_segment, next_line = where[index + 1][:2]
    if next_segment == segment:
        expect_damage(data, segment, line, offset)
    else:
        expect_damage(data, next_segment, next_line, 0)


@given(logs, st.data())
def test_a_repeated_line_is_found_where_it_stands_again(data: Log, draw: st.DataObject) -> None:
    segment, line, offset, end = draw.draw(st.sampled_from(places(data)))
    data[segment][end:end] = data[segment][offset:end]
    expect_damage(data, segment, line + 1, end)


@given(logs, st.data())
def test_exchanged_lines_are_found_at_the_first(data: Log, draw: st.DataObject) -> None:
    where = places(data)
    first, second = sorted(draw.draw(st.lists(st.integers(0, len(where) - 1), min_size=2, max_size=2, unique=True)))
    lines = [bytes(data[segment][offset:end]) for segment, _, offset, end in where]
    lines[first], lines[second] = lines[second], lines[first]
    for name in data:
        data[name][:] = b"".join(line for line, place in zip(lines, where, strict=True) if place[0] == name)
    expect_damage(data, *where[first][:3])


@given(logs, st.data())
def test_a_line_of_another_log_is_found(data: Log, draw: st.DataObject) -> None:
    other = MemoryStore()
    with EventLog(store=other) as log:
        for event in events(25, t=1):
            log.append(event)
    alien = bytes(other.data["00000001.jsonl"]).splitlines(keepends=True)
    segment, line, offset, end = draw.draw(st.sampled_from([place for place in places(data) if place[1] > 1]))
    data[segment][offset:end] = draw.draw(st.sampled_from(alien[2:]))  # the first one would follow from our header
    expect_damage(data, segment, line, offset)


@settings(max_examples=30)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.sampled_from([200, 700, 1 << 20]), st.data())
def test_logs_cut_anywhere_and_resumed_never_lose_or_repeat_a_number(
    runs: list[int], segment_bytes: int, draw: st.DataObject
) -> None:
    store = MemoryStore()
    for run in runs:
        with EventLog(store=store, segment_bytes=segment_bytes) as log:
            for event in events(run, t=log.last_t):
                log.append(event)
        last = max(store.data)
        keep = draw.draw(st.integers(0, len(store.data[last])))
        whole = bytes(store.data[last][:keep]).rfind(b"\n") + 1
        del store.data[last][whole:]
    numbers = [int(line.split(b'"seq":')[1].split(b",")[0]) for line in walk(store, Tail())]
    assert numbers == list(range(1, len(numbers) + 1))


@settings(max_examples=10)  # each one waits for the disk some dozen times
@given(st.integers(1, 30), st.sampled_from([200, 700]))
def test_memory_and_directory_hold_the_same_bytes(count: int, segment_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        with EventLog.open(folder, segment_bytes=segment_bytes) as log:
            for event in events(count):
                log.append(event)
        on_disk = {path.name: path.read_bytes() for path in Path(folder).glob("*.jsonl")}
        assert on_disk == {name: bytes(data) for name, data in written(count, segment_bytes).items()}
        assert len(list(read_lines(folder))) == count
