"""Notes beside a log that ended while its engine went on without it, so that no gap is ever silent."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import NamedTuple

import orjson

from leftfold.events.stores import sync_folder

_NAME = re.compile(r"gap-(\d+)\.json")


class Gap(NamedTuple):
    """Events after record `seq` were never written: `reason`. A later start goes on from whatever is there."""

    seq: int
    reason: str


def note_gap(directory: str | os.PathLike[str], gap: Gap) -> None:
    """Write `gap-<seq>.json` into the log's folder, durable when this returns. Raises `OSError`."""
    folder = Path(directory)
    body = {"after": gap.seq, "reason": gap.reason, "wall_ns": time.time_ns()}
    file = os.open(folder / f"gap-{gap.seq}.json", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(file, "wb") as out:
        out.write(orjson.dumps(body) + b"\n")
        out.flush()
        os.fsync(out.fileno())
    sync_folder(folder)


def gaps(directory: str | os.PathLike[str]) -> list[Gap]:
    """The gaps that a log has, the oldest first; a note that was cut off says where all the same. Raises `OSError`."""
    folder = Path(directory)
    found = []
    for name in os.listdir(folder):
        if match := _NAME.fullmatch(name):
            try:
                reason = str(orjson.loads((folder / name).read_bytes())["reason"])
            except (ValueError, KeyError, TypeError):
                reason = "unknown"
            found.append(Gap(int(match[1]), reason))
    return sorted(found)


__all__ = ["Gap", "gaps", "note_gap"]
