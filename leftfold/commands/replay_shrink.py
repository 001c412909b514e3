"""`leftfold replay shrink`: the smallest list of events that still shows what is wrong, as a regression test."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from leftfold.commands.common import FINDING, UsageError, print_json, seconds
from leftfold.commands.replay_common import add_log, allow_policy, read_log
from leftfold.commands.replay_views import guarded


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "The log's inputs are run again by the planner that is here (with made-up tokens), and as much of them is left "
        "out as can be while they still show it. What is left is written as a test that fails as long as the fault is "
        "there. Exit code 1 when it is found, as for any finding; 2 when the inputs do not show it."
    )
    add_log(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--violation", action="store_true", help="an invariant is broken, or the reducer fails")
    what.add_argument("--divergence", action="store_true", help="the planner of --checkout decides otherwise")
    what.add_argument("--predicate", metavar="MODULE:FUNCTION",
                      help="a function of the list of events that says (truthily) whether it is there")  # fmt: skip
    parser.add_argument("--checkout", metavar="DIR", help="another checkout, whose code is run beside this one's")
    parser.add_argument("--seconds", type=seconds, default=60.0, help="stop after so many seconds (default 60)")
    parser.add_argument("--out", type=Path, metavar="DIR", default=Path("tests/property/found"),
                        help="where the test is written (default %(default)s)")  # fmt: skip
    allow_policy(parser)


def run(args: argparse.Namespace) -> int:
    from contextlib import nullcontext
    from time import perf_counter

    from leftfold.replay.checkout import Checkout, CheckoutError
    from leftfold.replay.rerun import items_of
    from leftfold.replay.shrink import NothingFound, shrink, source_of, write_test

    kind = "violation" if args.violation else "divergence" if args.divergence else "predicate"
    if (kind == "divergence") != (args.checkout is not None):
        text = "without the planner that decides otherwise there is nothing to try smaller logs on"
        raise UsageError(f"--divergence and --checkout DIR go together: {text}")
    predicate = None if args.predicate is None else _function(args.predicate)
    end = perf_counter() + args.seconds

    def look() -> int:
        items = items_of(read_log(args.log))
        try:
            with nullcontext() if args.checkout is None else Checkout(args.checkout) as other:
                shrunk = shrink(items, kind, other=other, predicate=predicate, go_on=lambda: perf_counter() < end)
        except (NothingFound, CheckoutError) as error:
            raise UsageError(str(error)) from error
        path = write_test(shrunk, args.out, args.predicate)
        found = {"kind": shrunk.kind, "message": shrunk.text, "events": len(shrunk.events), "before": shrunk.before,
                 "tries": shrunk.tries, "test": str(path)}  # fmt: skip
        if args.json:
            print_json(found)
        else:
            print(f"{shrunk.kind}: {shrunk.before} records came down to {len(shrunk.events)} events in {shrunk.tries} "
                  f"tries; written to {path}:\n\n{source_of(shrunk, args.predicate)}")  # fmt: skip
        return FINDING

    return guarded(args, look)


def _function(name: str) -> Any:
    from importlib import import_module

    module, colon, attribute = name.partition(":")
    try:
        found = getattr(import_module(module), attribute) if colon else None
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"--predicate {name}: {error}") from error
    if not callable(found):
        raise UsageError(f"--predicate {name}: not a module:function")
    return found


COMMANDS: dict[str, tuple[str, Any, Any]] = {
    "shrink": ("the smallest list of events that still shows a fault, as a test", _arguments, run),
}
