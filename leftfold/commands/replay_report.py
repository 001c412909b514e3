"""`leftfold replay report`: a log as one page with plots."""

from __future__ import annotations

import argparse
from typing import Any

from leftfold.commands.common import OK, UsageError, natural, print_json
from leftfold.commands.replay_common import add_log, allow_policy, out_path, read_log
from leftfold.commands.replay_views import guarded


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "One self-contained HTML page: queue, batch and page use over time, how TTFT and TPOT are distributed, "
        "preemptions, cache hits, and the slowest requests with why they were slow. It loads nothing and runs nothing."
    )
    add_log(parser)
    parser.add_argument("-o", "--out", metavar="FILE", required=True, help="where the page is written")
    parser.add_argument("--slowest", type=natural, metavar="N", default=10,
                        help="how many slow requests are told of (default %(default)s)")  # fmt: skip
    allow_policy(parser)


def run(args: argparse.Namespace) -> int:
    """Write the page; 0."""
    from pathlib import Path

    from leftfold.replay.errors import NotStarted
    from leftfold.replay.report import build, render
    from leftfold.replay.worlds import World

    def look() -> int:
        world = World.read(read_log(args.log))
        if world.last < world.first:
            raise NotStarted("the log holds no record")
        report = build(world, Path(args.log).resolve().name, args.slowest)
        try:
            out_path(args.out, args.log).write_text(render(report), encoding="utf-8", errors="replace")
        except OSError as error:
            raise UsageError(f"-o {args.out}: {error}") from error
        if args.json:
            print_json({"out": args.out, **report.as_dict()})
        else:
            count = len(report.slowest)
            print(f"{report.totals['requests']} requests in {report.totals['events']} records; {args.out} tells of "
                  f"them, and of the {count} slowest why")  # fmt: skip
        return OK

    return guarded(args, look)


COMMANDS: dict[str, tuple[str, Any, Any]] = {
    "report": ("one HTML page: plots over time, distributions, the slowest requests and why", _arguments, run),
}
