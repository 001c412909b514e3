"""Replay a log: what happened, why, and what if. No model is needed (but by execute), and the log is only read.

LOG is the folder that holds the segments, such as logs/smollm2. SEQ is a record's number, TIME seconds since the first
Started, such as 12.5s.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from leftfold.commands import replay_execute as execute
from leftfold.commands import replay_report as report
from leftfold.commands import replay_shrink as shrink
from leftfold.commands import replay_ui as ui
from leftfold.commands import replay_views as views
from leftfold.commands import replay_whatif as whatif
from leftfold.commands.common import FINDING, OK, UsageError, print_json, setting, subcommands
from leftfold.commands.replay_common import (
    add_at,
    allow_policy,
    check_at,
    checked_settings,
    one_or_all,
    read_log,
    rids_of,
    say,
    seq_of,
    unseen,
)

if TYPE_CHECKING:
    pass


def add_arguments(parser: argparse.ArgumentParser) -> None:
    subcommands(
        parser,
        {
            "verify": ("fold a log, decide every step anew and compare", _verify_arguments, run_verify),
            "show": ("the engine's state after a record, or one request's life", _show_arguments, run_show),
            **views.COMMANDS,
            **whatif.COMMANDS,
            **shrink.COMMANDS,
            **execute.COMMANDS,
            **report.COMMANDS,
            **ui.COMMANDS,
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
    parser.add_argument("--checkout", metavar="DIR", help="decide with the planner of the checkout in DIR")
    allow_policy(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", metavar="LOG", help="the log's folder")
    add_at(parser)
    parser.add_argument(
        "--rid", metavar="RID", help="show this request's life (its id, or its answer's) instead of the engine's state"
    )
    allow_policy(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run_verify(args: argparse.Namespace) -> int:
    from leftfold.replay.checkout import Checkout, CheckoutError
    from leftfold.replay.errors import SettingsError
    from leftfold.replay.verify import verify

    if args.settings and args.checkout:
        raise UsageError("--set and --checkout exclude each other")
    log, settings = read_log(args.log), checked_settings(args.settings)
    try:
        with Checkout(args.checkout) if args.checkout else nullcontext() as other:
            verdict = verify(log, settings, other)
    except SettingsError as error:
        raise UsageError(f"{'--checkout' if args.checkout else '--set'}: {error}") from error
    except CheckoutError as error:
        raise UsageError(f"--checkout: {error}") from error
    print_json(verdict.as_dict()) if args.json else say(verdict.describe())
    return OK if verdict.clean else FINDING


def run_show(args: argparse.Namespace) -> int:
    from leftfold.replay.show import describe_snapshot, finished_lately, life, snapshot
    from leftfold.replay.snapshots import fold_to

    def look() -> int:
        log = read_log(args.log)
        seq = seq_of(log, args.at)
        if args.rid is not None:
            lives = {rid: life(log, rid, seq) for rid in rids_of(log, args.rid, args.log)}
            check_at(seq, log)
            return _show_lives(args, {rid: moments for rid, moments in lives.items() if moments}, seq)
        fold = fold_to(log, seq)
        check_at(seq, log)
        found = {**snapshot(fold), "finished": finished_lately(fold)}
        print_json(found) if args.json else say(describe_snapshot(found))
        return OK

    return views.guarded(args, look)


def _show_lives(args: argparse.Namespace, lives: dict[str, list[Any]], seq: int | None) -> int:
    if not lives:
        raise unseen(args.rid, args.log, seq)
    if args.json:
        told = [
            {"rid": rid, "life": [{"seq": m.seq, "t": m.t, "what": m.what, **m.detail} for m in moments]}
            for rid, moments in lives.items()
        ]
        print_json(one_or_all(args.rid, told))
        return OK
    for rid, moments in lives.items():
        say("\n".join([*([f"{rid}:"] if len(lives) > 1 else []), *(moment.line() for moment in moments)]))
    return OK
