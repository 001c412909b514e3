"""A log in a directory: its lock, its modes, torn tails, compressed segments, damage and what is said about it."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard

from leftfold.events import (
    EventLog,
    LogDamaged,
    LogError,
    LogLocked,
    LogNotFound,
    LogSchemaUnknown,
    LogUnreadable,
    Tick,
    TornTail,
    compress_closed,
    read_lines,
    same,
)
from leftfold.events.framing import frame
from tests.log_samples import segments, write


def seqs(directory: Path) -> list[int]:
    return [record.seq for record in EventLog.read(directory)]


# The lock and the files


def test_a_second_opening_names_the_process_that_holds_the_log(tmp_path: Path) -> None:
    with EventLog.open(tmp_path / "log"), pytest.raises(LogLocked, match=f"in use by process {os.getpid()}") as error:
        EventLog.open(tmp_path / "log")
    assert error.value.pid == os.getpid()
    EventLog.open(tmp_path / "log").close()


def test_what_a_dead_owner_left_in_the_lock_is_not_part_of_the_next_ones_name(tmp_path: Path) -> None:
    EventLog.open(tmp_path).close()
    (tmp_path / "LOCK").write_bytes(b"123456789012345678\n")
    with EventLog.open(tmp_path), pytest.raises(LogLocked) as error:
        EventLog.open(tmp_path)
    assert error.value.pid == os.getpid()


def test_the_lock_holds_between_processes_and_dies_with_its_holder(tmp_path: Path) -> None:
    script = (
        f"from leftfold.events import EventLog, Tick\nlog = EventLog.open({str(tmp_path / 'log')!r})\n"
        "log.append(Tick(t=1)); log.flush(); print('ready', flush=True); input()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    try:
        assert holder.stdout and holder.stdout.readline() == "ready\n"
        with pytest.raises(LogLocked) as error:
            EventLog.open(tmp_path / "log")
        assert error.value.pid == holder.pid
        assert seqs(tmp_path / "log") == [1], "reading needs no lock"
    finally:
        holder.kill()
        holder.communicate()
    with EventLog.open(tmp_path / "log") as log:
        assert len(log) == 1


def test_a_log_that_cannot_be_opened_is_not_left_locked(tmp_path: Path) -> None:
    write(tmp_path)
    good = segments(tmp_path)[0].read_bytes()
    segments(tmp_path)[0].write_bytes(good.replace(b'"a"', b'"b"', 1))
    with pytest.raises(LogDamaged):
        EventLog.open(tmp_path)
    segments(tmp_path)[0].write_bytes(good)
    EventLog.open(tmp_path).close()


def test_only_the_owner_may_read_what_a_log_holds(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write(tmp_path / "deep" / "log", segment_bytes=300)
        compress_closed(tmp_path / "deep" / "log")
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "deep" / "log").iterdir()}
    assert modes == {0o600}
    assert stat.S_IMODE((tmp_path / "deep" / "log").stat().st_mode) == 0o700


def test_the_last_segment_is_plain_after_a_clean_stop(tmp_path: Path) -> None:
    write(tmp_path, segment_bytes=300)
    assert segments(tmp_path)[-1].name == max(path.name for path in tmp_path.glob("0*"))


def test_a_path_is_enough_to_open_a_log(tmp_path: Path) -> None:
    with EventLog(tmp_path / "log") as log:
        log.append(Tick(t=3))
    with EventLog(str(tmp_path / "log")) as log:
        assert log.last_t == 3


def test_reading_what_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(LogNotFound, match="no log directory at"):
        EventLog.read(tmp_path / "none")
    with pytest.raises(LogNotFound, match="holds no log"):
        EventLog.read(tmp_path)
    with pytest.raises(FileNotFoundError):
        list(read_lines(tmp_path / "none"))
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_refused_as_a_log_directory(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("mine")
    with pytest.raises(NotADirectoryError, match="a log is a directory"):
        EventLog.open(tmp_path / "log")
    assert (tmp_path / "log").read_text() == "mine"


# Torn tails


@pytest.mark.parametrize("segment_bytes", [1 << 20, 600])
def test_a_log_cut_at_any_byte_of_its_last_segment_keeps_every_whole_record(
    tmp_path: Path, segment_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)  # thousands of them, and nothing here asks for durability
    items = write(tmp_path / "log", segment_bytes=segment_bytes)
    data = segments(tmp_path / "log")[-1].read_bytes()
    before = len(items) + 1 - data.count(b"\n")
    for size in range(len(data)):
        copy = tmp_path / "copy"
        shutil.copytree(tmp_path / "log", copy)
        last = segments(copy)[-1]
        last.write_bytes(data[:size])
        whole = before + max(0, data[:size].count(b"\n") - 1)
        torn = size - (data[:size].rfind(b"\n") + 1)

        reader = EventLog.read(copy)
        if torn:
            with pytest.warns(TornTail, match=f"{last.name}, line .*torn record of {torn} bytes"):
                assert len(list(reader)) == whole
        else:
            assert len(list(reader)) == whole
        assert (reader.dropped.size if reader.dropped else 0) == torn
        assert last.stat().st_size == size, "reading changes nothing"

        check_it_goes_on(copy, whole, torn, segment_bytes)
        shutil.rmtree(copy)


def check_it_goes_on(directory: Path, whole: int, torn: int, segment_bytes: int) -> None:
    if torn:
        with pytest.warns(TornTail, match="was cut off"):
            log = EventLog.open(directory, segment_bytes=segment_bytes)
        assert log.dropped is not None and log.dropped.size == torn
    else:
        log = EventLog.open(directory, segment_bytes=segment_bytes)
        assert log.dropped is None
    with log:
        assert log.append(Tick(t=10_000)) == whole + 1
    assert seqs(directory) == list(range(1, whole + 2))


def test_a_reader_beside_a_writer_sees_what_was_flushed(tmp_path: Path) -> None:
    with EventLog.open(tmp_path, segment_bytes=200) as log:
        for t in range(20):
            log.append(Tick(t=t))
            log.flush()
            assert len(EventLog.read(tmp_path)) == t + 1


# Compressed segments


def test_closed_segments_read_the_same_when_compressed(tmp_path: Path) -> None:
    items = write(tmp_path, 40, segment_bytes=500)
    plain = list(read_lines(tmp_path))
    closed = [path.name for path in segments(tmp_path)[:-1]]
    assert compress_closed(tmp_path) == [f"{name}.zst" for name in closed]
    assert compress_closed(tmp_path) == []
    assert len(segments(tmp_path)) == 1
    assert list(read_lines(tmp_path)) == plain
    assert all(same(record.event, item) for record, item in zip(EventLog.read(tmp_path), items, strict=True))
    with EventLog.open(tmp_path) as log:
        assert log.append(Tick(t=log.last_t)) == 41
    assert seqs(tmp_path) == list(range(1, 42))


def test_a_compressed_segment_has_a_checksum_and_the_time_of_its_last_write(tmp_path: Path) -> None:
    write(tmp_path, 40, segment_bytes=500)
    closed = segments(tmp_path)[:-1]
    for number, path in enumerate(closed, 1):
        os.utime(path, ns=(number * 10**15, number * 10**15 + 7))
    compress_closed(tmp_path)
    for number, path in enumerate(closed, 1):
        compressed = path.with_name(f"{path.name}.zst")
        assert compressed.stat().st_mtime_ns == number * 10**15 + 7
        assert zstandard.get_frame_parameters(compressed.read_bytes()).has_checksum


def test_a_log_whose_last_segment_was_compressed_goes_on_in_a_new_plain_one(tmp_path: Path) -> None:
    write(tmp_path)
    (only,) = segments(tmp_path)
    only.with_name("00000001.jsonl.zst").write_bytes(zstandard.compress(only.read_bytes()))
    only.unlink()
    with EventLog.open(tmp_path) as log:
        log.append(Tick(t=log.last_t))
    assert [path.name for path in segments(tmp_path)] == ["00000002.jsonl"]
    assert seqs(tmp_path) == list(range(1, 12))


def test_compression_that_was_interrupted_leaves_the_log_readable(tmp_path: Path) -> None:
    write(tmp_path, segment_bytes=300)
    first = segments(tmp_path)[0]
    first.with_name(f"{first.name}.zst.tmp").write_bytes(b"half")
    first.with_name(f"{first.name}.zst").write_bytes(zstandard.compress(first.read_bytes()))
    assert seqs(tmp_path) == list(range(1, 11))
    compress_closed(tmp_path)
    assert seqs(tmp_path) == list(range(1, 11))


@pytest.mark.parametrize("cut", [1, 10, -100, -30])
def test_a_compressed_segment_that_was_cut_is_damage(tmp_path: Path, cut: int) -> None:
    write(tmp_path, 40, segment_bytes=2000)
    compress_closed(tmp_path)
    first = tmp_path / "00000001.jsonl.zst"
    first.write_bytes(first.read_bytes()[:cut])
    with pytest.raises(LogDamaged, match=r"0000000[12]\.jsonl"):
        seqs(tmp_path)


def test_a_compressed_segment_with_a_flipped_bit_is_damage_or_reads_the_same(tmp_path: Path) -> None:
    write(tmp_path, 40, segment_bytes=2000)
    records = list(read_lines(tmp_path))
    compress_closed(tmp_path)
    first = tmp_path / "00000001.jsonl.zst"
    good = first.read_bytes()
    harmless = []
    for place in range(len(good)):
        first.write_bytes(good[:place] + bytes([good[place] ^ 4]) + good[place + 1 :])
        try:
            assert list(read_lines(tmp_path)) == records
            harmless.append(place)
        except LogDamaged:
            pass
    assert len(harmless) < 8, f"only flags of the frame's header carry no record, but {harmless} went unnoticed"


# Damage elsewhere


def test_a_missing_segment_is_named(tmp_path: Path) -> None:
    write(tmp_path, segment_bytes=300)
    segments(tmp_path)[1].unlink()
    for attempt in (lambda: seqs(tmp_path), lambda: EventLog.open(tmp_path)):
        with pytest.raises(LogDamaged, match=r"00000002\.jsonl, line 1, byte 0: the segment is missing; 00000003"):
            attempt()


def test_exchanged_segments_are_found_at_the_first(tmp_path: Path) -> None:
    write(tmp_path, 40, segment_bytes=500)
    second, third = segments(tmp_path)[1:3]
    second.rename(tmp_path / "x")
    third.rename(second)
    (tmp_path / "x").rename(third)
    with pytest.raises(LogDamaged, match=r"00000002\.jsonl, line 1, byte 0: the segment continues record"):
        seqs(tmp_path)


def test_the_end_of_a_closed_segment_is_missed_at_the_next_header(tmp_path: Path) -> None:
    write(tmp_path, 40, segment_bytes=500)
    first = segments(tmp_path)[0]
    lines = first.read_bytes().splitlines(keepends=True)
    first.write_bytes(b"".join(lines[:-1]))
    with pytest.raises(LogDamaged, match=r"00000002\.jsonl, line 1, byte 0: the segment continues record"):
        seqs(tmp_path)
    first.write_bytes(b"".join(lines)[:-1])
    with pytest.raises(LogDamaged, match=rf"{first.name}, line {len(lines)}, .*in the middle of a record"):
        seqs(tmp_path)


def test_a_record_with_a_right_checksum_and_a_wrong_number_is_damage(tmp_path: Path) -> None:
    write(tmp_path, 1)
    path = segments(tmp_path)[0]
    data = path.read_bytes()
    forged, _ = frame(b'{"seq":3,"t":0,"type":"tick"}', int(data.splitlines()[-1][8:16], 16))
    path.write_bytes(data + forged)
    with pytest.raises(LogDamaged, match=rf"line 3, byte {len(data)}: record 2 must stand here, found seq 3"):
        seqs(tmp_path)


def test_an_event_this_version_does_not_know_stops_reading_but_not_tools(tmp_path: Path) -> None:
    write(tmp_path, 1)
    path = segments(tmp_path)[0]
    data = path.read_bytes()
    future, _ = frame(b'{"seq":2,"t":9,"type":"teleport"}', int(data.splitlines()[-1][8:16], 16))
    path.write_bytes(data + future)
    with pytest.raises(LogUnreadable, match=r"record 2: .*teleport"):
        seqs(tmp_path)
    assert list(read_lines(tmp_path))[1] == b'{"seq":2,"t":9,"type":"teleport"}'


def test_a_later_schema_is_refused_by_name(tmp_path: Path) -> None:
    line, _ = frame(b'{"type":"segment","schema":2,"first_seq":1,"prev":"00000000"}', 0)
    (tmp_path / "00000001.jsonl").write_bytes(line)
    with pytest.raises(LogSchemaUnknown, match=r"00000001\.jsonl has schema 2; this version reads schema 1"):
        seqs(tmp_path)


@pytest.mark.parametrize("text", [b"hello\n", b"{}\n", b'{"crc":1}\n', b"[1]\n", b"\n", b"\xff\xfe\n"])
def test_a_file_that_is_no_log_is_refused_at_its_first_line(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "00000001.jsonl").write_bytes(text)
    with pytest.raises(LogDamaged, match=r"00000001\.jsonl, line 1, byte 0: a segment must open with its header"):
        seqs(tmp_path)


@pytest.mark.parametrize("text", [b"hello\n", b"{}\n", b"\n", b"\xff\xfe\n", b'{"crc":"00000000","seq":11}\n'])
def test_a_line_that_is_no_record_is_named(tmp_path: Path, text: bytes) -> None:
    write(tmp_path)
    path = segments(tmp_path)[0]
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + text)
    with pytest.raises(LogError, match=rf"00000001\.jsonl, line 12, byte {size}: "):
        EventLog.open(tmp_path)
    assert path.read_bytes().endswith(text), "damage is never cut off"
