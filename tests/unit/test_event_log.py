"""One contract for every backend of the event log."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event as Signal
from threading import Thread

import numpy as np
import pytest

from leftfold.events import (
    Call,
    CodecError,
    Event,
    EventLog,
    ForwardDone,
    LogBroken,
    LogClosed,
    LogReader,
    Pause,
    Record,
    Resume,
    Tick,
    TimeReversed,
    same,
)
from leftfold.events.stores import DirectoryStore, MemoryStore, Store
from tests.log_samples import events

Reopen = Callable[[Store], EventLog]


@pytest.fixture(params=["memory", "directory"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Store]:
    """Opens the same log anew at every call."""
    if request.param == "directory":
        return lambda: DirectoryStore(tmp_path / "log")
    store = MemoryStore()
    return lambda: store


@pytest.fixture
def log(backend: Callable[[], Store]) -> Iterator[EventLog]:
    with EventLog(store=backend()) as log:
        yield log


def fill(log: EventLog, items: list[Event]) -> list[int]:
    return [log.append(item) for item in items]


def check(records: list[Record], items: list[Event]) -> None:
    assert [record.seq for record in records] == list(range(1, len(items) + 1))
    for record, item in zip(records, items, strict=True):
        assert same(record.event, item), (record, item)


def test_an_empty_log_has_no_records_and_is_true(log: EventLog) -> None:
    assert (list(log), len(log), log.next_seq, log.last_t, log.dropped) == ([], 0, 1, 0, None)
    assert log


def test_what_was_appended_comes_back_in_order_numbered_from_one(log: EventLog) -> None:
    items = events(25)
    assert fill(log, items) == list(range(1, 26))
    check(list(log), items)
    assert (len(log), log.next_seq, log.last_t) == (25, 26, items[-1].t)


def test_it_can_be_read_between_appends_and_after_close(log: EventLog) -> None:
    items = events(8)
    fill(log, items[:3])
    check(list(log), items[:3])
    fill(log, items[3:])
    log.close()
    check(list(log), items)


def test_a_reading_in_progress_ends_where_the_log_ended_when_it_began(log: EventLog) -> None:
    fill(log, events(3))
    reading = iter(log)
    next(reading)
    fill(log, events(4, t=100))
    assert [record.seq for record in reading] == [2, 3]


def test_an_equal_time_is_taken_and_an_earlier_one_refused(log: EventLog) -> None:
    log.append(Tick(t=7))
    log.append(Tick(t=7))
    with pytest.raises(TimeReversed, match=r"Resume has t 6, .* has 7"):
        log.append(Resume(t=6))
    assert log.append(Tick(t=8)) == 3
    assert [record.event.t for record in log] == [7, 7, 8]


def test_an_event_that_cannot_be_written_leaves_no_trace(log: EventLog) -> None:
    log.append(Tick(t=1))
    with pytest.raises(TypeError):
        log.append(Call(t=9, verb="profile", args={"what": object()}))
    with pytest.raises(CodecError, match="mode 5"):
        log.append(Pause(t=9, mode=5))  # type: ignore[arg-type]
    assert (log.next_seq, log.last_t) == (2, 1)
    assert log.append(Tick(t=2)) == 2
    assert [record.seq for record in log] == [1, 2]


def test_a_reopened_log_goes_on_with_number_time_and_chain(backend: Callable[[], Store]) -> None:
    items = events(30)
    for start in range(0, 30, 10):
        with EventLog(store=backend()) as log:
            assert (log.next_seq, len(log)) == (start + 1, start)
            assert log.last_t == (items[start - 1].t if start else 0)
            if start:
                with pytest.raises(TimeReversed):
                    log.append(Tick(t=log.last_t - 1))
            fill(log, items[start : start + 10])
    check(list(EventLog(store=backend())), items)


@pytest.mark.parametrize("segment_bytes", [1, 300, 1000])
def test_segments_rotate_by_size_and_read_as_one_log(backend: Callable[[], Store], segment_bytes: int) -> None:
    items = events(40)
    for start in (0, 20):
        with EventLog(store=backend(), segment_bytes=segment_bytes) as log:
            fill(log, items[start : start + 20])
    store = backend()
    names = store.segments()
    assert names == [f"{number:08d}.jsonl" for number in range(1, len(names) + 1)]
    assert len(names) == 40 if segment_bytes == 1 else 4 < len(names) < 40
    for name in names:
        with store.open(name) as file:
            data = file.read()
        assert len(data) <= segment_bytes or data.count(b"\n") == 2, "over the size only for a record that is"
    check(list(LogReader(store)), items)
    store.close()


def test_opening_and_closing_writes_no_segment(backend: Callable[[], Store]) -> None:
    EventLog(store=backend()).close()
    store = backend()
    assert store.segments() == []
    store.close()


def test_sync_and_flush_say_up_to_where(log: EventLog) -> None:
    fill(log, events(3))
    assert log.flush() == 3
    log.append(Tick(t=100))
    assert log.sync() == 4
    assert log.sync() == 4


def test_a_closed_log_takes_nothing_and_closes_again(log: EventLog) -> None:
    log.append(Tick(t=1))
    log.close()
    log.close()
    for refused in (lambda: log.append(Tick(t=2)), log.flush, log.sync):
        with pytest.raises(LogClosed):
            refused()
    assert len(list(log)) == 1


def test_another_thread_may_flush_and_sync_while_one_appends(backend: Callable[[], Store]) -> None:
    items = events(3000)
    with EventLog(store=backend(), segment_bytes=20_000) as log:
        done = Signal()
        confirmed: list[int] = []

        def keep_syncing() -> None:
            while not done.is_set():
                log.flush()
                confirmed.append(log.sync())

        writer = Thread(target=keep_syncing)
        writer.start()
        fill(log, items)
        done.set()
        writer.join()
        assert confirmed == sorted(confirmed)
    reader = LogReader(store := backend())
    check(list(reader), items)
    store.close()


def test_arrays_and_their_views_come_back_as_the_same_tokens(log: EventLog) -> None:
    tokens = np.arange(20, dtype=np.int32)
    log.append(ForwardDone(t=0, step=1, tokens=tokens[::2]))
    log.append(ForwardDone(t=0, step=2, tokens=np.array([], np.int32)))
    first, second = (record.event for record in log)
    assert isinstance(first, ForwardDone) and isinstance(second, ForwardDone)
    assert list(first.tokens) == list(range(0, 20, 2))
    assert list(second.tokens) == []


@pytest.mark.parametrize("segment_bytes", [0, -1])
def test_a_segment_size_that_is_none_is_refused(segment_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"segment_bytes is {segment_bytes}"):
        EventLog.memory(segment_bytes=segment_bytes)


class FullDisk(MemoryStore):
    """Has room for so many bytes, and takes at most 7 at a time."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self.syncs_fail = False

    def start(self, number: int) -> None:
        if not self.room:
            raise OSError(28, "No space left on device")
        super().start(number)

    def write(self, data: memoryview) -> int:
        if not self.room:
            raise OSError(28, "No space left on device")
        part = data[: min(7, self.room)]
        self.room -= len(part)
        return super().write(part)

    def sync(self) -> None:
        if self.syncs_fail:
            raise OSError(5, "Input/output error")


@pytest.mark.parametrize("room", range(0, 1500, 97))
def test_a_full_disk_loses_nothing_once_there_is_room_again(room: int) -> None:
    store = FullDisk(room)
    log = EventLog(store=store, segment_bytes=400)
    items = events(20)
    fill(log, items[:12])
    with pytest.raises(OSError, match="No space"):
        log.flush()
    fill(log, items[12:])
    with pytest.raises(OSError, match="No space"):
        log.sync()
    whole = [record.seq for record in read_whole(store)]
    assert whole == list(range(1, len(whole) + 1)) and len(whole) < 12
    store.room = 1 << 20
    log.sync()
    check(list(log), items)


def read_whole(store: Store) -> list[Record]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(LogReader(store))


def test_an_append_that_meets_a_full_disk_has_not_taken_its_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leftfold.events.log.FLUSH_BYTES", 200)
    store = FullDisk(0)
    log = EventLog(store=store)
    items = events(10)
    log.append(items[0])
    log.append(items[1])
    with pytest.raises(OSError, match="No space"):
        log.append(items[2])
    assert (len(log), log.last_t) == (2, items[1].t)
    store.room = 1 << 20
    fill(log, items[2:])
    check(list(log), items)


def test_a_log_that_is_never_flushed_writes_itself_out_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leftfold.events.log.FLUSH_BYTES", 500)
    store = MemoryStore()
    log = EventLog(store=store)
    fill(log, events(100))
    assert sum(map(len, store.data.values())) > 5_000
    assert log._taken - log._written < 1_000


@pytest.mark.parametrize("when", ["sync", "rotation"])
def test_a_failed_sync_breaks_the_log_for_good(when: str) -> None:
    store = FullDisk(1 << 20)
    log = EventLog(store=store, segment_bytes=300)
    log.append(Tick(t=1))
    log.flush()
    store.syncs_fail = True
    if when == "rotation":
        fill(log, events(10, t=5))
    with pytest.raises(OSError, match="Input/output"):
        log.sync() if when == "sync" else log.flush()
    store.syncs_fail = False
    for refused in (lambda: log.append(Tick(t=1000)), log.flush, log.sync):
        with pytest.raises(LogBroken, match="open the log again"):
            refused()
    log.close()
