"""The command line. Each command's module is imported when that command is called, so `--help` costs nothing."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from leftfold.commands.common import OK, WRONG_USE, Parser, UsageError
from leftfold.errors import ConfigurationError

COMMANDS = {
    "serve": ("leftfold.commands.serve", "serve a model over an OpenAI-compatible HTTP API"),
    "chat": ("leftfold.commands.chat", "chat with a model in the terminal"),
    "models": ("leftfold.commands.models", "list the models in the cache"),
    "replay": ("leftfold.commands.replay", "verify a log, or show what happened in it"),
    "simulate": ("leftfold.commands.simulate", "run a public trace through the real scheduler on virtual time"),
    "fuzz": ("leftfold.commands.fuzz", "drive the scheduler through random situations and check every invariant"),
    "bench": ("leftfold.commands.bench", "measure"),
    "log": ("leftfold.commands.log", "read a log: its records, its figures, its checksums"),
    "compile": ("leftfold.commands.compile", "compile the scheduler to machine code"),
    "fsm": ("leftfold.commands.fsm", "draw the request's state machine"),
}

SERVE_EXTRA = frozenset({
    "fastapi", "gguf", "huggingface_hub", "jinja2", "prometheus_client", "pydantic", "safetensors", "starlette",
    "tokenizers", "torch", "transformers", "uvicorn", "zmq",
})  # fmt: skip
"""Modules that come with `leftfold[serve]`, and that a light installation lacks."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command: 0 on success, 1 on a finding, 2 on wrong use (one line on stderr)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _command(arguments)
    except (UsageError, ConfigurationError) as error:
        print(f"leftfold: {error}", file=sys.stderr)
        return WRONG_USE
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in SERVE_EXTRA:
            raise
        print(f"leftfold: {arguments[0]} needs {missing}: pip install 'leftfold[serve]'", file=sys.stderr)
        return WRONG_USE
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK


def _command(arguments: list[str]) -> int:
    names = Parser(
        prog="leftfold",
        description="Leftfold: an LLM inference engine whose state is a left fold over its event log.",
        epilog="commands:\n"
        + "\n".join(f"  {name:8} {text}" for name, (_, text) in COMMANDS.items())
        + "\n\n`leftfold COMMAND --help` says more. Exit code 0: success, 1: a finding, 2: wrong use.",
        usage="leftfold COMMAND …",
    )
    names.add_argument("--version", action="store_true", help="print the version")
    names.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    names.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    chosen = names.parse_args(arguments[:1])
    if chosen.version:
        from leftfold import __version__

        print(f"leftfold {__version__}")
        return OK
    if chosen.command is None:
        names.print_help(sys.stderr)
        return WRONG_USE
    if chosen.command not in COMMANDS:
        names.error(f"unknown command {chosen.command!r}: choose one of {', '.join(COMMANDS)}")
    return run_module(chosen.command, arguments[1:])


def run_module(name: str, arguments: list[str]) -> int:
    """Import the command's module, let it read its arguments, run it."""
    home, text = COMMANDS[name]
    module: Any = import_module(home)
    parser = Parser(prog=f"leftfold {name}", description=module.__doc__ or text)
    module.add_arguments(parser)
    parser.set_defaults(run=getattr(module, "run", None), launch=launch_server)
    args = parser.parse_args(arguments)
    try:
        return int(args.run(args))
    except MemoryError as error:
        raise UsageError(f"out of memory: {error or 'there is not enough for this'}") from error


def launch_server(options: dict[str, Any]) -> int:
    """Serve until told to stop. The command line alone knows the server; what is not given keeps its default."""
    from leftfold.server.launch import serve
    from leftfold.server.options import ServeOptions

    return serve(ServeOptions(**options))
