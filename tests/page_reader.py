"""A second reader of logs, written from docs/log-format.md alone: nothing of the project's own code is used."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zstandard

_TABLE = []
for _byte in range(256):
    for _ in range(8):
        _byte = (_byte >> 1) ^ (0x82F63B78 if _byte & 1 else 0)
    _TABLE.append(_byte)


def crc32c(data: bytes, seed: int) -> int:
    """From the definition (reflected polynomial 82f63b78)."""
    crc = seed ^ 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def segment_files(directory: Path) -> list[Path]:
    """One file a segment, in order; where both forms are there, the plain one."""
    numbers: dict[int, Path] = {}
    for path in sorted(directory.iterdir()):
        match = re.fullmatch(r"(\d{8})\.jsonl(\.zst)?", path.name)
        if match and not (match[2] and int(match[1]) in numbers):
            numbers[int(match[1])] = path
    found = sorted(numbers)
    assert found == list(range(found[0], found[-1] + 1)), "a segment is missing"
    return [numbers[number] for number in found]


def content(path: Path) -> bytes:
    raw = path.read_bytes()
    if path.suffix != ".zst":
        return raw
    return zstandard.ZstdDecompressor().stream_reader(io.BytesIO(raw), read_across_frames=True).read()


def checked(line: bytes, seed: int) -> tuple[dict[str, Any], int]:
    """A line without its newline, and its checksum."""
    crc = crc32c(line[18:], seed)
    assert line[:18] == b'{"crc":"%08x",' % crc
    record: dict[str, Any] = json.loads(line)
    return record, crc


def read(directory: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Every record that is there, and its checksum; the torn end of the last segment is left out."""
    crc = seq = 0
    files = segment_files(directory)
    for path in files:
        *lines, rest = content(path).split(b"\n")
        assert rest == b"" or (path is files[-1] and path.suffix == ".jsonl")
        for number, line in enumerate(lines):
            if number == 0:
                header = json.loads(line)
                assert list(header) == ["crc", "type", "schema", "first_seq", "prev"]
                assert (header["type"], header["schema"]) == ("segment", 1)
                if seq == 0:
                    assert path.name[:8] != "00000001" or (header["first_seq"], header["prev"]) == (1, "00000000")
                    seq, crc = header["first_seq"], int(header["prev"], 16)
                assert (header["first_seq"], header["prev"]) == (seq, f"{crc:08x}")
                _, crc = checked(line, crc)
            else:
                record, crc = checked(line, crc)
                assert list(record)[:4] == ["crc", "seq", "t", "type"] and record["seq"] == seq
                seq += 1
                yield record, crc


def read_snapshots(directory: Path) -> dict[int, dict[str, Any]]:
    """Snapshots that belong to this log, by the record that they were taken after."""
    chains = {record["seq"]: crc for record, crc in read(directory)}
    found = {}
    for path in directory.iterdir():
        match = re.fullmatch(r"snapshot-([1-9]\d*)\.json\.zst", path.name)
        if match is None:
            continue
        line, newline, rest = content(path).partition(b"\n")
        assert (newline, rest) == (b"\n", b"")
        snapshot = json.loads(line)
        checked(line, int(snapshot["chain"], 16))
        assert list(snapshot)[:6] == ["crc", "type", "schema", "seq", "chain", "digest"]
        assert (snapshot["type"], snapshot["schema"], snapshot["seq"]) == ("snapshot", 1, int(match[1]))
        if chains.get(snapshot["seq"], int(snapshot["chain"], 16)) == int(snapshot["chain"], 16):
            found[snapshot["seq"]] = snapshot
    return found
