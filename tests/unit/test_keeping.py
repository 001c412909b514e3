"""Group commit: a disk that is full for a while, and one that fails for good."""

from __future__ import annotations

import logging
import threading

import pytest

from leftfold.events import Abort, EventLog, LogError
from leftfold.events.stores import MemoryStore
from leftfold.keeping import CommittedLog


class Disk(MemoryStore):
    """Fails writes or syncs while told to; `tries` counts them, `turn` is set with each try."""

    def __init__(self) -> None:
        super().__init__()
        self.full = self.broken = False
        self.synced = 0
        self.tries = 0
        self.turn = threading.Event()

    def write(self, data: memoryview) -> int:
        if self.full:
            self._tried()
            raise OSError(28, "No space left on device")
        return super().write(data)

    def sync(self) -> None:
        if self.broken:
            self._tried()
            raise OSError(5, "Input/output error")
        self.synced = sum(map(len, self.data.values()))
        self._tried()

    def _tried(self) -> None:
        self.tries += 1
        self.turn.set()

    def wait(self, more: int) -> None:
        """Until so many more tries were made."""
        until = self.tries + more
        while self.tries < until:
            self.turn.clear()
            assert self.tries >= until or self.turn.wait(60)


def test_a_full_disk_is_tried_again_and_nothing_is_missing(caplog: pytest.LogCaptureFixture) -> None:
    disk = Disk()
    log = CommittedLog(EventLog(store=disk), seconds=0.001)
    disk.full = True
    log.append(Abort(t=0, rid="a"))
    disk.wait(3)
    disk.full = False
    disk.wait(1)
    log.append(Abort(t=1, rid="b"))
    disk.wait(1)
    assert disk.synced == sum(map(len, disk.data.values())) > 0, "what came after the failure is durable as well"
    log.close()
    assert [event.rid for _, event in EventLog(store=disk)] == ["a", "b"]
    assert sum("could not be made durable" in record.message for record in caplog.records) == 1
    assert sum("durable again" in record.message for record in caplog.records) == 1


def test_a_disk_that_cannot_sync_stops_the_next_event(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    disk = Disk()
    log = CommittedLog(EventLog(store=disk), seconds=0.001)
    log.append(Abort(t=0, rid="a"))
    disk.wait(1)
    disk.broken = True
    log.append(Abort(t=1, rid="b"))
    disk.wait(1)
    log._commit._thread.join(60)
    for call in (lambda: log.append(Abort(t=2, rid="c")), log.flush, log.sync):
        with pytest.raises(LogError, match="earlier sync failed"):
            call()
    log.close()
    assert "not made durable any more" in caplog.text
