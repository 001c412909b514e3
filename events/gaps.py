"""Notes beside a log that ended while its engine went on without it, so that no gap is ever silent."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from leftfold.events.stores import sync_folder

_NAME = re.compile(r"gap-(\d+)\.json")


class Gap(NamedTuple):
    """An engine went on without its log, which was surely on disk up to record `seq` then: `reason`.

    `resumed`: the record after which the next start went on, and after which events are missing; None before that.
    """

    seq: int
    reason: str
    resumed: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {"after": self.seq, "reason": self.reason, "resumed": self.resumed}

    def __str__(self) -> str:
        place = self.seq if self.resumed is None else self.resumed
        return f"an engine went on without its log after record {place}: {self.reason}"


def note_gap(directory: str | os.PathLike[str], gap: Gap) -> None:
    """Write `gap-<seq>.json` into the log's folder, durable when this returns. Raises `OSError`."""
    folder = Path(directory)
    target = folder / f"gap-{gap.seq}.json"
    partial = target.with_name(f"{target.name}.tmp")
    file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(file, "wb") as out:
        out.write(orjson.dumps({**gap.as_dict(), "wall_ns": time.time_ns()}) + b"\n")
        out.flush()
        os.fsync(out.fileno())
    partial.rename(target)
    sync_folder(folder)


def gaps(directory: str | os.PathLike[str]) -> list[Gap]:
    """The gaps that a log has, the oldest first; of a note that is damaged only the place. Raises `OSError`."""
    folder = Path(directory)
    found = []
    for name in os.listdir(folder):
        if match := _NAME.fullmatch(name):
            try:
                body = orjson.loads((folder / name).read_bytes())
                found.append(Gap(int(match[1]), str(body["reason"]), body.get("resumed")))
            except (ValueError, KeyError, TypeError, AttributeError):
                found.append(Gap(int(match[1]), "unknown"))
    return sorted(found, key=lambda gap: gap.seq)


__all__ = ["Gap", "gaps", "note_gap"]
