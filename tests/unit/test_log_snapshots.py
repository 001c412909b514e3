"""Snapshots beside a log, and logs whose beginning is gone: what recovery takes, and what it passes over."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path

import pytest
import zstandard

from leftfold.events import (
    EventLog,
    LogDamaged,
    LogReader,
    Retention,
    Snapshot,
    SnapshotBad,
    SnapshotPassedOver,
    Tick,
    compress_closed,
    compress_next,
    prune,
    save_snapshot,
)
from leftfold.events.codec import plain
from leftfold.events.compaction import removable
from leftfold.replay.errors import NotStarted
from leftfold.replay.fold import Fold, fold
from leftfold.replay.snapshots import begin, capture, fold_to, whole
from leftfold.replay.verify import verify
from tests.log_samples import segments, write
from tests.logs import record

NOW = 4e9
"""Later than anything was written, in seconds since the epoch."""


def log_with_snapshots(directory: Path, every: int = 12, segment_bytes: int = 600) -> str:
    """A log of some requests' lives, a snapshot every so many records; the digest at its end."""
    memory = EventLog.memory()
    record(memory)
    fold = Fold()
    with EventLog.open(directory, segment_bytes=segment_bytes) as log:
        for one in memory:
            log.append(one.event)
            fold.take(one.seq, one.event)
            if one.seq % every == 0:
                log.sync()
                seq, chain = log.mark
                assert seq == one.seq
                save_snapshot(directory, seq, capture(fold).encode(chain), keep=99)
    assert fold.state is not None
    return fold.state.digest()


def recovered(log: LogReader | EventLog, at: int | None = None) -> tuple[int, str, int]:
    """Where the fold began, the digest at the end, and how many records were read."""
    fold, records = begin(log, at)
    start, read = fold.seq, 0
    for one in records:
        fold.take(one.seq, one.event)
        read += 1
    assert fold.state is not None
    return start, fold.state.digest(), read


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "log"


def test_recovery_reads_what_comes_after_the_newest_snapshot(folder: Path) -> None:
    digest = log_with_snapshots(folder)
    reader = EventLog.read(folder)
    newest = reader.snapshots()[0]
    assert recovered(reader) == (newest, digest, len(reader) - newest)
    compress_closed(folder)
    with EventLog.open(folder) as log:
        assert recovered(log) == (newest, digest, len(reader) - newest)
        assert log.append(Tick(t=log.last_t)) == len(reader) + 1


def test_every_snapshot_and_its_tail_equal_the_whole_log(folder: Path) -> None:
    digest = log_with_snapshots(folder, every=3)
    reader = EventLog.read(folder)
    for seq in reader.snapshots():
        assert recovered(reader, seq) == (seq, digest, len(reader) - seq)
    assert len(reader.snapshots()) > 10


def test_a_log_that_is_written_reads_its_own_newest_records_behind_a_snapshot(folder: Path) -> None:
    log_with_snapshots(folder)
    with EventLog.open(folder) as log:
        last = log.append(Tick(t=log.last_t))
        start, digest, read = recovered(log)
        assert (start + read, start) == (last, log.snapshots()[0])
    assert recovered(log) == (start, digest, read) == recovered(EventLog.read(folder))


def test_a_snapshot_is_not_looked_at_where_an_earlier_moment_is_asked_for(folder: Path) -> None:
    digest = log_with_snapshots(folder)
    assert recovered(EventLog.read(folder), 11)[0] == 0
    assert recovered(EventLog.read(folder), 12)[:2] == (12, digest)


@pytest.mark.parametrize("spoil", ["cut", "flip", "empty", "digest", "other", "laws", "state", "first"])
def test_a_bad_snapshot_is_passed_over_for_an_older_one_and_said_so(folder: Path, spoil: str) -> None:
    digest = log_with_snapshots(folder)
    newest, older = EventLog.read(folder).snapshots()[:2]
    path = folder / f"snapshot-{newest}.json.zst"
    raw = path.read_bytes()
    good = EventLog.read(folder).snapshot(newest)
    wrong = {
        "cut": lambda: raw[:-9],
        "flip": lambda: raw[:200] + bytes([raw[200] ^ 1]) + raw[201:],
        "empty": lambda: b"",
        "digest": lambda: Snapshot(good.seq, good.chain, "0" * 32, good.body).encode(),
        "other": lambda: Snapshot(good.seq, good.chain ^ 1, good.digest, good.body).encode(),
        "laws": lambda: Snapshot(good.seq, good.chain, good.digest, {**good.body, "laws": 99}).encode(),
        "state": lambda: Snapshot(good.seq, good.chain, good.digest, {**good.body, "state": {}}).encode(),
        "first": lambda: Snapshot(good.seq, good.chain, good.digest, {**good.body, "first": plain(Tick(t=1))}).encode(),
    }
    path.write_bytes(wrong[spoil]())
    with pytest.warns(SnapshotPassedOver, match=str(newest)):
        assert recovered(EventLog.read(folder))[:2] == (older, digest)


def test_without_a_good_snapshot_the_whole_log_is_folded(folder: Path) -> None:
    digest = log_with_snapshots(folder)
    for path in folder.glob("snapshot-*"):
        path.write_bytes(zstandard.compress(b"{}\n"))
    with pytest.warns(SnapshotPassedOver):
        assert recovered(EventLog.read(folder))[:2] == (0, digest)


def test_a_flipped_bit_anywhere_in_a_snapshot_is_found_or_harmless(folder: Path) -> None:
    log_with_snapshots(folder, every=40)
    reader = EventLog.read(folder)
    (seq,) = reader.snapshots()[:1]
    path = folder / f"snapshot-{seq}.json.zst"
    raw, harmless = path.read_bytes(), []
    good = reader.snapshot(seq)
    for place in range(len(raw)):
        path.write_bytes(raw[:place] + bytes([raw[place] ^ 16]) + raw[place + 1 :])
        try:
            assert reader.snapshot(seq) == good
            harmless.append(place)
        except SnapshotBad:
            pass
    assert len(harmless) < 8, f"only a few of the frames' bits hold nothing, but {harmless} went unnoticed"


def test_a_snapshot_ahead_of_a_log_that_lost_its_tail_is_removed_at_the_opening(folder: Path) -> None:
    log_with_snapshots(folder, every=4, segment_bytes=1 << 20)
    (only,) = segments(folder)
    lines = only.read_bytes().splitlines(keepends=True)
    only.write_bytes(b"".join(lines[:11]))
    with pytest.warns(SnapshotPassedOver, match="ahead of the log"):
        assert recovered(EventLog.read(folder))[0] == 8
    with pytest.warns(SnapshotPassedOver, match="ahead of the log, which ends at 10: removed"):
        log = EventLog.open(folder)
    with log, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert log.snapshots() == [8, 4]
        assert recovered(log)[0] == 8


def test_cut_at_any_byte_of_its_last_segment_a_log_is_recovered_to_its_last_whole_record(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)  # hundreds of them, and nothing here asks for durability
    log_with_snapshots(folder, every=4, segment_bytes=1500)
    compress_closed(folder)
    digests, fold = {}, Fold()
    for one in EventLog.read(folder):
        fold.take(one.seq, one.event)
        digests[one.seq] = fold.state.digest() if fold.state else ""
    (last,) = segments(folder)
    data = last.read_bytes()
    before = len(digests) + 1 - data.count(b"\n")
    snapshots = EventLog.read(folder).snapshots()
    kept = {path: path.read_bytes() for path in folder.glob("snapshot-*")}
    assert any(seq > before for seq in snapshots) and len([*folder.glob("*.jsonl.zst")]) > 1
    for size in range(len(data) + 1):
        last.write_bytes(data[:size])
        whole = before + max(0, data[:size].count(b"\n") - 1)
        torn = size - (data[:size].rfind(b"\n") + 1)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with EventLog.open(folder) as log:
                assert (log.dropped.size if log.dropped else 0) == torn
                assert len(log) == whole and log.snapshots() == [seq for seq in snapshots if seq <= whole]
                assert recovered(log)[:2] == (max(seq for seq in snapshots if seq <= whole), digests[whole])
        lost = [seq for seq in snapshots if seq > whole]
        assert len(said) == bool(torn) + len(lost)
        for seq in lost:
            path = folder / f"snapshot-{seq}.json.zst"
            path.write_bytes(kept[path])


def test_writing_a_snapshot_forgets_those_that_nobody_needs(folder: Path) -> None:
    log_with_snapshots(folder, every=5)
    reader = EventLog.read(folder)
    newest, second, third = reader.snapshots()[:3]
    (folder / f"snapshot-{second}.json.zst").write_bytes(b"bad")
    save_snapshot(folder, newest, (folder / f"snapshot-{newest}.json.zst").read_bytes())
    assert reader.snapshots() == [newest, second, third], "bad ones do not count"


# Retention


def test_retention_is_parsed_from_ages_and_sizes() -> None:
    assert Retention.parse("7d") == Retention(age=7 * 86400)
    assert Retention.parse("10GiB") == Retention(size=10 << 30)
    assert Retention.parse("1.5h, 2 GB") == Retention(size=2 * 10**9, age=5400)
    assert not Retention.parse("none")
    for wrong in ("", "7", "d", "-1d", "7d,8d", "1GB,2GB", "7 days", "x"):
        with pytest.raises(ValueError, match="is no retention"):
            Retention.parse(wrong)


def test_nothing_is_removed_that_a_recovery_needs(folder: Path) -> None:
    digest = log_with_snapshots(folder)
    keep = Retention(age=0)
    needed = EventLog.read(folder).snapshots()[1]
    gone = prune(folder, keep, NOW)
    assert gone == sorted(gone) and gone
    reader = EventLog.read(folder)
    assert 1 < reader.first_seq <= needed + 1
    assert recovered(reader)[1] == digest
    (folder / f"snapshot-{reader.snapshots()[0]}.json.zst").unlink()
    assert recovered(reader)[:2] == (needed, digest)
    assert prune(folder, keep, NOW) == [] or EventLog.read(folder).first_seq <= reader.snapshots()[1] + 1


@pytest.mark.parametrize("snapshots", [0, 1])
def test_a_log_with_less_than_two_good_snapshots_stays_whole(folder: Path, snapshots: int) -> None:
    log_with_snapshots(folder)
    for seq in EventLog.read(folder).snapshots()[snapshots:]:
        (folder / f"snapshot-{seq}.json.zst").write_bytes(b"bad")
    assert removable(folder) == []
    assert prune(folder, Retention(size=0), NOW) == []


def test_a_size_goes_by_what_lies_on_disk_and_an_age_by_the_last_write(folder: Path) -> None:
    log_with_snapshots(folder)
    compress_closed(folder)
    sizes = {path.name: path.stat().st_size for path in folder.glob("0*")}
    first, second, *_ = sorted(sizes)
    assert prune(folder, Retention(age=10**10), NOW) == []
    assert prune(folder, Retention(size=sum(sizes.values())), NOW) == []
    assert prune(folder, Retention(size=sum(sizes.values()) - sizes[first] - 1), NOW) == [first, second]


def test_a_log_without_its_beginning_is_read_appended_to_and_folded(folder: Path) -> None:
    digest = log_with_snapshots(folder)
    before = {one.seq: one for one in EventLog.read(folder)}
    prune(folder, Retention(size=0), NOW)
    reader = EventLog.read(folder)
    found = [one.seq for one in reader]
    assert found == list(range(reader.first_seq, len(before) + 1))
    assert (len(reader), reader.next_seq) == (len(found), len(before) + 1)
    start, records = whole(reader)
    assert start.seq == min(seq for seq in reader.snapshots() if seq >= reader.first_seq - 1)
    for one in records:
        start.take(one.seq, one.event)
    assert start.state is not None and start.state.digest() == digest
    with EventLog.open(folder) as log:
        assert (log.first_seq, len(log)) == (reader.first_seq, len(found))
        assert log.append(Tick(t=log.last_t)) == len(before) + 1
        assert [one.seq for one in log] == [*found, len(before) + 1]


def test_a_log_without_beginning_and_snapshots_cannot_be_folded_and_says_why(folder: Path) -> None:
    log_with_snapshots(folder)
    prune(folder, Retention(size=0), NOW)
    for path in folder.glob("snapshot-*"):
        path.unlink()
    with pytest.raises(NotStarted, match="the log begins at record .*no good snapshot"):
        begin(EventLog.read(folder))
    with pytest.raises(NotStarted, match="begins at record .*from a snapshot"):
        fold(EventLog.read(folder))
    verdict = verify(EventLog.read(folder))
    assert verdict.damage is not None and "no good snapshot goes before it" in verdict.damage["reason"]
    assert (verdict.clean, verdict.events) == (False, 0)


def test_a_bad_oldest_snapshot_lets_a_log_without_its_beginning_begin_later(folder: Path) -> None:
    digest = log_with_snapshots(folder, every=3)
    prune(folder, Retention(size=0), NOW)
    reader = EventLog.read(folder)
    *_, second, oldest = [seq for seq in reader.snapshots() if seq >= reader.first_seq - 1]
    (folder / f"snapshot-{oldest}.json.zst").write_bytes(b"")
    start, records = whole(EventLog.read(folder))
    assert start.seq == second > oldest
    for one in records:
        start.take(one.seq, one.event)
    assert start.state is not None and start.state.digest() == digest


def test_what_holds_no_started_has_no_state() -> None:
    with pytest.raises(NotStarted, match="the log holds no Started$"):
        fold_to(EventLog.memory())
    with pytest.raises(NotStarted, match="holds no Started up to seq 4"):
        fold_to(EventLog.memory(), 4)
    with pytest.raises(NotStarted, match="nothing was folded"):
        capture(Fold())


def test_a_gap_in_the_middle_is_damage_all_the_same(folder: Path) -> None:
    log_with_snapshots(folder)
    prune(folder, Retention(size=0), NOW)
    shutil.copy(folder / segments(folder)[0].name, folder / "00000001.jsonl")
    with pytest.raises(LogDamaged):
        list(EventLog.read(folder))


def test_compression_takes_one_segment_after_the_other(folder: Path) -> None:
    write(folder, 40, 500)
    names = [path.name for path in segments(folder)]
    assert [compress_next(folder) for _ in names] == [*(f"{name}.zst" for name in names[:-1]), None]
