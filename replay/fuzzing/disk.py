"""A simulated disk under the real log: what a process wrote, what a crash leaves of it, and what a bad disk returns.

Files are byte strings. What was written is seen at once, but is safe only after a sync; a power cut keeps as much of
the rest as it likes. Faults are armed by the methods below and are spent once they have happened.
"""

from __future__ import annotations

import errno
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, cast

from leftfold.events.framing import REST, frame
from leftfold.events.stores import segment_name, snapshot_name

BLOCK = 64
"""Bytes that a disk loses, exchanges or returns stale as one; small, since the logs of a run are small."""

DAMAGES: Sequence[str] = ("flip", "zeros", "misdirected", "exchanged", "cut", "lost", "doubled", "taken out")
"""What may become of bytes at rest; the last: somebody took a record out, and chained those behind it anew."""


@dataclass(slots=True)
class File:
    """`content`: as the system shows it; `safe`: bytes of it that a sync made durable; `begun`: where the last write
    began; `spoiled`: a sync failed, so that the system has forgotten what is not safe, and no sync will make it so."""

    content: bytearray = field(default_factory=bytearray)
    safe: int = 0
    begun: int = 0
    spoiled: bool = False


class SimDisk:
    """`files`: segments by name; `snapshots`: by the record they are of, durable once they are there.

    `room`: bytes that still fit (None: no end); `lies`: syncs are confirmed and not carried out; `fail_sync`: the next
    sync fails; `bad_read`: (name, offset) at which the next read of that file fails.
    """

    def __init__(self) -> None:
        self.files: dict[str, File] = {}
        self.snapshots: dict[int, bytearray] = {}
        self.room: int | None = None
        self.lies = False
        self.fail_sync = False
        self.bad_read: tuple[str, int] | None = None

    def sizes(self) -> dict[str, int]:
        return {name: len(self.files[name].content) for name in sorted(self.files)}

    @property
    def deceives(self) -> bool:
        """Whether a file that another follows is not safe, which no log would have let happen but for a lie."""
        return any(file.safe < len(file.content) for name, file in self.files.items() if name != max(self.files))

    def kill(self, torn: int) -> None:
        """The process dies: its last write is perhaps cut short by `torn` bytes, all before it is with the system.

        That makes nothing safe: what the next process reads may still be lost with the machine.
        """
        if self.files:
            file = self.files[max(self.files)]
            del file.content[max(file.safe, file.begun, len(file.content) - torn) :]
        self._disarm()

    def power_cut(self, keep: int, hole: int | None, earlier: int | None = None) -> bool:
        """The machine dies: of what no sync made durable, `keep` bytes of each file are left.

        `earlier`: so many of those but the last, which the disk may have been told later and have written before.

        `hole`: the block of the kept rest with this number never came to the disk, although later ones did. Whether
        there is such a hole.
        """
        holed = False
        last = max(self.files, default="")
        for name, file in self.files.items():
            del file.content[file.safe + (keep if earlier is None or name == last else earlier) :]
            blocks = -(-(len(file.content) - file.safe) // BLOCK)
            if hole is not None and blocks > 1:
                at = file.safe + hole % (blocks - 1) * BLOCK
                file.content[at : at + BLOCK] = bytes(BLOCK)
                holed = True
        self._settle()
        return holed

    def _settle(self) -> None:
        """What is left is on the disk; the machine has come up again."""
        for file in self.files.values():
            file.safe = file.begun = len(file.content)
            file.spoiled = False
        self._disarm()

    def _disarm(self) -> None:
        """There is room again, and no fault is armed."""
        self.room, self.lies, self.fail_sync, self.bad_read = None, False, False, None

    def damage(self, kind: str, at: int, other: int) -> bool:
        """Spoil bytes at rest, one of `DAMAGES`, at byte `at` of all files in order; whether anything is different."""
        before = contents(self)
        if total := sum(map(len, before.values())):
            at %= total
            for name, held in before.items():
                if at < len(held):
                    self._damage(kind, name, at, other)
                    break
                at -= len(held)
        return before != contents(self)

    def _damage(self, kind: str, name: str, offset: int, other: int) -> None:
        if kind == "lost":
            if name in self.files:
                del self.files[name]
            else:
                del self.snapshots[int(name)]
            return
        content = self.files[name].content if name in self.files else self.snapshots[int(name)]
        block = offset // BLOCK * BLOCK
        width, elsewhere = min(BLOCK, len(content) - block), other % max(1, len(content) // BLOCK) * BLOCK
        if kind == "flip":
            content[offset] ^= 1 << other % 8
        elif kind == "zeros":
            content[block : block + width] = bytes(width)
        elif kind == "misdirected":
            taken = content[elsewhere : elsewhere + width]
            content[block : block + len(taken)] = taken
        elif kind == "exchanged":
            first, second = min(block, elsewhere), max(block, elsewhere)
            if second + BLOCK <= len(content) and second > first:
                one, two = content[first : first + BLOCK], content[second : second + BLOCK]
                content[first : first + BLOCK], content[second : second + BLOCK] = two, one
        elif kind == "cut":
            del content[offset:]
        elif kind == "doubled":
            line = content.find(b"\n", offset) + 1
            if end := content.find(b"\n", line) + 1:
                content[end:end] = content[line:end]
        elif kind == "taken out" and name in self.files:
            _take_out(content, offset)


def _take_out(content: bytearray, offset: int) -> None:
    """The record after the line at `offset` is gone, and no checksum says so."""
    first = content.find(b"\n", offset) + 1
    after = content.find(b"\n", first) + 1
    if not first or not after:
        return
    before = content.rfind(b"\n", 0, first - 1) + 1
    head = bytes(content[before : before + 16])
    if 0 in head:  # there is a hole in it, of which no checksum follows
        return
    crc, lines = int(head[8:], 16), content[after:].splitlines(keepends=True)
    del content[first:]
    for line in map(bytes, lines):
        if line.endswith(b"\n"):
            line, crc = frame(b"{" + line[REST:-1], crc)
        content += line


class DiskStore:
    """The segments on a `SimDisk`, as `events.stores.Store` has them: what a log directory does, without one."""

    def __init__(self, disk: SimDisk) -> None:
        self.disk = disk
        self._file = File()

    def segments(self) -> list[str]:
        return sorted(self.disk.files)

    def open(self, name: str) -> BinaryIO:
        content = bytes(self.disk.files[name].content)
        bad = self.disk.bad_read
        if bad is None or bad[0] != name:
            return io.BytesIO(content)
        return io.BufferedReader(cast(io.RawIOBase, _BadSector(self.disk, content, bad[1])), BLOCK)

    def snapshots(self) -> list[int]:
        return sorted(self.disk.snapshots, reverse=True)

    def read_snapshot(self, seq: int) -> bytes:
        if seq not in self.disk.snapshots:
            raise FileNotFoundError(errno.ENOENT, "there is no such snapshot", snapshot_name(seq))
        return bytes(self.disk.snapshots[seq])

    def remove_snapshot(self, seq: int) -> None:
        self.disk.snapshots.pop(seq, None)

    def confirm(self, name: str) -> None:
        """What can be read is written once more, and synced."""
        file = self.disk.files[name]
        if not self.disk.lies:
            file.safe, file.spoiled = len(file.content), False

    def truncate(self, name: str, size: int) -> None:
        """Cut a segment; the real store syncs here, so that the cut is safe."""
        file = self.disk.files[name]
        del file.content[size:]
        file.safe = file.begun = size

    def start(self, number: int) -> None:
        """Go on with this segment; its entry in the directory is safe at once, as the real store syncs that."""
        self._file = self.disk.files.setdefault(segment_name(number), File())

    def write(self, data: memoryview) -> int:
        disk, file, count = self.disk, self._file, len(data)
        if disk.room is not None:
            count = min(count, disk.room)
            if not count:
                raise OSError(errno.ENOSPC, "planted: no space left on the simulated disk")
            disk.room -= count
        file.begun = len(file.content)
        file.content += data[:count]
        return count

    def sync(self) -> None:
        disk, file = self.disk, self._file
        if disk.fail_sync:
            disk.fail_sync = False
            file.spoiled = True
            raise OSError(errno.EIO, "planted: the simulated disk cannot make this durable")
        if not disk.lies and not file.spoiled:
            file.safe = len(file.content)

    def close(self, clean: bool = False) -> None:
        pass  # nothing is held


class _BadSector(io.RawIOBase):
    """Bytes that can be read up to a place, and no further."""

    def __init__(self, disk: SimDisk, content: bytes, bad: int) -> None:
        super().__init__()
        self._disk, self._content, self._bad, self._at = disk, content, bad, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        end = min(self._at + len(buffer), len(self._content))
        if self._at <= self._bad < end:
            self._disk.bad_read = None
            raise OSError(errno.EIO, "planted: the simulated disk cannot read this")
        piece = self._content[self._at : end]
        buffer[: len(piece)] = piece
        self._at = end
        return len(piece)


def contents(disk: SimDisk) -> Mapping[str, bytes]:
    """The files as they stand, snapshots after the segments, under their numbers."""
    segments = {name: bytes(disk.files[name].content) for name in sorted(disk.files)}
    return segments | {str(seq): bytes(disk.snapshots[seq]) for seq in sorted(disk.snapshots)}
