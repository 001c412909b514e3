"""Where the segments of a log live: in memory or in a directory, behind one small interface."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import re
from pathlib import Path
from typing import BinaryIO, Protocol, cast

import zstandard

from leftfold.events.errors import LogLocked, LogNotFound

_NAME = re.compile(r"(\d{8})\.jsonl(\.zst)?")
_SNAPSHOT = re.compile(r"snapshot-([1-9]\d*)\.json\.zst")


def segment_name(number: int) -> str:
    return f"{number:08d}.jsonl"


def segment_number(name: str) -> int:
    return int(name[:8])


def snapshot_name(seq: int) -> str:
    return f"snapshot-{seq}.json.zst"


def sync_folder(folder: Path) -> None:
    """Make the entries of a directory durable: files made, renamed and removed in it. Raises `OSError`."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


class Store(Protocol):
    """Segments by name, in order; only the last one, a plain one, is ever written to."""

    def segments(self) -> list[str]:
        """File names in ascending order of their numbers."""

    def open(self, name: str) -> BinaryIO:
        """The uncompressed bytes of a segment, from its beginning."""

    def snapshots(self) -> list[int]:
        """Numbers of the records after which there are snapshots, the newest first."""

    def read_snapshot(self, seq: int) -> bytes:
        """A snapshot's file, compressed as it is. Raises `OSError`."""

    def remove_snapshot(self, seq: int) -> None:
        """Remove a snapshot for good. Raises `OSError`."""

    def confirm(self, name: str) -> None:
        """Make durable what can be read of this segment, whatever became of who wrote it. Raises `OSError`."""

    def truncate(self, name: str, size: int) -> None:
        """Cut a plain segment to `size` bytes, durable when this returns. Raises `OSError`."""

    def start(self, number: int) -> None:
        """Write to this segment from now on, at its end. Raises `OSError`."""

    def write(self, data: memoryview) -> int:
        """Write some of `data`, and say how many bytes. Raises `OSError`."""

    def sync(self) -> None:
        """Return once everything written to this segment is durable, and the segment itself. Raises `OSError`."""

    def close(self, clean: bool = False) -> None:
        """Let go of everything; reading still works. `clean`: all that was written is durable."""


class MemoryStore:
    """Segments as byte strings."""

    def __init__(self) -> None:
        self.data: dict[str, bytearray] = {}
        self._current = bytearray()

    def segments(self) -> list[str]:
        return sorted(self.data)

    def open(self, name: str) -> BinaryIO:
        return io.BytesIO(self.data[name])

    def snapshots(self) -> list[int]:
        return []  # what dies with the process need not be recovered

    def read_snapshot(self, seq: int) -> bytes:
        raise FileNotFoundError(errno.ENOENT, "a log in memory has no snapshots", snapshot_name(seq))

    def remove_snapshot(self, seq: int) -> None:
        pass  # there are none

    def confirm(self, name: str) -> None:
        pass  # nothing outlives the process

    def truncate(self, name: str, size: int) -> None:
        del self.data[name][size:]

    def start(self, number: int) -> None:
        self._current = self.data.setdefault(segment_name(number), bytearray())

    def write(self, data: memoryview) -> int:
        self._current += data
        return len(data)

    def sync(self) -> None:
        pass  # nothing outlives the process

    def close(self, clean: bool = False) -> None:
        pass  # nothing to let go of


class DirectoryReader:
    """The segments of a log directory, for reading; needs no lock."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)

    def segments(self) -> list[str]:
        found: dict[str, str] = {}
        for name in sorted(os.listdir(self.directory), reverse=True):
            if match := _NAME.fullmatch(name):
                found[match[1]] = name  # the plain file, last in this order, wins over a compressed twin
        return [found[number] for number in sorted(found)]

    def open(self, name: str) -> BinaryIO:
        path = self.directory / name
        if not name.endswith(".zst"):
            try:
                return path.open("rb", buffering=1 << 18)
            except FileNotFoundError:
                path = path.with_name(f"{name}.zst")  # compressed since it was listed
        reader = zstandard.ZstdDecompressor().stream_reader(path.open("rb"), read_across_frames=True, closefd=True)
        return io.BufferedReader(cast(io.RawIOBase, reader), 1 << 18)

    def snapshots(self) -> list[int]:
        found = [match for name in os.listdir(self.directory) if (match := _SNAPSHOT.fullmatch(name))]
        return sorted([int(match[1]) for match in found], reverse=True)

    def read_snapshot(self, seq: int) -> bytes:
        return (self.directory / snapshot_name(seq)).read_bytes()


class DirectoryStore(DirectoryReader):
    """The segments of a log directory, for appending; holds its lock until closed."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Raises `LogLocked`, `OSError`."""
        super().__init__(directory)
        if self.directory.exists() and not self.directory.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "a log is a directory, and this is a file", str(directory))
        self._make_directory()
        self._clean = True
        self._lock = self._take_lock()
        self._file = -1
        self._new = False  # the file's entry in the directory may not be durable

    def _make_directory(self) -> None:
        """Make what is not there of the path, every new entry durable: a log must not vanish with its directory."""
        if self.directory.is_dir():
            return
        new = [self.directory]
        while not new[-1].parent.is_dir():
            new.append(new[-1].parent)
        for folder in reversed(new):
            folder.mkdir(mode=0o700 if folder is self.directory else 0o777, exist_ok=True)
            sync_folder(folder.parent)

    def _take_lock(self) -> int:
        lock = os.open(self.directory / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 32, 0).strip()
            os.close(lock)
            raise LogLocked(self.directory, int(holder) if holder.isdigit() else None) from None
        self._clean = not os.fstat(lock).st_size  # who closed it with everything durable left nothing in it
        os.ftruncate(lock, 0)
        os.pwrite(lock, b"%d\n" % os.getpid(), 0)
        return lock

    def confirm(self, name: str) -> None:
        """See `Store`; call it before the segment is read.

        After a sync that failed the system goes on to show what it could not write, as if it were on disk, and the next
        sync succeeds. So unless the last owner closed the log with everything durable, all bytes are written once more,
        in place: where they are on disk that changes nothing, whenever it is cut short.
        """
        rewrites = not self._clean and not name.endswith(".zst")
        file = os.open(self.directory / name, (os.O_RDWR if rewrites else os.O_RDONLY) | os.O_CLOEXEC)
        try:
            if rewrites:
                _rewrite(file)
            os.fsync(file)
        finally:
            os.close(file)
        sync_folder(self.directory)

    def truncate(self, name: str, size: int) -> None:
        file = os.open(self.directory / name, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.ftruncate(file, size)
            os.fsync(file)
        finally:
            os.close(file)

    def remove_snapshot(self, seq: int) -> None:
        (self.directory / snapshot_name(seq)).unlink(missing_ok=True)
        sync_folder(self.directory)

    def start(self, number: int) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        file = os.open(self.directory / segment_name(number), flags, 0o600)
        if self._file >= 0:
            os.close(self._file)
        self._file, self._new = file, True

    def write(self, data: memoryview) -> int:
        return os.write(self._file, data)

    def sync(self) -> None:
        if self._file >= 0:
            os.fsync(self._file)
        if self._new:
            sync_folder(self.directory)
            self._new = False

    def close(self, clean: bool = False) -> None:
        if self._lock < 0:
            return
        if self._file >= 0:
            os.close(self._file)
        if clean:
            os.ftruncate(self._lock, 0)
        os.close(self._lock)  # the lock file stays: removing it would let two processes hold "the" lock
        self._file = self._lock = -1


def _rewrite(file: int) -> None:
    at = 0
    while data := os.pread(file, 1 << 20, at):
        while data:
            done = os.pwrite(file, data, at)
            data, at = data[done:], at + done


def existing(directory: str | os.PathLike[str]) -> DirectoryReader:
    """The segments of a directory that must hold some. Raises `LogNotFound`."""
    reader = DirectoryReader(directory)
    if not reader.directory.is_dir():
        raise LogNotFound(f"no log directory at {directory}")
    if not reader.segments():
        raise LogNotFound(f"{directory} holds no log: there is no {segment_name(1)} in it")
    return reader
