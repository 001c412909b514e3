"""Disks that fail as they are told to, for tests of the log: full at some byte, unable to sync, read-only, slow."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable

from leftfold.events.stores import MemoryStore, segment_name


class Disk(MemoryStore):
    """Segments in memory of which `durable` is what survives the machine: what the last good sync found.

    `room`: bytes that can still be written (None: without end). `unsynced`: syncs fail. `read_only`: no new segment, no
    write. `before_sync`: called first where there is anything to sync, may wait. `tries`: writes, syncs and starts so
    far, failed ones included.
    """

    def __init__(self, before_sync: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.room: int | None = None
        self.unsynced = self.read_only = False
        self.before_sync = before_sync
        self.durable: dict[str, bytes] = {}
        self.tries = 0
        self._turn = threading.Condition()

    def start(self, number: int) -> None:
        self._tried()
        if self.read_only:
            raise OSError(errno.EROFS, "Read-only file system")
        super().start(number)
        self.durable.setdefault(segment_name(number), b"")

    def write(self, data: memoryview) -> int:
        self._tried()
        if self.read_only:
            raise OSError(errno.EROFS, "Read-only file system")
        if self.room is None:
            return super().write(data)
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        part = data[: self.room]
        self.room -= len(part)
        return super().write(part)

    def sync(self) -> None:
        self._tried()
        found = {name: bytes(data) for name, data in self.data.items()}
        if found == self.durable:
            return
        if self.before_sync is not None:
            self.before_sync()
        if self.unsynced:
            raise OSError(errno.EIO, "Input/output error")
        self.durable = found

    def _tried(self) -> None:
        with self._turn:
            self.tries += 1
            self._turn.notify_all()

    def wait(self, more: int = 1) -> None:
        """Until so many more tries were made."""
        with self._turn:
            until = self.tries + more
            assert self._turn.wait_for(lambda: self.tries >= until, 20)

    def after_crash(self, torn: int = 0) -> MemoryStore:
        """What is there after the machine went down, and `torn` bytes more that happened to get to the disk."""
        left = MemoryStore()
        for name, data in self.data.items():
            kept = self.durable.get(name, b"")
            more = bytes(data[len(kept) : len(kept) + torn])
            torn -= len(more)
            if kept or more:
                left.data[name] = bytearray(kept + more)
        return left
