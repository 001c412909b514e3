"""How a record becomes a line of a log, and how a line is checked against the record before it.

A line is `{"crc":"9ae0daaf",` + the rest of the record + a newline. The checksum is the CRC-32C of that rest, seeded
with the checksum of the line before, so that every line vouches for all lines before it.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import orjson
from google_crc32c import extend

from leftfold.events.errors import LogDamaged, LogSchemaUnknown
from leftfold.events.shapes import is_integer

SCHEMA = 1
PREFIX = b'{"crc":"%08x",'
REST = 18  # where the rest of a line begins; a line is so many bytes longer than its record without `crc`
_HEADER_FIELDS = ("type", "schema", "first_seq", "prev")


def frame(body: bytes, previous: int) -> tuple[bytes, int]:
    """The line of one JSON object and its checksum, given the checksum of the line before."""
    rest = body[1:]
    crc = extend(previous, rest)
    return b'{"crc":"%08x",%b\n' % (crc, rest), crc


def header(first_seq: int, previous: int) -> tuple[bytes, int]:
    """The line that opens a segment, and its checksum."""
    body = b'{"type":"segment","schema":%d,"first_seq":%d,"prev":"%08x"}' % (SCHEMA, first_seq, previous)
    return frame(body, previous)


class Header(NamedTuple):
    """What a segment's first line says. `prev`: checksum of the line before; `crc`: of this line."""

    schema: int
    first_seq: int
    prev: int
    crc: int


def read_header(line: bytes, segment: str) -> Header:
    """A segment's first line, checked by itself. Raises `LogDamaged` or `LogSchemaUnknown`."""
    found = _parse(line)
    if not _is_header(found):
        raise LogDamaged(segment, 1, 0, "a segment must open with its header record")
    previous = int(found["prev"], 16)
    own = extend(previous, line[REST:-1])
    if line[:REST] != PREFIX % own:
        raise LogDamaged(segment, 1, 0, f"the header's checksum is {found['crc']}, its content has {own:08x}")
    if not 1 <= found["schema"] <= SCHEMA:
        known = f"schema {SCHEMA}" if SCHEMA == 1 else f"schemas 1 to {SCHEMA}"
        raise LogSchemaUnknown(f"{segment} has schema {found['schema']}; this version reads {known}")
    return Header(found["schema"], found["first_seq"], previous, own)


def check_follows(found: Header, first_seq: int, previous: int, segment: str) -> None:
    """Whether a segment goes on where the one before it ended. Raises `LogDamaged`."""
    if (found.first_seq, found.prev) != (first_seq, previous):
        raise LogDamaged(
            segment, 1, 0,
            f"the segment continues record {found.first_seq - 1} with checksum {found.prev:08x}, but record "
            f"{first_seq - 1} with checksum {previous:08x} stands before it: records are missing or were exchanged",
        )  # fmt: skip


def _is_header(found: dict[str, Any]) -> bool:
    if tuple(found)[1:] != _HEADER_FIELDS or type(found["schema"]) is not int:
        return False
    if not is_integer(found["first_seq"]) or found["first_seq"] < 1:
        return False
    return isinstance(found["prev"], str) and re.fullmatch("[0-9a-f]{8}", found["prev"]) is not None


def damage(line: bytes, seq: int, previous: int, segment: str, number: int, offset: int) -> LogDamaged:
    """What is wrong with a whole line that does not follow from the one before it."""
    crc = extend(previous, line[REST:-1])
    if line[:REST] == PREFIX % crc:
        reason = f"record {seq} must stand here, found seq {_parse(line).get('seq')!r}"
    elif not _parse(line):
        reason = f"not a record: {line[:40]!r}"
    else:
        reason = (
            f"checksum {line[8:16].decode(errors='replace')}, but {crc:08x} follows from the content and the record "
            f"before: record {seq} was changed, or a record before it is missing or out of place"
        )
    return LogDamaged(segment, number, offset, reason)


def _parse(line: bytes) -> dict[str, Any]:
    """The record of a line, or nothing when it is not one."""
    try:
        record = orjson.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) and next(iter(record), None) == "crc" else {}
