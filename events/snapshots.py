"""Snapshots of a state beside the segments: one file each, tied to the log by the checksum of the record before.

The file is one line, compressed with zstd, and framed as the log's are: `{"crc":"9ae0daaf",` + the rest + a newline.
Its checksum is seeded with that of record `seq`, so that a snapshot of another log, or of a record that a cut-off tail
took with it, is not taken for one of this.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import orjson
import zstandard
from google_crc32c import extend

from leftfold.events.errors import SnapshotBad
from leftfold.events.framing import PREFIX, REST, SCHEMA, frame
from leftfold.events.shapes import is_integer
from leftfold.events.stores import DirectoryReader, snapshot_name, sync_folder

KEEPS_SNAPSHOTS = 2
"""So many snapshots can be recovered from: should the newest turn out bad, there is one before it."""

_MOST_BYTES = 1 << 33  # what a snapshot may hold uncompressed


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a fold was after record `seq`.

    `chain`: that record's checksum. `digest`: of the state, as the reducer computes it. `body`: the rest, as plain data
    that whoever folds understands.
    """

    seq: int
    chain: int
    digest: str
    body: Mapping[str, Any] = field(repr=False)

    def encode(self) -> bytes:
        """The file, compressed; deterministic."""
        head = {"type": "snapshot", "schema": SCHEMA, "seq": self.seq, "chain": f"{self.chain:08x}"}
        record = orjson.dumps({**head, "digest": self.digest, **self.body}, option=orjson.OPT_SERIALIZE_NUMPY)
        line, _ = frame(record, self.chain)
        return zstandard.ZstdCompressor(level=3, write_checksum=True).compress(line)


class HasSnapshots(Protocol):
    """The part of a store that reading snapshots needs."""

    def snapshots(self) -> list[int]: ...

    def read_snapshot(self, seq: int) -> bytes: ...


def decode_snapshot(raw: bytes, seq: int) -> Snapshot:
    """A snapshot from its file, checked to be what was written. Raises `SnapshotBad`."""
    name = snapshot_name(seq)
    try:
        line = zstandard.ZstdDecompressor().decompress(raw, max_output_size=_MOST_BYTES)
        found = orjson.loads(line)
        chain, own = int(found["chain"], 16), found["crc"]
        schema, digest = found["schema"], found["digest"]
    except (zstandard.ZstdError, ValueError, KeyError, TypeError, MemoryError) as error:
        raise SnapshotBad(f"{name} is not a snapshot: {error}") from error
    crc = extend(chain, line[REST:-1])
    if line[:REST] != PREFIX % crc or not line.endswith(b"\n"):
        raise SnapshotBad(f"{name}: checksum {own}, but {crc:08x} follows from the content")
    if not is_integer(schema) or schema > SCHEMA:
        raise SnapshotBad(f"{name} has schema {schema}; this version reads schema {SCHEMA}")
    if found["seq"] != seq or found.get("type") != "snapshot" or type(digest) is not str:
        raise SnapshotBad(f"{name} holds a {found.get('type')} of record {found['seq']}")
    for known in ("crc", "type", "schema", "seq", "chain", "digest"):
        del found[known]
    return Snapshot(seq, chain, digest, found)


def load_snapshot(store: HasSnapshots, seq: int) -> Snapshot:
    """The snapshot after record `seq`. Raises `SnapshotBad`."""
    try:
        raw = store.read_snapshot(seq)
    except OSError as error:
        raise SnapshotBad(f"{snapshot_name(seq)} cannot be read: {error}") from error
    return decode_snapshot(raw, seq)


def readable_snapshots(store: HasSnapshots, count: int) -> list[int]:
    """Numbers of the newest `count` snapshots whose files are what was written, the newest first."""
    good: list[int] = []
    for seq in store.snapshots():
        if len(good) == count:
            break
        try:
            load_snapshot(store, seq)
        except SnapshotBad:
            continue
        good.append(seq)
    return good


def save_snapshot(directory: str | os.PathLike[str], seq: int, raw: bytes, keep: int = KEEPS_SNAPSHOTS) -> str:
    """Write an encoded snapshot, durable when this returns; its file's name. All but the newest `keep` are removed.

    The log must be durable up to `seq` by then: else a crash leaves a snapshot of what never was. Safe to call from any
    thread, one at a time. Raises `OSError`; a part that was written is removed then.
    """
    folder = Path(directory)
    target = folder / snapshot_name(seq)
    partial = target.with_name(f"{target.name}.tmp")
    file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(file, "wb") as out:
            out.write(raw)
            out.flush()
            os.fsync(out.fileno())
        partial.rename(target)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(folder)
    _forget_old(folder, keep)
    return target.name


def _forget_old(folder: Path, keep: int) -> None:
    """Remove what nobody will need: snapshots before the newest `keep` that can be read, and what a crash cut short."""
    for stale in folder.glob("snapshot-*.json.zst.tmp"):
        stale.unlink(missing_ok=True)
    reader = DirectoryReader(folder)
    good = readable_snapshots(reader, keep)
    if len(good) < keep:
        return
    for seq in reader.snapshots():
        if seq < good[-1]:
            (folder / snapshot_name(seq)).unlink(missing_ok=True)


__all__ = ["Snapshot", "decode_snapshot", "load_snapshot", "readable_snapshots", "save_snapshot"]
