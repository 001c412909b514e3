"""What the replay commands share: reading a log, its damage, settings, policies, moments."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leftfold.commands.common import FINDING, UsageError, positive, print_json

if TYPE_CHECKING:
    from leftfold.events import LogReader


def add_log(parser: argparse.ArgumentParser) -> None:
    """LOG and --json."""
    parser.add_argument("log", metavar="LOG", help="the log's folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_at(parser: argparse.ArgumentParser) -> None:
    """--at SEQ or TIME."""
    parser.add_argument("--at", type=moment, metavar="SEQ|TIME",
                        help="as it was after this record, or after so many seconds, such as 12.5s")  # fmt: skip


def moment(text: str) -> int | float:
    """A record's number, or seconds (a float) from `12.5s`."""
    if not text.endswith("s"):
        return positive(text)
    try:
        value = float(text[:-1])
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e12:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a record's number nor seconds such as 12.5s")
    return value


def seq_of(log: LogReader, at: int | float | None) -> int | None:
    """The last record at that time. Raises UsageError when none is that early."""
    if not isinstance(at, float):
        return at
    last = None
    for record in log:
        if record.event.t > at * 1e6:
            break
        last = record.seq
    if last is None:
        raise UsageError(f"--at {at}s is before the log's first record")
    return last


def rids_of(log: LogReader, asked: str, path: str) -> list[str]:
    """The requests that an id names, their own or an answer's. Raises UsageError when there is none."""
    from leftfold.replay.names import named

    found = named(log, asked)
    if not found.rids:
        raise UsageError(f"no request {asked!r} in {path}: {found.others()}")
    return found.rids


def unseen(asked: str, path: str, seq: int | None) -> UsageError:
    """The error for a request that the log has, but not in the records that were looked at."""
    what = "ended before the log's first record" if seq is None else "came later"
    return UsageError(f"no request {asked!r} in {path}" + (f" up to seq {seq}" if seq else "") + f": it {what}")


def one_or_all(asked: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    """The object that `--json` prints: what was found of the request, or of all those of an answer's id."""
    return found[0] if len(found) == 1 else {"rid": asked, "requests": found}


def check_at(seq: int | None, *logs: LogReader) -> None:
    """Raises UsageError when no log, read to its end, has a record of that number."""
    last = max(log.next_seq - 1 for log in logs)
    if seq is not None and seq > last:
        raise UsageError(f"--at {seq} is beyond the log's last record, {last}")


def out_path(out: str, log: str) -> Path:
    """Where `-o` writes. Raises UsageError among the log's own files: a log is only read."""
    path = Path(out)
    if path.resolve().parent == Path(log).resolve():
        raise UsageError(f"-o {out} lies among the files of the log {log}: write it elsewhere")
    return path


def say(text: str) -> None:
    """Print for a reader. What a terminal would obey instead of show (an id may hold anything) is escaped."""
    print("".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text))


def allow_policy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--allow-policy",
        metavar="MODULE:FUNCTION",
        type=policy_of_log,
        action="append",
        help="import this policy from PYTHONPATH, because the log was made with it; only what you trust",
    )


def policy_of_log(text: str) -> str:
    """A policy that a log was made with, as good or bad as it was."""
    from leftfold.replay.policies import PolicyError, load

    try:
        return load(text, tried=False)
    except PolicyError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def read_log(path: str) -> LogReader:
    """The log in a folder. Raises UsageError when there is none to look at; reading raises LogError on damage."""
    import warnings

    from leftfold.events import EventLog, LogNotFound, SnapshotPassedOver, TornTail

    for kind in (TornTail, SnapshotPassedOver):  # said in our own words, or of no concern to a reader
        warnings.simplefilter("ignore", kind)
    try:
        return EventLog.read(path)
    except LogNotFound as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error


def checked_settings(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """`--set` as a dictionary. Raises UsageError for a setting that no config has."""
    from dataclasses import fields

    from leftfold.fsm import Config

    known = [field.name for field in fields(Config) if field.init]
    for name, _ in pairs:
        if name not in known:
            raise UsageError(f"--set {name}: no such setting; there are {', '.join(known)}")
    return dict(pairs)


def report_damage(as_json: bool, error: Exception, *logs: str) -> int:
    """A log that cannot be read or folded is a finding; `logs`: the folders that were read."""
    import sys

    text = _placed(error, logs)
    print_json({"error": text}) if as_json else print(f"leftfold: {text}", file=sys.stderr)
    return FINDING


def _placed(error: Exception, logs: tuple[str, ...]) -> str:
    """The error with the folder it is about: as the segment's path, or before the rest."""
    from leftfold.events import LogDamaged

    text = str(error)
    at_fault = [log for log in logs if len(logs) == 1 or _trouble(log) == text]
    if len(at_fault) != 1 or at_fault[0] in text:
        return text
    if isinstance(error, LogDamaged) and text.startswith(error.segment):
        return str(Path(at_fault[0]) / text)
    return f"{at_fault[0]}: {text}"


def _trouble(log: str) -> str:
    """What is wrong with a log's lines."""
    from leftfold.events import LogError

    try:
        for _ in read_log(log):
            pass
    except LogError as error:
        return str(error)
    return ""
