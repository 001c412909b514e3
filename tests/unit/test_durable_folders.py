"""What is durable in which order: directories are synced where an entry in them must not be lost."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from leftfold.events import EventLog, Tick, compress_closed
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
