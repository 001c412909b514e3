"""What lies beside a log: snapshots that starts begin from, segments that are compressed and removed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leftfold.events import EventLog, Started
from leftfold.events.compaction import Retention
from leftfold.keeping import KeptLog
from leftfold.replay.fold import Fold
from leftfold.replay.snapshots import Capture
from leftfold.replay.verify import verify
from tests.disks import Disk
from tests.engines import Listener, Spied, admit, alone, engine


def kept(folder: Path, **options: Any) -> KeptLog:
    segment_bytes = options.pop("segment_bytes", 64 << 20)
    return KeptLog(EventLog.open(folder, segment_bytes=segment_bytes), folder, **{"strict": True, **options})


def serve(folder: Path, *rids: str, max_tokens: int = 6, **options: Any) -> Listener:
    """A whole life of an engine: start, answer, stop."""
    heard = Listener(count=len(rids))
    made = engine(heard, log=kept(folder, **options))
    for rid in rids:
        admit(made, rid, max_tokens=max_tokens)
    made.run()
    return heard


def names(folder: Path, pattern: str = "*") -> list[str]:
    return sorted(path.name for path in folder.glob(pattern))


def until(what: Callable[[], Any]) -> None:
    for _ in range(20_000):
        if what():
            return
        threading.Event().wait(0.001)
    raise AssertionError("it never happened")


@pytest.fixture
def folded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the records that folds have taken."""
    seen: list[int] = []
    take = Fold.take

    def spied(self: Fold, seq: int, event: Any) -> Any:
        seen.append(seq)
        return take(self, seq, event)

    monkeypatch.setattr(Fold, "take", spied)
    return seen


def test_a_clean_stop_leaves_a_snapshot_and_a_start_begins_there(tmp_path: Path, folded: list[int]) -> None:
    assert serve(tmp_path, "a").tokens("a") == alone()
    end = folded[-1]
    assert names(tmp_path, "snapshot-*") == [f"snapshot-{end}.json.zst"]
    folded.clear()
    assert serve(tmp_path, "b").tokens("b") == alone()
    assert folded[0] == end + 1, "nothing is folded again"
    log = EventLog.read(tmp_path)
    assert [event.incarnation for _, event in log if isinstance(event, Started)] == [1, 2]
    assert verify(log).clean


def test_snapshots_come_every_so_many_events_and_a_killed_engine_goes_on_from_the_last(
    tmp_path: Path, folded: list[int]
) -> None:
    heard = Listener(until=lambda output: output.position >= 25)
    log = kept(tmp_path / "log", snapshot_every=7)
    upkeep = log._upkeep
    assert upkeep is not None
    made = engine(heard, log=log, executor=Spied(before=lambda _: until(lambda: upkeep.done >= log._taken_at)))
    admit(made, "a", max_tokens=40)
    saved: list[int] = []
    save = upkeep.save
    upkeep.save = lambda taken, chain: (saved.append(taken.seq), save(taken, chain))[1]  # type: ignore[method-assign]
    made.run()
    assert len(saved) > 3 and all(later - before >= 7 for before, later in zip(saved, saved[1:-1], strict=False))
    last = saved[-2]
    newest = tmp_path / "log" / f"snapshot-{saved[-1]}.json.zst"
    newest.unlink()  # as if it had been killed before the one of the clean stop
    assert newest.with_name(f"snapshot-{last}.json.zst").exists()
    folded.clear()
    again = serve(tmp_path / "log", "b")
    assert folded[0] == last + 1
    made_up = heard.tokens("a") + again.tokens("a")
    assert made_up == alone(max_tokens=40)[: len(made_up)] and verify(EventLog.read(tmp_path / "log")).clean


def test_told_to_take_none_there_are_none(tmp_path: Path) -> None:
    serve(tmp_path, "a", snapshot_every=0)
    assert names(tmp_path, "snapshot-*") == []


def test_a_bad_snapshot_is_passed_over_for_the_one_before(tmp_path: Path, folded: list[int]) -> None:
    serve(tmp_path, "a")
    first = folded[-1]
    serve(tmp_path, "b")
    newest = tmp_path / f"snapshot-{folded[-1]}.json.zst"
    raw = newest.read_bytes()
    newest.write_bytes(raw[: len(raw) // 2] + b"rubbish" + raw[len(raw) // 2 :])
    folded.clear()
    with pytest.warns(UserWarning, match=f"passed over: {newest.name}"):
        assert serve(tmp_path, "c").tokens("c") == alone()
    assert folded[0] == first + 1


def test_closed_segments_are_compressed_and_old_ones_removed(tmp_path: Path) -> None:
    options = {"segment_bytes": 2000, "snapshot_every": 10, "retention": Retention(size=3000)}
    for life in range(4):
        assert serve(tmp_path, f"r{life}", max_tokens=30, **options).tokens(f"r{life}") == alone(max_tokens=30)
    log = kept(tmp_path, **options)
    log.commit()
    until(lambda: "00000001.jsonl.zst" not in names(tmp_path) and "00000001.jsonl" not in names(tmp_path))
    log.close()
    assert len(names(tmp_path, "*.jsonl")) == 1 or names(tmp_path, "*.zst")
    assert EventLog.read(tmp_path).first_seq > 1
    assert serve(tmp_path, "z", **options).tokens("z") == alone()


def test_a_snapshot_waits_until_its_record_is_on_disk(tmp_path: Path) -> None:
    held = threading.Event()
    disk = Disk()
    heard = Listener(count=1)
    log = KeptLog(EventLog(store=disk), tmp_path, strict=True, snapshot_every=2, retry=0.001)
    made = engine(heard, log=log)
    until(lambda: log.durable == 1)
    disk.before_sync = lambda: held.wait(20) and None
    admit(made, "a", max_tokens=9)
    thread = threading.Thread(target=made.run)
    thread.start()
    until(lambda: made.stats()["log_seq"] > 10)
    assert log._newest > 1 and names(tmp_path, "snapshot-*") == []
    held.set()
    thread.join(20)
    assert names(tmp_path, "snapshot-*")


def test_a_log_that_ended_gets_no_snapshot_of_what_it_lacks(tmp_path: Path) -> None:
    disk = Disk()
    log = KeptLog(EventLog(store=disk), tmp_path, snapshot_every=2, seconds=0.0)
    made = engine(Listener(), log=log, on_log_failure="serve")
    until(lambda: log.durable == 1)
    disk.unsynced = True
    admit(made, "a")
    made.run()
    durable = log.durable
    assert all(int(name.split("-")[1].split(".")[0]) <= durable for name in names(tmp_path, "snapshot-*"))
    assert names(tmp_path, "gap-*") == [f"gap-{durable}.json"]


def test_a_snapshot_that_cannot_be_written_is_said_and_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)

    def full(*_: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Capture, "save", full)
    assert serve(tmp_path, "a").tokens("a") == alone()
    assert "could not be written" in caplog.text and names(tmp_path, "snapshot-*") == []


def test_whatever_a_snapshot_dies_of_the_next_one_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save, tries = Capture.save, []

    def strange(self: Capture, *where: Any) -> str:
        tries.append(self.seq)
        if len(tries) == 1:
            raise RuntimeError("planted")
        return save(self, *where)

    monkeypatch.setattr(Capture, "save", strange)
    assert serve(tmp_path, "a", max_tokens=40, snapshot_every=7).tokens("a") == alone(max_tokens=40)
    assert "could not be taken" in caplog.text and names(tmp_path, "snapshot-*")


def test_snapshots_do_not_pile_up_behind_a_slow_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, held, save = threading.Event(), threading.Event(), Capture.save
    saved: list[int] = []

    def slow(self: Capture, *where: Any) -> str:
        saved.append(self.seq)
        begun.set()
        assert held.wait(20)
        return save(self, *where)

    monkeypatch.setattr(Capture, "save", slow)
    heard = Listener(count=1)
    made = engine(heard, log=kept(tmp_path, snapshot_every=4))
    admit(made, "a", max_tokens=100)
    thread = threading.Thread(target=made.run)
    thread.start()
    assert begun.wait(20)
    until(lambda: heard.left == 0)
    held.set()
    thread.join(20)
    assert len(saved) <= 2, "the slow one and that of the stop"


def test_what_a_crash_cut_short_is_removed_with_the_next_snapshot(tmp_path: Path) -> None:
    (tmp_path / "snapshot-5.json.zst.tmp").write_bytes(b"half")
    serve(tmp_path, "a")
    assert len(names(tmp_path, "snapshot-*")) == 1 and not names(tmp_path, "*.tmp")
