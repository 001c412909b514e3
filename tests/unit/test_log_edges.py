"""What a log says at its edges: files that go while they are read, snapshots that are none, a lock that is held."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import zstandard

from leftfold.events import (
    Abort,
    EventLog,
    LogDamaged,
    LogError,
    Retention,
    Snapshot,
    SnapshotBad,
    Tick,
    compress_closed,
    compress_next,
    prune,
    save_snapshot,
)
from leftfold.events import compaction as compacting
from leftfold.events.compaction import removable, remove_segment
from leftfold.events.framing import SCHEMA
from leftfold.events.keyed import Texts
from leftfold.events.quick import quick
from leftfold.events.snapshots import decode_snapshot
from leftfold.events.stores import DirectoryReader, DirectoryStore, MemoryStore
from leftfold.events.writer import LogWriter
from tests.disks import Disk
from tests.log_samples import segments, write
from tests.unit.test_log_snapshots import NOW, log_with_snapshots

# Snapshots


def snapshot_file(**body: Any) -> bytes:
    """The file of a snapshot after record 7; what is in `body` comes after its own fields, and in their place."""
    return Snapshot(7, 0x1234ABCD, "0" * 32, body).encode()


def spoiled(raw: bytes, old: bytes, new: bytes) -> bytes:
    line = zstandard.ZstdDecompressor().decompress(raw)
    assert line.count(old) == 1
    return zstandard.ZstdCompressor(write_checksum=True).compress(line.replace(old, new))


def test_a_snapshot_is_read_as_it_was_written() -> None:
    found = decode_snapshot(snapshot_file(state={"x": 1}), 7)
    assert (found.seq, found.chain, found.digest, found.body) == (7, 0x1234ABCD, "0" * 32, {"state": {"x": 1}})


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (spoiled(snapshot_file(x=1), b'"x":1', b'"x":2'), "snapshot-7.*: checksum .*follows from the content"),
        (snapshot_file(schema=SCHEMA + 1), f"snapshot-7.* has schema {SCHEMA + 1}; this version reads schema {SCHEMA}"),
        (snapshot_file(schema="new"), "snapshot-7.* has schema new"),
        (snapshot_file(type="map"), "snapshot-7.* holds a map of record 7"),
        (snapshot_file(seq=8), "snapshot-7.* holds a snapshot of record 8"),
        (snapshot_file(digest=5), "snapshot-7.* holds a snapshot of record 7"),
    ],
    ids=["content", "later schema", "no schema", "type", "record", "digest"],
)
def test_a_file_that_is_no_snapshot_of_this_record_is_refused(raw: bytes, says: str) -> None:
    with pytest.raises(SnapshotBad, match=says):
        decode_snapshot(raw, 7)


def test_a_snapshot_that_is_not_there_is_bad(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(SnapshotBad, match="snapshot-3.json.zst cannot be read"):
        EventLog.read(tmp_path).snapshot(3)
    with pytest.raises(SnapshotBad, match="a log in memory has no snapshots"):
        EventLog.memory().snapshot(3)


def test_a_snapshot_that_cannot_take_its_name_leaves_nothing_half_done(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "snapshot-7.json.zst").mkdir()
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(IsADirectoryError):
        save_snapshot(tmp_path, 7, snapshot_file())
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_snapshot_from_before_the_log_begins_cannot_be_gone_on_from(tmp_path: Path) -> None:
    log_with_snapshots(tmp_path)
    oldest = EventLog.read(tmp_path).snapshot(EventLog.read(tmp_path).snapshots()[-1])
    assert prune(tmp_path, Retention(size=0), NOW)
    begins = EventLog.read(tmp_path).first_seq
    assert begins > oldest.seq + 1
    with pytest.raises(SnapshotBad, match=f"ends before the log begins, which is at {begins}"):
        next(EventLog.read(tmp_path).after(oldest))


# Segments that go, or cannot be read


def test_a_segment_that_was_compressed_since_it_was_listed_is_read_all_the_same(tmp_path: Path) -> None:
    write(tmp_path, 40, segment_bytes=500)
    reader = DirectoryReader(tmp_path)
    name = reader.segments()[0]
    plain = (tmp_path / name).read_bytes()
    assert compress_next(tmp_path) == f"{name}.zst" and not (tmp_path / name).exists()
    with reader.open(name) as file:
        assert file.read() == plain


def test_a_segment_that_is_removed_while_the_log_is_read_is_named(tmp_path: Path) -> None:
    write(tmp_path, 40, segment_bytes=500)
    records = iter(EventLog.read(tmp_path))
    assert next(records).seq == 1
    remove_segment(tmp_path, "00000002.jsonl")
    with pytest.raises(LogDamaged, match="removed while the log was read") as error:
        list(records)
    assert error.value.segment == "00000002.jsonl"


def test_a_segment_that_cannot_be_uncompressed_is_named_where_only_its_header_is_asked_for(tmp_path: Path) -> None:
    log_with_snapshots(tmp_path)
    compress_closed(tmp_path)
    second = sorted(tmp_path.glob("0*.zst"))[1]
    second.write_bytes(b"this is no compressed segment")
    with pytest.raises(LogDamaged, match="cannot be read") as error:
        removable(tmp_path)
    assert error.value.segment == second.name


def test_a_log_of_which_only_a_last_segment_without_a_header_is_left_is_damaged(tmp_path: Path) -> None:
    write(tmp_path, 40, segment_bytes=500)
    *gone, last = segments(tmp_path)
    for path in gone:
        path.unlink()
    last.write_bytes(last.read_bytes()[:20])
    with pytest.raises(LogDamaged, match="no header, and no segment stands before it") as error:
        list(EventLog.read(tmp_path))
    assert error.value.segment == last.name


# Compaction beside somebody who does the same


def test_a_segment_that_somebody_else_compresses_meanwhile_is_compressed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = write(tmp_path, 40, segment_bytes=500)
    compress = compacting._compress

    def after_another(source: Path, level: int) -> None:
        compress(source, level)
        compress(source, level)

    monkeypatch.setattr(compacting, "_compress", after_another)
    assert compress_next(tmp_path) == "00000001.jsonl.zst"
    assert len(list(EventLog.read(tmp_path))) == len(items)


def test_a_compressed_twin_that_is_lost_before_it_has_its_name_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = write(tmp_path, 40, segment_bytes=500)
    before = sorted(path.name for path in tmp_path.iterdir())
    monkeypatch.setattr(compacting, "_write_compressed", lambda plain, partial, written, level: None)
    with pytest.raises(FileNotFoundError):
        compress_next(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert len(list(EventLog.read(tmp_path))) == len(items)


def test_all_but_the_last_two_segments_go_where_two_snapshots_are_behind_them(tmp_path: Path) -> None:
    log_with_snapshots(tmp_path, every=1)
    names = [path.name for path in segments(tmp_path)]
    assert len(names) > 3 and removable(tmp_path) == names[:-2]
    assert prune(tmp_path, Retention(size=0), NOW) == names[:-2]


def test_segments_that_somebody_else_removes_meanwhile_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_with_snapshots(tmp_path, every=1)
    first, *others = removable(tmp_path)

    def while_another_removes(directory: Path) -> list[str]:
        found = removable(directory)
        remove_segment(directory, first)
        return found

    monkeypatch.setattr(compacting, "removable", while_another_removes)
    assert prune(tmp_path, Retention(size=0), NOW) == others


# Logs and stores


@pytest.mark.parametrize("given", [{}, {"directory": "log", "store": MemoryStore()}], ids=["none", "both"])
def test_a_log_has_one_place(given: Mapping[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TypeError, match="give a directory or a store"):
        EventLog(**given)
    assert not list(tmp_path.iterdir())


def test_a_log_without_a_record_is_true_for_whoever_reads_it(tmp_path: Path) -> None:
    EventLog.open(tmp_path).close()
    (tmp_path / "00000001.jsonl").touch()
    reader = EventLog.read(tmp_path)
    assert len(reader) == 0 and reader


def test_a_store_that_is_closed_twice_does_not_give_away_anothers_lock(tmp_path: Path) -> None:
    first = DirectoryStore(tmp_path)
    first.close(clean=True)
    with EventLog.open(tmp_path) as log:
        log.append(Tick(t=1))
        first.close()
        with pytest.raises(LogError, match="is in use"):
            EventLog.open(tmp_path)


def test_an_append_does_not_wait_for_another_thread_that_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """But where it has fallen far behind: then it is waited for, so that no queue grows without bound."""
    monkeypatch.setattr("leftfold.events.log.FLUSH_BYTES", 100)
    monkeypatch.setattr("leftfold.events.log.STALL_BYTES", 2_000)
    store = MemoryStore()
    log = EventLog(store=store)
    with log._io:
        for t in range(20):
            log.append(Tick(t=t))
        assert not store.data and 100 < log._taken - log._written < 2_000
    log.append(Tick(t=20))
    assert store.data and log._taken - log._written < 100
    assert [record.seq for record in log] == [*range(1, 22)]


# The log's own thread


def test_a_mark_whose_listener_fails_is_said_and_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    reached: list[int] = []

    def fails(seq: int, crc: int) -> None:
        raise RuntimeError("planted")

    disk = Disk()
    log = LogWriter(EventLog(store=disk), seconds=0.0)
    log.append(Abort(t=0, rid="a"))
    log.when_durable(fails)
    log.when_durable(lambda seq, crc: reached.append(seq))
    log.append(Abort(t=0, rid="b"))
    with caplog.at_level(logging.ERROR):
        log.close()
    assert reached == [1] and log.durable == 2
    assert "what was to happen after record 1 failed" in caplog.text and "planted" in caplog.text


def test_a_log_that_has_ended_reaches_no_mark() -> None:
    reached: list[int] = []
    ended = threading.Event()
    log = LogWriter(EventLog(store=Disk()), seconds=0.0)
    log.listen(lambda: log.failure is not None and ended.set())
    log.append(Abort(t=0, rid="a"))
    log.abandon("enough")
    log.commit()
    assert ended.wait(20)
    log.when_durable(lambda seq, crc: reached.append(seq))
    log.append(Abort(t=0, rid="b"))
    with pytest.raises(LogError, match="enough"):
        log.close()
    assert not reached and log.missing == 2


# What stands for what is told to nobody, and records made by machine


@pytest.mark.parametrize(
    ("value", "shows"),
    [(0.0, 0.0), (-0.0, 0.0), (2.75, 0.5), (-1e9, -0.5), ({"a": [1.5, 3]}, [0.5, 1]), (None, None), (True, True)],
)
def test_of_a_number_only_its_sign_is_told(value: Any, shows: Any) -> None:
    told = Texts(b"key").scrub(value)
    assert (list(told.values())[0] if isinstance(value, dict) else told) == shows


def _with_factory() -> type:
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Collects:
        items: list[int] = field(default_factory=list)

    return Collects


def _with_more_to_do() -> type:
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Checks:
        number: int

        def __post_init__(self) -> None:
            assert self.number > 0

    return Checks


@pytest.mark.parametrize("make", [_with_factory, _with_more_to_do])
def test_a_record_that_does_more_than_to_set_its_fields_is_not_made_quick(make: Callable[[], type]) -> None:
    cls = make()
    with pytest.raises(TypeError, match=f"{cls.__name__} does more than to set its fields"):
        quick(cls)
