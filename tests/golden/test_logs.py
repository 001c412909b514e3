"""Logs of every released format are read, recovered and replayed by today's code; one of them must be found out."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

from leftfold.events import EventLog, Tick, encode
from leftfold.replay.snapshots import begin, restore
from leftfold.replay.verify import verify
from tests import page_reader

LOGS = Path(__file__).parent / "logs"
NAMES = sorted(path.parent.name for path in LOGS.glob("*/expected.json"))


def expected(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((LOGS / name / "expected.json").read_text())
    return found


def test_there_are_compressed_ones_one_without_beginning_and_one_that_must_fail() -> None:
    assert any((LOGS / name).glob("*.jsonl.zst") for name in NAMES)
    assert any(expected(name)["first_seq"] > 1 for name in NAMES)
    assert all(any((LOGS / name).glob("snapshot-*")) for name in NAMES if expected(name)["divergence"] is None)
    divergence = expected("must-fail")["divergence"]
    assert (divergence["seq"], divergence["field"]) == (3, "chunks")


@pytest.mark.parametrize("name", NAMES)
def test_a_log_replays_to_what_it_was(name: str) -> None:
    wanted = expected(name)
    wanted.pop("digest")
    assert verify(EventLog.read(LOGS / name)).as_dict() == wanted


@pytest.mark.parametrize("name", NAMES)
def test_a_log_is_recovered_from_its_newest_snapshot_and_goes_on(name: str, tmp_path: Path) -> None:
    shutil.copytree(LOGS / name, tmp_path / "log")
    with warnings.catch_warnings(), EventLog.open(tmp_path / "log") as log:
        warnings.simplefilter("error")
        fold, records = begin(log)
        assert fold.seq == max(log.snapshots(), default=0)
        for one in records:
            fold.take(one.seq, one.event)
        assert fold.state is not None and fold.state.digest() == expected(name)["digest"]
        fold.state.check()
        assert log.append(Tick(t=log.last_t)) == fold.seq + 1


@pytest.mark.parametrize("name", NAMES)
def test_a_reader_written_from_the_page_reads_the_same(name: str) -> None:
    reader = EventLog.read(LOGS / name)
    records = [record for record, _ in page_reader.read(LOGS / name)]
    assert [record["seq"] for record in records] == [one.seq for one in reader]
    for record, one in zip(records, reader, strict=True):
        assert {key: value for key, value in record.items() if key != "crc"} == json.loads(encode(one.event, one.seq))
    snapshots = page_reader.read_snapshots(LOGS / name)
    assert sorted(snapshots, reverse=True) == reader.snapshots()
    for seq, snapshot in snapshots.items():
        assert restore(reader.snapshot(seq)).state is not None
        assert snapshot["digest"] == reader.snapshot(seq).digest
