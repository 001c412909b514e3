"""What can go wrong with a log: one small tree of errors, and the warning about a torn tail."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class LogError(Exception):
    """A log cannot be read or written."""


class LogDamaged(LogError):
    """A record is not what was written, or one is missing.

    `segment`: file name; `line`: from 1, the header is line 1; `offset`: byte in the (uncompressed) segment at which
    that line starts; `reason`: what is wrong there.
    """

    def __init__(self, segment: str, line: int, offset: int, reason: str) -> None:
        super().__init__(f"{segment}, line {line}, byte {offset}: {reason}")
        self.segment = segment
        self.line = line
        self.offset = offset
        self.reason = reason

    def as_dict(self) -> dict[str, Any]:
        """The place and the reason as plain data."""
        return {"segment": self.segment, "line": self.line, "byte": self.offset, "reason": self.reason}


class LogSchemaUnknown(LogError):
    """A segment was written in a schema that this version cannot read."""


class LogUnreadable(LogError):
    """A record is whole, but says nothing that this version understands (a newer one may have written it)."""


class LogNotFound(LogError, FileNotFoundError):
    """There is no log to read at this place."""


class LogLocked(LogError):
    """Another process appends to this log. `pid`: who, when it said so."""

    def __init__(self, directory: Path, pid: int | None) -> None:
        who = f"process {pid}" if pid is not None else "another process"
        super().__init__(f"the log {directory} is in use by {who}; stop it, or choose another log directory")
        self.directory = directory
        self.pid = pid


class LogClosed(LogError):
    """Nothing can be appended any more: the log was closed."""


class LogBroken(LogError):
    """The disk refused to confirm what was written, so what is durable is unknown; open the log again."""


class TimeReversed(LogError, ValueError):
    """An event's `t` lies before that of the event logged before it; a fault of the caller."""


class SnapshotBad(LogError):
    """A snapshot is not what was written, or not one of this log; an older one, or the log itself, can do instead."""


class SnapshotPassedOver(UserWarning):
    """A snapshot could not be used, and something else was."""


class TornTail(UserWarning):
    """The last record of a log was cut off in the middle of a write, and is left out."""
