"""`leftfold bench replay`: the log it measures is a real one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from leftfold.bench.replay import make
from leftfold.cli import main
from leftfold.events import EventLog
from leftfold.replay.snapshots import fold_to
from leftfold.replay.verify import verify


def test_the_log_has_so_many_events_and_its_snapshot_where_it_was_asked_for(tmp_path: Path) -> None:
    digest = make(tmp_path / "log", 700, 4, 600)
    reader = EventLog.read(tmp_path / "log")
    assert (len(reader), reader.snapshots()) == (700, [600])
    assert verify(reader).clean
    state = fold_to(reader).state
    assert state is not None and state.digest() == digest


def test_it_says_what_it_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "replay", "--events", "300", "--rows", "2", "--tail", "50", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["events"], found["rows"], found["tail"]) == (300, 2, 50)
    assert all(found[name] > 0 for name in ("fold_events_per_second", "verify_events_per_second", "bytes"))
    assert found["recovery_seconds"] >= 0
