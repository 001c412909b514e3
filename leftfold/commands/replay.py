"""Replay a log. `verify` decides every step anew and compares; `show` looks into it.

LOG is the folder that holds the segments, such as logs/smollm2. No model is needed, and the log is only read.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from leftfold.commands.common import FINDING, OK, UsageError, positive, print_json, setting, subcommands

if TYPE_CHECKING:
    from leftfold.events import LogReader


def add_arguments(parser: argparse.ArgumentParser) -> None:
    subcommands(
        parser,
        {
            "verify": ("fold a log, decide every step anew and compare", _verify_arguments, run_verify),
            "show": ("the engine's state after a record, or one request's life", _show_arguments, run_show),
        },
    )


def _verify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", metavar="LOG", help="the log's folder")
    parser.add_argument(
        "--set",
        dest="settings",
        metavar="KEY=VALUE",
        type=setting,
        action="append",
        default=[],
        help="decide with another setting, such as max_batch_tokens=16; may be repeated",
    )
    _allow_policy(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _allow_policy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--allow-policy",
        metavar="MODULE:FUNCTION",
        type=_policy,
        action="append",
        help="import this policy, because the log was made with it; only what you trust",
    )


def _policy(text: str) -> str:
    from leftfold.replay.policies import PolicyError, load

    try:
        return load(text)
    except PolicyError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", metavar="LOG", help="the log's folder")
    parser.add_argument("--at", type=positive, metavar="SEQ", help="stop after this record (default: the last)")
    parser.add_argument("--rid", metavar="RID", help="show this request's life instead of the engine's state")
    _allow_policy(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def read_log(path: str) -> LogReader:
    """The log in a folder. Raises UsageError when there is none; reading raises LogError on damage."""
    import warnings

    from leftfold.events import EventLog, LogNotFound, SnapshotPassedOver, TornTail

    for kind in (TornTail, SnapshotPassedOver):  # said in our own words, or of no concern to a reader
        warnings.simplefilter("ignore", kind)
    try:
        return EventLog.read(path)
    except LogNotFound as error:
        raise UsageError(str(error)) from error


def run_verify(args: argparse.Namespace) -> int:
    from leftfold.replay.errors import SettingsError
    from leftfold.replay.verify import verify

    try:
        verdict = verify(read_log(args.log), checked_settings(args.settings))
    except SettingsError as error:
        raise UsageError(f"--set: {error}") from error
    print_json(verdict.as_dict()) if args.json else print(verdict.describe())
    return OK if verdict.clean else FINDING


def checked_settings(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """`--set` as a dictionary. Raises UsageError for a setting that no config has."""
    from dataclasses import fields

    from leftfold.fsm import Config

    known = [field.name for field in fields(Config)]
    for name, _ in pairs:
        if name not in known:
            raise UsageError(f"--set {name}: no such setting; there are {', '.join(known)}")
    return dict(pairs)


def run_show(args: argparse.Namespace) -> int:
    from leftfold.events import CodecError, LogError
    from leftfold.replay.errors import ReplayError
    from leftfold.replay.show import describe_snapshot, life, snapshot
    from leftfold.replay.snapshots import fold_to

    log = read_log(args.log)
    try:
        if args.rid is not None:
            moments = life(log, args.rid, args.at)
        else:
            found = snapshot(fold_to(log, args.at))
        beyond = args.at is not None and args.at > log.next_seq - 1
    except (LogError, CodecError, ReplayError) as error:
        return report_damage(args.json, error)
    if beyond:
        raise UsageError(f"--at {args.at} is beyond the log's last record, {log.next_seq - 1}")
    if args.rid is not None:
        return _show_life(args, moments)
    print_json(found) if args.json else print(describe_snapshot(found))
    return OK


def _show_life(args: argparse.Namespace, moments: list[Any]) -> int:
    if not moments:
        raise UsageError(f"no request {args.rid!r} in {args.log}" + (f" up to seq {args.at}" if args.at else ""))
    if args.json:
        life = [{"seq": m.seq, "t": m.t, "what": m.what, **m.detail} for m in moments]
        print_json({"rid": args.rid, "life": life})
    else:
        print("\n".join(moment.line() for moment in moments))
    return OK


def report_damage(as_json: bool, error: Exception) -> int:
    """A log that cannot be read or folded is a finding."""
    import sys

    print_json({"error": str(error)}) if as_json else print(f"leftfold: {error}", file=sys.stderr)
    return FINDING
