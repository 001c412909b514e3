"""What the fuzzer's simulated disk must bring to light: faults planted in the log, in snapshots and in recovery."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leftfold.events import EventLog, LogDamaged, LogReader, SnapshotBad, Tick, log, walk
from leftfold.events.walk import Tail
from leftfold.replay import snapshots
from leftfold.replay.fuzzing import PROFILES, DurableWorld, fuzz, shrink, source_of, write_log
from leftfold.replay.fuzzing.disk import DAMAGES, DiskStore, SimDisk, contents
from leftfold.replay.verify import verify

LIMITS: dict[str, Any] = {
    "num_pages": 16, "page_size": 4, "max_running": 2, "max_batch_tokens": 8, "max_model_len": 40,
}  # fmt: skip


def _a_torn_tail_is_cut_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "warn_torn", lambda dropped, what: None)


def _what_is_damaged_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    segment = walk._walk_segment

    def lenient(file: Any, tail: Tail, may_be_torn: bool) -> Any:
        try:
            yield from segment(file, tail, may_be_torn)
        except LogDamaged:
            tail.size = file.tell()

    monkeypatch.setattr(walk, "_walk_segment", lenient)


def _nothing_is_synced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EventLog, "_confirm", lambda self: None)


def _a_short_write_counts_as_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    drain = EventLog._drain

    def hasty(self: EventLog) -> None:
        store, write = self._store, self._store.write
        store.write = lambda data: write(data) and len(data)  # type: ignore[method-assign]
        drain(self)

    monkeypatch.setattr(EventLog, "_drain", hasty)


def _a_failed_sync_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EventLog, "_check_open", lambda self: setattr(self, "_broken", None))


def _what_is_read_is_taken_for_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DiskStore, "confirm", lambda self, name: None)


def _snapshots_ahead_of_the_log_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EventLog, "_drop_ahead", lambda self, found: None)
    monkeypatch.setattr(log, "records_after", lambda store, snapshot, tail: iter(()))


def _snapshots_forget_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    restore = snapshots.restore

    def forgetful(snapshot: Any) -> Any:
        fold = restore(snapshot)
        for request in [*fold.state.waiting]:  # type: ignore[union-attr]
            fold.state.waiting.remove(request)  # type: ignore[union-attr]
        return fold

    monkeypatch.setattr(snapshots, "restore", forgetful)


PLANTS = [
    _a_torn_tail_is_cut_in_silence, _what_is_damaged_is_skipped, _nothing_is_synced, _a_short_write_counts_as_whole,
    _a_failed_sync_is_forgotten, _what_is_read_is_taken_for_durable, _snapshots_ahead_of_the_log_stay,
    _snapshots_forget_who_waits,
]  # fmt: skip


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__.strip("_"))
def test_a_fault_planted_in_the_log_is_found_and_made_small(
    plant: Callable[[pytest.MonkeyPatch], None], tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        plant(monkeypatch)
        tally = fuzz(1, lambda tally: tally.runs < 600, PROFILES["faults"])
        assert tally.found is not None, "600 runs found nothing"
        small = shrink(tally.found, lambda tries: tries < 300)
        assert small.kind == tally.found.kind
    names: dict[str, Any] = {}
    exec(source_of(small, "leftfold fuzz"), names)
    (test,) = [value for name, value in names.items() if name.startswith("test_")]
    with pytest.MonkeyPatch.context() as monkeypatch:
        plant(monkeypatch)
        with pytest.raises(type(small.fault)):
            test()
    test()  # without the plant, the written test passes
    assert verify(EventLog.read(write_log(small, tmp_path))).damage is None


def busy() -> DurableWorld:
    """Some requests, some steps, a snapshot, several segments."""
    world = DurableWorld(segment_bytes=600, sync_every=3, **LIMITS)
    world.admit("a", [1, 2, 3, 4, 5], 12)
    world.steps(6)
    world.snapshot()
    world.admit("b", [1, 2, 3, 4, 5, 6], 8)
    world.steps(3)
    return world


@pytest.mark.parametrize("damage", DAMAGES)
def test_no_damage_at_rest_goes_unnoticed_wherever_it_is(damage: str) -> None:
    sizes = {name: len(content) for name, content in contents(busy().disk).items()}
    segments = sum(sizes[name] for name in busy().disk.files)
    for at in (*range(0, segments, 37), *range(segments, sum(sizes.values()), 307)):  # snapshots come after segments
        world = busy()
        world.crash(damage=damage, at=at, other=at // 7)
        world.finish()


def test_damage_at_two_places_is_told_at_each_and_what_stands_before_them_goes_on() -> None:
    """The opening looks at the end first: the earlier place is named once the later one is cut off."""
    world = busy()
    first, second = 2082, 2718
    assert world.disk.damage("zeros", second, 0)
    world.crash(damage="zeros", at=first)
    assert sum(world.disk.sizes().values()) < second
    world.finish()


def test_a_disk_that_lies_makes_nothing_safe_when_a_log_is_opened() -> None:
    disk = SimDisk()
    with EventLog(store=DiskStore(disk)) as written:
        written.append(Tick(t=1))
    (file,) = disk.files.values()
    file.safe, disk.lies = 0, True
    DiskStore(disk).confirm("00000001.jsonl")
    assert file.safe == 0
    disk.lies = False
    DiskStore(disk).confirm("00000001.jsonl")
    assert file.safe == len(file.content)


def test_a_snapshot_that_is_not_on_the_disk_cannot_be_read() -> None:
    with pytest.raises(SnapshotBad, match="snapshot-3.* cannot be read.*there is no such snapshot"):
        LogReader(DiskStore(SimDisk())).snapshot(3)


def test_a_crash_in_the_middle_of_any_write_loses_only_what_was_not_safe() -> None:
    for keep in range(0, 700, 13):
        for power in (True, False):
            world = busy()
            world.crash(power=power, keep=keep, torn=keep)
            world.steps(2)
            world.crash(power=power, hole=keep % 5, keep=keep)
            world.finish()


def test_a_full_disk_and_a_failed_sync_lose_nothing_that_was_promised() -> None:
    for room in range(0, 500, 17):
        world = busy()
        world.full_disk(room)
        world.steps(3)
        world.crash(failed_sync=room % 2 == 0)
        world.full_disk(room)
        world.steps(2)
        world.space()
        world.finish()


def test_a_log_of_another_version_goes_on() -> None:
    world = busy()
    world.crash(old=True)
    world.steps(2)
    world.crash(old=True, num_pages=9)
    world.finish()
