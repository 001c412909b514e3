"""Chat with a model in the terminal, in this process or (--url) on a server.

Type a message and Enter; /reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C ends an answer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Generator
from typing import Any

from leftfold.commands.common import OK, WRONG_USE, UsageError, key, keys_from_environment, natural, positive
from leftfold.commands.serve import add_engine_arguments, model

Messages = list[dict[str, str]]
Ask = Callable[[Messages], Generator[str, None, None]]

_OWN = ("run", "launch", "url", "api_key", "system", "temperature", "top_p", "max_tokens", "seed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    quiet = argparse.SUPPRESS
    parser.add_argument("model", nargs="?", type=model, metavar="MODEL", default=quiet, help="what to chat with")
    parser.add_argument("--url", help="a server to chat with instead, such as http://127.0.0.1:8000")
    parser.add_argument("--api-key", type=key, help="the server's key (LEFTFOLD_API_KEY)")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 always takes the likeliest token (0.7)")
    parser.add_argument("--top-p", type=float, default=0.95, help="draw from the likeliest tokens of this mass (0.95)")
    parser.add_argument("--max-tokens", type=positive, default=512, help="longest answer in tokens (512)")
    parser.add_argument("--seed", type=natural, help="draw the same answers again")
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from leftfold.events import SamplingParams
    from leftfold.params import check_params

    try:
        check_params(SamplingParams(**sampling(args)))
    except ValueError as error:
        raise UsageError(str(error)) from error
    if args.url is not None:
        from leftfold.commands.remote import RemoteChat

        given_key = args.api_key or keys_from_environment("api_key").get("api_key")
        chat = RemoteChat(args.url, given_key, getattr(args, "model", None), sampling(args))
        return OK if talk(chat.ask, args.system) else WRONG_USE
    return _local(args)


def sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that were given."""
    names = ("temperature", "top_p", "max_tokens", "seed")
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def _local(args: argparse.Namespace) -> int:
    import logging

    from leftfold.errors import EngineError
    from leftfold.events import SamplingParams
    from leftfold.hub import HubError
    from leftfold.llm import LLM
    from leftfold.text import TextError

    logging.basicConfig(level=logging.WARNING, format="leftfold: %(levelname)s: %(message)s", stream=sys.stderr)
    options = {name: value for name, value in vars(args).items() if name not in _OWN}
    try:
        with LLM(**options) as llm:

            def ask(messages: Messages) -> Generator[str, None, None]:
                for piece in llm.stream(messages, SamplingParams(**sampling(args))):
                    if isinstance(piece, str):
                        yield piece
                    elif piece.error:
                        yield f"[{piece.error}]"

            talk(ask, args.system)
    except (EngineError, HubError, TextError) as error:
        raise UsageError(str(error)) from error
    return OK


def talk(ask: Ask, system: str | None) -> bool:
    """Turns until the input ends; an answer is printed as it comes. Whether the last one came.

    A turn that is refused is said so, and then as if it had not been.
    """
    answered = True
    start: Messages = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    while (text := _read()) is not None:
        if text in ("/exit", "/quit"):
            return answered
        if text == "/reset":
            messages = list(start)
        elif text:
            turn = [*messages, {"role": "user", "content": text}]
            try:
                messages = [*turn, {"role": "assistant", "content": _say(ask(turn))}]
                answered = True
            except UsageError as error:
                print(f"leftfold: {error}", file=sys.stderr)
                answered = False
    return answered


def _read() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None


def _say(pieces: Generator[str, None, None]) -> str:
    """Print pieces as they come; what was said, up to a Ctrl-C."""
    said = []
    try:
        for piece in pieces:
            said.append(piece)
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        pieces.close()
    print(flush=True)
    return "".join(said)
