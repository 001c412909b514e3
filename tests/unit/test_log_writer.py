"""The log's own thread: groups, marks, bounds; a disk that is full for a while, and one that fails for good."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from leftfold.events import (
    Abort,
    Admit,
    CodecError,
    EventLog,
    ForwardDone,
    LogClosed,
    LogError,
    LogLocked,
    Plan,
    Tick,
    TimeReversed,
)
from leftfold.events.gaps import Gap, gaps, note_gap
from leftfold.events.writer import Bounds, LogWriter
from tests.disks import Disk


class Watched(LogWriter):
    """A writer whose news can be waited for."""

    def __init__(self, disk: Disk, **options: object) -> None:
        super().__init__(EventLog(store=disk), **{"seconds": 0.0, "retry": 0.001, **options})  # type: ignore[arg-type]
        self._heard = threading.Condition()
        self.listen(self._hear)

    def _hear(self) -> None:
        with self._heard:
            self._heard.notify_all()

    def until(self, what: Callable[[], bool]) -> None:
        with self._heard:
            assert self._heard.wait_for(what, 20)

    def put(self, *rids: str) -> None:
        for rid in rids:
            self.append(Abort(t=0, rid=rid))
        self.commit()


class Gate:
    """Lets syncs through one by one."""

    def __init__(self) -> None:
        self.arrived = threading.Semaphore(0)
        self.may_pass = threading.Semaphore(0)
        self.open = False

    def __call__(self) -> None:
        self.arrived.release()
        if not self.open:
            assert self.may_pass.acquire(timeout=20)

    def let_all_through(self) -> None:
        self.open = True
        self.may_pass.release()


def rids(disk: Disk) -> list[str]:
    return [event.rid for _, event in EventLog(store=disk)]


def durable_rids(disk: Disk) -> list[str]:
    return [event.rid for _, event in EventLog(store=disk.after_crash())]


@pytest.mark.parametrize("strict", [True, False])
def test_what_is_appended_becomes_durable_by_itself(strict: bool) -> None:
    disk = Disk()
    log = Watched(disk, strict=strict)
    assert log.append(Abort(t=0, rid="a")) == 1
    log.put("b")
    log.until(lambda: log.safe == 2)
    if strict:
        assert durable_rids(disk) == ["a", "b"]
    log.close()
    assert (log.written, log.durable, log.failure) == (2, 2, None)
    assert durable_rids(disk) == rids(disk) == ["a", "b"]


def test_what_comes_while_a_sync_runs_shares_the_next_one() -> None:
    gate = Gate()
    disk = Disk(before_sync=gate)
    log = Watched(disk, strict=True)
    log.put("a")
    assert gate.arrived.acquire(timeout=20)
    for rid in "bcdefgh":
        log.put(rid)
    assert (log.safe, log.behind) == (0, False), "the sync has not returned"
    gate.may_pass.release()
    log.until(lambda: log.safe == 1)
    assert gate.arrived.acquire(timeout=20)
    assert log.safe == 1
    gate.may_pass.release()
    log.until(lambda: log.safe == 8)
    assert log.syncs == 2
    gate.let_all_through()
    log.close()


def test_without_strictness_a_sync_that_takes_long_keeps_what_was_written_safe() -> None:
    gate = Gate()
    log = Watched(Disk(before_sync=gate))
    log.put("a")
    assert gate.arrived.acquire(timeout=20)
    assert log.written == log.safe == 1 and log.durable == 0
    gate.let_all_through()
    log.close()


def test_syncs_come_no_sooner_than_asked_and_the_last_one_at_the_close() -> None:
    disk = Disk()
    log = Watched(disk, seconds=3600)
    log.put("a")
    log.until(lambda: log.safe == 1)
    for _ in range(50):
        log.put("b")
    log.until(lambda: log.safe == 51)
    assert log.syncs <= 1
    log.close()
    assert len(durable_rids(disk)) == 51


def test_bounds_say_when_too_much_waits() -> None:
    gate = Gate()
    log = Watched(Disk(before_sync=gate), strict=True, behind=Bounds(2, 1 << 20), full=Bounds(4, 1 << 20))
    seen = []
    for rid in "abcdef":
        log.put(rid)
        seen.append((log.behind, log.full))
    assert seen == [(False, False)] * 2 + [(True, False)] * 2 + [(True, True)] * 2
    gate.let_all_through()
    log.until(lambda: log.safe == 6)
    assert not log.behind and not log.full and log.figures()["log_waiting_bytes"] == 0
    log.append(Admit(t=0, rid="long", prompt=list(range(200_000))))
    assert log.behind and log.full, "bytes count as well as records"
    log.close()


def test_a_full_disk_is_tried_again_and_nothing_is_missing(caplog: pytest.LogCaptureFixture) -> None:
    for room in range(0, 240, 23):  # the byte at which the disk is full
        caplog.clear()
        disk = Disk()
        disk.room = room
        log = Watched(disk, strict=True)
        log.put("a", "b", "c")
        log.until(lambda log=log: log.failure is not None)  # type: ignore[misc]
        assert log.failure is not None
        assert (log.failure.reason, log.failure.lasting) == ("No space left on device", False)
        log.put("d")
        disk.wait(3)
        assert log.safe == 0 and durable_rids(disk) == []
        disk.room = None
        log.until(lambda log=log: log.failure is None and log.safe == 4)  # type: ignore[misc]
        log.put("e")
        log.close()
        assert durable_rids(disk) == ["a", "b", "c", "d", "e"]
        assert log.failures == 1 and log.missing == 0
        assert sum("cannot be written, trying again" in record.message for record in caplog.records) == 1
        assert sum("is written again" in record.message for record in caplog.records) == 1


def test_a_read_only_disk_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    disk = Disk()
    disk.read_only = True
    log = Watched(disk)
    log.put("a")
    log.until(lambda: log.failure is not None)
    disk.wait(2)
    disk.read_only = False
    log.until(lambda: log.safe == 1)
    log.close()
    assert rids(disk) == ["a"] and "Read-only file system" in caplog.text


@pytest.mark.parametrize("strict", [True, False])
def test_a_sync_that_fails_ends_the_log_and_is_never_asked_again(
    strict: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    disk = Disk()
    log = Watched(disk, strict=strict)
    log.put("a")
    log.until(lambda: log.durable == 1 if strict else log.safe == 1)
    while log.durable < 1:
        threading.Event().wait(0.001)
    disk.unsynced = True
    log.put("b")
    log.until(lambda: log.failure is not None and log.failure.lasting)
    disk.unsynced = False  # the system would say now that all is well: it has forgotten what it lost
    tries = disk.tries
    assert log.append(Abort(t=0, rid="c")) == 3
    log.commit()
    with pytest.raises(LogError, match="what came after record 1 may be lost"):
        log.close()
    assert (log.durable, log.safe) == (1, 1 if strict else 2) and log.missing == 1
    assert disk.tries == tries and durable_rids(disk) == ["a"]
    assert "record 1 is the last that is surely on disk" in caplog.text


def test_a_sync_that_fails_between_two_segments_ends_the_log_as_well() -> None:
    disk = Disk()
    log = LogWriter(EventLog(store=disk, segment_bytes=1), seconds=3600, retry=3600)
    log.append(Abort(t=0, rid="a"))
    log.commit()
    while log.durable < 1:
        threading.Event().wait(0.001)
    disk.unsynced = True
    log.append(Abort(t=0, rid="b"))
    log.append(Abort(t=0, rid="c"))
    with pytest.raises(LogError, match="what came after record 1 may be lost: what was written could not be made dur"):
        log.close()
    assert log.failure is not None and log.failure.lasting and log.missing == 2
    assert durable_rids(disk) == ["a"]


def test_a_log_that_is_given_up_ends_where_it_stands() -> None:
    disk = Disk()
    disk.room = 100
    log = Watched(disk)
    log.put("a", "b")
    log.until(lambda: log.failure is not None)
    log.abandon("enough")
    disk.room = None
    log.put("c")
    with pytest.raises(LogError, match="enough"):
        log.close()
    assert not log.behind and "c" not in rids(disk)


def test_what_waited_when_the_log_ended_is_missing_as_well() -> None:
    said: list[Gap] = []
    disk = Disk()
    disk.room = 0
    log = Watched(disk, note=said.append)
    log.put("a", "b")
    log.until(lambda: log.failure is not None)
    log.abandon("enough")
    log.until(lambda: log.failure is not None and log.failure.lasting)
    assert (log.missing, log.written) == (2, 0)
    disk.room = None
    with pytest.raises(LogError, match="enough"):
        log.close()
    assert said == [Gap(0, "enough")]


def test_a_disk_that_has_room_again_at_the_close_has_lost_nothing() -> None:
    disk = Disk()
    disk.room = 0
    log = Watched(disk, strict=True, retry=3600.0)
    log.put("a", "b")
    log.until(lambda: log.failure is not None)
    write, tries = disk.write, []

    def late(data: memoryview) -> int:
        tries.append(len(data))
        if len(tries) == 2:  # the last turn fails once more, and then somebody makes room
            disk.room = None
        return write(data)

    disk.write = late  # type: ignore[method-assign]
    log.close()
    assert log.safe == 2 and durable_rids(disk) == ["a", "b"]


def test_word_of_a_gap_is_left_as_soon_as_that_can_be_written(tmp_path: Path) -> None:
    disk = Disk()
    said: list[Gap] = []

    def note(gap: Gap) -> None:
        said.append(gap)
        if len(said) == 1:
            raise OSError(28, "No space left on device")

    log = Watched(disk, note=note)
    log.put("a")
    log.until(lambda: log.safe == 1)
    log.abandon("enough")
    log.commit()
    log.put("b")
    while len(said) < 2:
        log.put("c")
    with pytest.raises(LogError):
        log.close()
    assert set(said) == {Gap(log.durable, "enough")}
    note_gap(tmp_path, said[0])
    note_gap(tmp_path, Gap(99, "other"))
    (tmp_path / "gap-7.json").write_bytes(b'{"after":7,"rea')
    assert gaps(tmp_path) == sorted([said[0], Gap(7, "unknown"), Gap(99, "other")])


def test_where_nothing_is_missing_no_gap_is_noted() -> None:
    said: list[Gap] = []
    disk = Disk()
    log = Watched(disk, strict=True, note=said.append)
    disk.unsynced = True
    log.put("a")
    log.until(lambda: log.failure is not None)
    with pytest.raises(LogError):
        log.close()
    assert said == []


def test_what_no_record_can_hold_is_refused_at_once() -> None:
    log = Watched(Disk())
    with pytest.raises((CodecError, TypeError)):
        log.append(Admit(t=0, rid="a", cache_salt=object()))  # type: ignore[arg-type]
    log.append(Tick(t=5))
    with pytest.raises(TimeReversed):
        log.append(Tick(t=4))
    log.close()
    with pytest.raises(LogClosed):
        log.append(Tick(t=6))
    assert len(EventLog(store=log._log._store)) == 1


def test_a_record_that_cannot_be_encoded_after_all_ends_the_log(caplog: pytest.LogCaptureFixture) -> None:
    disk = Disk()
    log = Watched(disk)
    log.put("a")
    with pytest.raises((CodecError, TypeError)):
        log.append(ForwardDone(t=0, step=1, tokens=[object()]))  # type: ignore[list-item]
    log.append(Tick(t=0, plan=Plan(step=1, memo={"a": 2**70})))
    log.append(ForwardDone(t=0, step=2, tokens=np.array([1], np.int32)))
    log.commit()
    log.until(lambda: log.failure is not None)
    with pytest.raises(LogError, match="record 2 cannot be written"):
        log.close()
    assert rids(disk) == ["a"]


def test_a_disk_that_never_answers_does_not_keep_a_stop_waiting() -> None:
    gate = Gate()
    log = Watched(Disk(before_sync=gate), strict=True)
    log.put("a")
    assert gate.arrived.acquire(timeout=20)
    with pytest.raises(LogError, match="does not answer; what came after record 0 may be lost"):
        log.close(timeout=0.01)
    gate.let_all_through()
    log.close()
    assert log.durable == 1


def test_a_log_that_fails_at_the_close_says_so_and_lets_go_of_its_lock(tmp_path: Path) -> None:
    inner = EventLog.open(tmp_path)
    log = LogWriter(inner, seconds=3600)
    with pytest.raises(LogLocked):
        EventLog.open(tmp_path)

    def broken() -> None:
        raise OSError(5, "Input/output error")

    inner._store.sync = broken  # type: ignore[method-assign]
    log.append(Abort(t=0, rid="a"))
    with pytest.raises((LogError, OSError)):
        log.close()
    EventLog.open(tmp_path).close()
