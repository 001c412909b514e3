"""`leftfold replay` diff, timeline, explain, trace: looks into a log that need nothing but the log."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from leftfold.commands.common import FINDING, OK, UsageError, print_json
from leftfold.commands.replay_common import (
    add_at,
    add_log,
    allow_policy,
    check_at,
    one_or_all,
    out_path,
    read_log,
    report_damage,
    rids_of,
    say,
    seq_of,
    unseen,
)


def _diff_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", metavar="A", help="a log's folder")
    parser.add_argument("other", metavar="B", help="another's")
    add_at(parser)
    parser.add_argument("--times", action="store_true", help="records differ if their times do")
    allow_policy(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _request_arguments(parser: argparse.ArgumentParser) -> None:
    add_log(parser)
    parser.add_argument("rid", metavar="RID", help="the request's id, or its answer's (chatcmpl-…, cmpl-…, resp_…)")
    allow_policy(parser)


def _explain_arguments(parser: argparse.ArgumentParser) -> None:
    _request_arguments(parser)
    add_at(parser)


def _trace_arguments(parser: argparse.ArgumentParser) -> None:
    add_log(parser)
    parser.add_argument("-o", "--out", metavar="FILE", required=True, help="where the trace is written (- is stdout)")
    allow_policy(parser)


def guarded(args: argparse.Namespace, look: Callable[[], int]) -> int:
    """`look()`, with a log that cannot be read or folded as a finding."""
    from leftfold.events import CodecError, LogError
    from leftfold.replay.errors import ReplayError

    try:
        return look()
    except (LogError, CodecError, ReplayError) as error:
        return report_damage(args.json, error, *(vars(args)[name] for name in ("log", "other") if name in args))


def run_diff(args: argparse.Namespace) -> int:
    """0 when nothing differs, else 1."""
    from leftfold.replay.diff import describe, diff

    def look() -> int:
        a, b = read_log(args.log), read_log(args.other)
        seq = seq_of(a, args.at)
        found = diff(a, b, seq, args.times)
        check_at(seq, a, b)
        print_json(found) if args.json else say(describe(found))
        return OK if found["equal"] else FINDING

    return guarded(args, look)


def run_timeline(args: argparse.Namespace) -> int:
    from leftfold.replay.timeline import timelines

    def look() -> int:
        log = read_log(args.log)
        found = {rid: timelines(log, rid) for rid in rids_of(log, args.rid, args.log)}
        if not any(found.values()):
            raise UsageError(f"no request {args.rid!r} in {args.log}: it came before the log's first record")
        if args.json:
            told = [{"rid": rid, "choices": [line.as_dict() for line in lines]} for rid, lines in found.items()]
            print_json(one_or_all(args.rid, told))
        else:
            say("\n".join(line.describe() for lines in found.values() for line in lines))
        return OK

    return guarded(args, look)


def run_explain(args: argparse.Namespace) -> int:
    from leftfold.replay.explain import explain

    def look() -> int:
        log = read_log(args.log)
        seq = seq_of(log, args.at)
        until = round(args.at * 1e6) if isinstance(args.at, float) else None
        told = [explain(log, rid, seq, until=until) for rid in rids_of(log, args.rid, args.log)]
        check_at(seq, log)
        found = [one for one in told if one.known]
        if not found:
            raise unseen(args.rid, args.log, seq)
        if args.json:
            print_json(one_or_all(args.rid, [one.as_dict() for one in found]))
        else:
            say("\n".join(one.describe() for one in found))
        return OK

    return guarded(args, look)


def run_trace(args: argparse.Namespace) -> int:
    from leftfold.replay.trace import write_trace

    def look() -> int:
        if args.out == "-":
            if args.json:
                raise UsageError("-o - writes the trace to stdout, where --json would write its object")
            write_trace(read_log(args.log), sys.stdout.buffer)
            return OK
        try:
            with out_path(args.out, args.log).open("wb") as file:
                count = write_trace(read_log(args.log), file)
        except OSError as error:
            raise UsageError(f"-o {args.out}: {error}") from error
        if args.json:
            print_json({"out": args.out, "events": count})
        else:
            print(f"{count} events written to {args.out}: open it at https://ui.perfetto.dev or chrome://tracing")
        return OK

    return guarded(args, look)


COMMANDS: dict[str, tuple[str, Any, Any]] = {
    "timeline": ("one request's life on one screen", _request_arguments, run_timeline),
    "explain": ("why a request waited, gave way or ended, in a sentence per cause", _explain_arguments, run_explain),
    "diff": ("two logs beside each other: records, answers, states", _diff_arguments, run_diff),
    "trace": ("write a Chrome trace, for the Perfetto UI", _trace_arguments, run_trace),
}
