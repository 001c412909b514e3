"""What is durable in which order: directories are synced where an entry in them must not be lost."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from leftfold.events import EventLog, LogBroken, Tick, compress_closed, encode
from tests.log_samples import segments, write


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What happened, in order: syncs of directories, files that came and went."""
    seen: list[tuple[str, str]] = []
    fsync, rename, unlink = os.fsync, Path.rename, Path.unlink

    def spied_fsync(file: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            seen.append(("sync", os.readlink(f"/proc/self/fd/{file}")))
        fsync(file)

    def spied_rename(path: Path, target: Any) -> Any:
        seen.append(("rename", Path(target).name))
        return rename(path, target)

    def spied_unlink(path: Path, missing_ok: bool = False) -> None:
        seen.append(("unlink", path.name))
        unlink(path, missing_ok)

    monkeypatch.setattr(os, "fsync", spied_fsync)
    monkeypatch.setattr(Path, "rename", spied_rename)
    monkeypatch.setattr(Path, "unlink", spied_unlink)
    return seen


def test_a_plain_segment_goes_only_when_its_compressed_twin_is_there_to_stay(
    tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    write(tmp_path, 40, segment_bytes=1500)
    closed = [path.name for path in segments(tmp_path)[:-1]]
    assert closed
    calls.clear()
    compress_closed(tmp_path)
    wanted = [
        call for name in closed for call in (("rename", f"{name}.zst"), ("sync", str(tmp_path)), ("unlink", name))
    ]
    assert calls == wanted


def test_every_new_directory_on_the_way_to_a_log_is_durable(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    with EventLog.open(tmp_path / "a" / "b" / "log") as log:
        assert calls == [("sync", str(tmp_path / inner)) for inner in ("", "a", "a/b")]
        log.append(Tick(t=0))
        log.flush()
    assert ("sync", str(tmp_path / "a" / "b" / "log")) in calls
    assert stat.S_IMODE((tmp_path / "a" / "b" / "log").stat().st_mode) == 0o700
    calls.clear()
    EventLog.open(tmp_path / "a" / "b" / "log").close()
    assert str(tmp_path / "a" / "b") not in [where for _, where in calls]


class Kernel:
    """Knows which bytes of which file are on disk. A sync that fails forgets what it could not write, as Linux does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fails = False
        self._dirty: dict[int, set[int]] = {}
        self._durable: dict[int, set[int]] = {}
        self._write, self._pwrite, self._fsync = os.write, os.pwrite, os.fsync
        for name in ("write", "pwrite", "fsync"):
            monkeypatch.setattr(os, name, getattr(self, name))

    def write(self, file: int, data: Any) -> int:
        start = os.fstat(file).st_size  # files of a log are appended to
        return self._soil(file, start, self._write(file, data))

    def pwrite(self, file: int, data: Any, at: int) -> int:
        return self._soil(file, at, self._pwrite(file, data, at))

    def _soil(self, file: int, start: int, count: int) -> int:
        self._dirty.setdefault(os.fstat(file).st_ino, set()).update(range(start, start + count))
        return count

    def fsync(self, file: int) -> None:
        number = os.fstat(file).st_ino
        dirty = self._dirty.pop(number, set())
        if self.fails:
            raise OSError(5, "Input/output error")
        self._durable.setdefault(number, set()).update(dirty)
        self._fsync(file)

    def lost(self, path: Path) -> int:
        """How many bytes that the system shows are not on disk."""
        found = path.stat()
        return found.st_size - len(self._durable.get(found.st_ino, set()))


def _abandoned(log: EventLog) -> None:
    """The process ends without having closed its log: only the lock goes."""
    store: Any = log._store
    os.close(store._lock)
    store._lock = -1


@pytest.mark.parametrize("closed", [True, False])
def test_what_a_failed_sync_lost_is_on_disk_before_anybody_goes_on_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    kernel, segment = Kernel(monkeypatch), tmp_path / "00000001.jsonl"
    log = EventLog.open(tmp_path)
    log.append(Tick(t=1))
    assert log.sync() == 1 and not kernel.lost(segment)
    log.append(Tick(t=2))
    kernel.fails = True
    with pytest.raises(OSError, match="Input/output"):
        log.sync()
    if closed:
        log.close()
    else:
        _abandoned(log)
    with pytest.raises(OSError, match="Input/output"):
        EventLog.open(tmp_path)
    kernel.fails = False
    assert kernel.lost(segment) > 40, "the system shows it all the same"
    with EventLog.open(tmp_path) as again:
        assert len(again) == 2 and not kernel.lost(segment)


def test_what_was_written_and_not_synced_is_on_disk_once_the_log_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel(monkeypatch)
    log = EventLog.open(tmp_path, segment_bytes=200)
    for t in range(9):
        log.append(Tick(t=t))
    log.flush()
    _abandoned(log)
    EventLog.open(tmp_path).close()
    assert [kernel.lost(path) for path in segments(tmp_path)] == [0] * len(segments(tmp_path))


def test_a_log_that_was_closed_well_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 5)
    rewritten: list[int] = []
    pwrite = os.pwrite

    def spied(file: int, data: Any, at: int) -> int:
        rewritten.append(len(data))
        return pwrite(file, data, at)

    monkeypatch.setattr(os, "pwrite", spied)
    EventLog.open(tmp_path).close()
    assert sum(rewritten) < 10, "the lock's process id and nothing else"


def test_a_segment_whose_directory_cannot_be_synced_is_not_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(folder: Path) -> None:
        raise OSError(5, "Input/output error")

    log = EventLog.open(tmp_path)
    log.append(Tick(t=1))
    with monkeypatch.context() as patch:
        patch.setattr("leftfold.events.stores.sync_folder", broken)
        with pytest.raises(OSError, match="Input/output"):
            log.sync()
    with pytest.raises(LogBroken):
        log.sync()
    log.close()


def test_two_that_compress_one_log_do_not_spoil_it(tmp_path: Path) -> None:
    items = write(tmp_path, 400, segment_bytes=1500)
    assert len(segments(tmp_path)) > 8
    threads = [threading.Thread(target=compress_closed, args=(tmp_path,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [encode(event) for _, event in EventLog.read(tmp_path)] == [encode(event) for event in items]
    assert len(list(tmp_path.glob("*.jsonl"))) == 1 and not list(tmp_path.glob("*.tmp"))


def test_a_compression_that_fails_takes_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 40, segment_bytes=1500)

    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        compress_closed(tmp_path)
    assert not list(tmp_path.glob("*.tmp")) and not list(tmp_path.glob("*.zst"))
