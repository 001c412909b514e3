"""What happens to segments once they are closed: they are compressed, and removed when nothing needs them any more.

Everything here works on files that nobody appends to, so it may run in any thread, beside the process that appends.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import zstandard

from leftfold.events.snapshots import KEEPS_SNAPSHOTS, readable_snapshots
from leftfold.events.stores import DirectoryReader, existing, snapshot_name, sync_folder
from leftfold.events.walk import header_of

_UNITS: Mapping[str, int] = {
    "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_SECONDS: Mapping[str, int] = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def compress_next(directory: str | os.PathLike[str], level: int = 3) -> str | None:
    """Compress the oldest closed segment that is plain; its new name, None when there is none left to do.

    The compressed file is there to stay before the plain one goes: a crash leaves both, and the plain one counts.
    Raises `LogNotFound`, `OSError`.
    """
    reader = existing(directory)
    plain = [name for name in reader.segments()[:-1] if not name.endswith(".zst")]
    if not plain:
        return None
    try:
        _compress(reader.directory / plain[0], level)
    except FileNotFoundError:
        if (reader.directory / plain[0]).exists():
            raise
    return f"{plain[0]}.zst"  # by us, or by somebody else meanwhile


def compress_closed(directory: str | os.PathLike[str], level: int = 3) -> list[str]:
    """Compress every segment but the last one; the new file names. Raises `LogNotFound`, `OSError`."""
    made = []
    while (name := compress_next(directory, level)) is not None:
        made.append(name)
    return made


def _compress(source: Path, level: int) -> None:
    target = source.with_name(f"{source.name}.zst")
    partial = source.with_name(f"{source.name}.zst.tmp")
    with source.open("rb") as plain:
        fcntl.flock(plain, fcntl.LOCK_EX)  # two that write one `partial` would each spoil what the other renames
        written = os.fstat(plain.fileno())
        if written.st_nlink:  # else somebody else has done it meanwhile
            try:
                _write_compressed(plain, partial, written, level)
                partial.rename(target)
            except OSError:
                partial.unlink(missing_ok=True)
                raise
            sync_folder(source.parent)  # before the plain file goes, its twin must be there to stay
            source.unlink()


def _write_compressed(plain: BinaryIO, partial: Path, written: os.stat_result, level: int) -> None:
    compressor = zstandard.ZstdCompressor(level=level, write_checksum=True, write_content_size=True)
    file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(file, "wb") as out:
        compressor.copy_stream(plain, out, size=written.st_size)
        out.flush()
        os.utime(out.fileno(), ns=(written.st_atime_ns, written.st_mtime_ns))  # retention goes by it
        os.fsync(out.fileno())


@dataclass(frozen=True, slots=True)
class Retention:
    """How much of a log is kept: `size` in bytes as they lie on disk, `age` in seconds since a segment was written to.

    None: no limit. Where both are given, what one of them allows to go goes.
    """

    size: int | None = None
    age: int | None = None

    def __bool__(self) -> bool:
        return self.size is not None or self.age is not None

    @classmethod
    def parse(cls, text: str) -> Retention:
        """From `7d`, `10GiB`, or both as `7d,10GiB`; `none` keeps everything. Raises ValueError."""
        size: int | None = None
        age: int | None = None
        for part in text.lower().split(",") if text.lower() != "none" else ():
            match = re.fullmatch(r"(\d+(?:\.\d+)?) *([a-z]+)", part.strip())
            unit = match[2] if match else ""
            if match and unit in _UNITS and size is None:
                size = int(float(match[1]) * _UNITS[unit])
            elif match and unit in _SECONDS and age is None:
                age = int(float(match[1]) * _SECONDS[unit])
            else:
                raise ValueError(f"{text!r} is no retention: give an age such as 7d, a size such as 10GiB, or both")
        return cls(size, age)


def removable(directory: str | os.PathLike[str]) -> list[str]:
    """Segments, oldest first, that no recovery needs: all their records lie before the older of two good snapshots.

    Raises `LogNotFound`, `LogDamaged`, `OSError`.
    """
    reader = existing(directory)
    good = readable_snapshots(reader, KEEPS_SNAPSHOTS)
    if len(good) < KEEPS_SNAPSHOTS:
        return []
    names = reader.segments()
    found = []
    for name, after in zip(names[:-2], names[1:-1], strict=True):  # the header of the last one may not be durable yet
        header = header_of(reader, after)
        if header is None or header.first_seq > good[-1] + 1:
            break
        found.append(name)
    return found


def prune(directory: str | os.PathLike[str], keep: Retention, now: float | None = None) -> list[str]:
    """Remove the oldest segments as far as `keep` says and no recovery needs them; their names.

    `now`: seconds since the epoch. Raises `LogNotFound`, `LogDamaged`, `OSError`.
    """
    if not keep:
        return []
    reader = existing(directory)
    now = time.time() if now is None else now
    total = sum(path.stat().st_size for path in _files(reader))
    gone = []
    candidates = removable(directory)
    if candidates:
        sync_folder(reader.directory)  # the snapshots that stand in for them must be there to stay
    for name in candidates:
        files = [path for path in _files(reader) if path.name.startswith(name[:14])]
        if not files:
            continue  # somebody else has removed it meanwhile
        size = sum(path.stat().st_size for path in files)
        written = max(path.stat().st_mtime for path in files)
        too_old = keep.age is not None and now - written > keep.age
        if not too_old and (keep.size is None or total <= keep.size):
            break
        remove_segment(reader.directory, name)
        total -= size
        gone.append(name)
    if gone:
        _forget_snapshots(reader)
    return gone


def _forget_snapshots(reader: DirectoryReader) -> None:
    """Remove snapshots whose following records are gone: nobody can go on from them."""
    begins = header_of(reader, reader.segments()[0])
    for seq in reader.snapshots():
        if begins is not None and seq < begins.first_seq - 1:
            (reader.directory / snapshot_name(seq)).unlink(missing_ok=True)


def _files(reader: DirectoryReader) -> list[Path]:
    return sorted(reader.directory.glob("[0-9]" * 8 + ".jsonl*"))


def remove_segment(directory: Path, name: str) -> None:
    """Remove a segment and its twin, for good: later ones may go only when this one will not come back."""
    plain = name.removesuffix(".zst")
    for twin in (f"{plain}.zst.tmp", plain, f"{plain}.zst"):
        (directory / twin).unlink(missing_ok=True)
    sync_folder(directory)


__all__ = ["Retention", "compress_closed", "compress_next", "prune", "removable", "remove_segment"]
