"""Every single flipped bit of a log is found, and found on its line: all of them are tried."""

from __future__ import annotations

import io

from leftfold.events import Abort, Event, EventLog, ForwardDone, LogDamaged, Pause, Resume, Tick
from leftfold.events.stores import MemoryStore
from leftfold.events.walk import Tail, walk, walk_lines

RECORDS = 2_000


def small_event(number: int) -> Event:
    kinds = (Tick(t=number), Resume(t=number), Pause(t=number, mode="keep"), Abort(t=number, rid="a"))
    return ForwardDone(t=number, step=number, tokens=[7]) if number % 5 == 4 else kinds[number % 5]


def written() -> MemoryStore:
    store = MemoryStore()
    with EventLog(store=store, segment_bytes=40_000) as log:
        for number in range(RECORDS):
            log.append(small_event(number))
    return store



def test_every_flipped_bit_of_a_log_of_2000_records_is_found_on_its_line() -> None:
    """Each line is read from where the lines before it end, with the next line behind it: what a reader does there."""
    store = written()
    assert len(store.data) > 2
    flips, seq, crc = 0, 1, 0
    last = max(store.data)
    for name in sorted(store.data):
        lines = bytes(store.data[name]).splitlines(keepends=True)
        size = 0
        for number, line in enumerate(lines, 1):
            following = lines[number] if number < len(lines) else b""
            for place in range(len(line)):
                for bit in range(8):
                    spoilt = bytearray(line + following)
                    spoilt[place] ^= 1 << bit
                    very_last = name == last and not following and place == len(line) - 1
                    check(bytes(spoilt), name, number, size, crc, seq, name == last, very_last)
                    flips += 1
            crc, size = int(line[8:16], 16), size + len(line)
            seq += number > 1
    assert seq == RECORDS + 1
    assert flips == 8 * sum(map(len, store.data.values())) > 800_000


def check(
    spoilt: bytes, name: str, number: int, size: int, crc: int, seq: int, may_be_torn: bool, very_last: bool
) -> None:
    tail = Tail(1, 0, int(name[:8]), name, size=size, crc=crc, next_seq=seq)
    try:
        if number == 1:
            alone = MemoryStore()
            alone.data[name] = bytearray(spoilt)
            found = sum(1 for _ in walk(alone, tail if seq > 1 else Tail()))
        else:
            found = sum(1 for _ in walk_lines(io.BytesIO(spoilt), tail, number, may_be_torn))
    except LogDamaged as error:
        assert (error.segment, error.line, error.offset) == (name, number, size)
    else:
        assert very_last and found == 0, f"a flip in line {number} of {name} went unnoticed"
        assert tail.dropped is not None and tail.dropped[:3] == (name, number, size), "a torn tail, and said so"


def test_the_check_would_notice_a_line_that_is_taken() -> None:
    store = written()
    name = min(store.data)
    lines = bytes(store.data[name]).splitlines(keepends=True)
    tail = Tail(1, 0, 1, name, size=len(lines[0]), crc=int(lines[0][8:16], 16), next_seq=1)
    assert sum(1 for _ in walk_lines(io.BytesIO(lines[1] + lines[2]), tail, 2, may_be_torn=True)) == 2
