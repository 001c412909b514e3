"""`leftfold replay ui`: the debugger in the browser."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from leftfold.commands.common import OK, UsageError, print_json
from leftfold.commands.replay_common import add_log, allow_policy, read_log
from leftfold.commands.replay_views import guarded


def _arguments(parser: argparse.ArgumentParser) -> None:
    from leftfold.commands.serve import port

    parser.description = (
        "Travel through a log in the browser: a scrubber over its records, lanes of requests, the page map, state and "
        "plan at the cursor, why a request waited, two cursors to compare, and what would have come of it without an "
        "event or with another. The log is only read. Ctrl-C ends it."
    )
    add_log(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=port, default=0, help="port to listen on (default: any free one)")
    parser.add_argument("--no-browser", action="store_true", help="print the address alone, open nothing")
    parser.add_argument("--until-eof", action="store_true", help="end when standard input does (for programs)")
    allow_policy(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C; 0."""
    import threading
    import webbrowser
    from pathlib import Path

    from leftfold.replay.ui.api import Api
    from leftfold.replay.ui.http import Server

    def look() -> int:
        log = read_log(args.log)
        api = Api(log, Path(args.log).resolve().name)
        try:
            server = Server(api, args.host, args.port)
        except OSError as error:
            raise UsageError(f"cannot listen on {args.host}:{args.port}: {error.strerror or error}") from error
        with server:
            api.start()
            if args.json:
                print_json({"url": server.url, "log": str(args.log)})
            else:
                print(f"leftfold: {args.log} is at {server.url}", flush=True)
                print("leftfold: Ctrl-C ends it; whoever has the address can read the log", file=sys.stderr)
            if args.until_eof:
                threading.Thread(target=lambda: (sys.stdin.read(), server.shutdown()), daemon=True).start()
            if not args.no_browser and not args.json:
                webbrowser.open(server.url)
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                pass
        return OK

    return guarded(args, look)


COMMANDS: dict[str, tuple[str, Any, Any]] = {
    "ui": ("travel through a log in the browser: lanes, pages, plans, what if", _arguments, run),
}
