"""Records of older schemas are read as those of the newest; who appends begins a new segment in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from leftfold.events import Abort, EventLog, LogSchemaUnknown, Resume, framing, log, reader, snapshots, upcasts, walk
from tests.log_samples import segments


@pytest.fixture
def schema_2(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schema 2, in which an abort's reasons are said louder."""
    for module in (framing, walk, log, reader, upcasts, snapshots):
        monkeypatch.setattr(module, "SCHEMA", 2)

    def louder(record: dict[str, Any]) -> dict[str, Any]:
        return {**record, "reason": record["reason"].upper()} if record["type"] == "abort" else record

    monkeypatch.setitem(upcasts.UPCASTS, 1, louder)


def write(directory: Path) -> None:
    with EventLog.open(directory) as made:
        made.append(Abort(t=1, rid="a", reason="gone"))
        made.append(Resume(t=2))


def reasons(directory: Path) -> list[str]:
    return [one.event.reason for one in EventLog.read(directory) if isinstance(one.event, Abort)]


def test_every_schema_has_its_step() -> None:
    assert upcasts.complete(upcasts.UPCASTS, framing.SCHEMA)
    assert not upcasts.complete({}, 2)


def test_an_old_log_is_read_by_its_schema_and_goes_on_in_the_new_one(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    write(tmp_path)
    assert reasons(tmp_path) == ["gone"]
    request.getfixturevalue("schema_2")
    assert reasons(tmp_path) == ["GONE"]
    with EventLog.open(tmp_path) as made:
        assert made.append(Abort(t=3, rid="a", reason="once more")) == 3
        assert [one.event.reason for one in made if isinstance(one.event, Abort)] == ["GONE", "once more"]
    assert reasons(tmp_path) == ["GONE", "once more"]
    assert [path.read_bytes()[:60].count(b'"schema":2') for path in segments(tmp_path)] == [0, 1]
    assert b'"reason":"gone"' in b"".join(EventLog.read(tmp_path).lines()), "lines stay as they were written"


def test_a_log_of_a_later_schema_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as later:
        for module in (framing, walk, log, reader):
            later.setattr(module, "SCHEMA", 2)
        write(tmp_path)
    with pytest.raises(LogSchemaUnknown, match=r"00000001\.jsonl has schema 2; this version reads schema 1"):
        reasons(tmp_path)
