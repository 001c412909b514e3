"""What commands share: wrong use as one line, sizes, counts, exactly one JSON object."""

from __future__ import annotations

import argparse
import os
import re
import sys
from typing import Any, NoReturn

OK, FINDING, WRONG_USE = 0, 1, 2


class UsageError(Exception):
    """Wrong use; the message is the one line that the user sees."""


class Parser(argparse.ArgumentParser):
    """An argument parser that says what is wrong in one line and exits with 2."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        line = " ".join(message.split())
        self.exit(WRONG_USE, f"{self.prog}: {line} (see {self.prog} --help)\n")


_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4,
          "ki": 1024, "mi": 1024**2, "gi": 1024**3, "ti": 1024**4}  # fmt: skip


def size(text: str) -> int:
    """Bytes from `1500000`, `512MiB`, `2G` (decimal units without the i)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 512MiB or 2G")
    return int(float(match[1]) * _UNITS[match[2]])


def positive(text: str) -> int:
    """A whole number ≥ 1."""
    return _whole(text, 1)


def natural(text: str) -> int:
    """A whole number ≥ 0."""
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return value


def threads(text: str) -> int:
    """Threads of an executor: as many as this machine can run."""
    from leftfold.checking import Threads

    rule = Threads()
    try:
        fits = rule.holds(int(text))
    except ValueError:
        fits = False
    if not fits:
        raise argparse.ArgumentTypeError(f"{text!r} is not {rule}")
    return int(text)


def seconds(text: str) -> float:
    """Seconds ≥ 0, fractions allowed."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds of at least 0")
    return value


def key(text: str) -> str:
    """A key; an empty one would open what it should close."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the key is empty: give one, or leave the option out")
    return text


def named(text: str) -> str:
    """A name or a folder; an empty one would be the folder we are in."""
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty: give a name, or leave the option out")
    return text


def keys_from_environment(*options: str) -> dict[str, str]:
    """Keys that the environment gives, by option: `LEFTFOLD_API_KEY` is `api_key`. Raises UsageError for empty ones."""
    found = {}
    for option in options:
        name = f"LEFTFOLD_{option.upper()}"
        if name in os.environ:
            found[option] = os.environ[name]
            if not found[option].strip():
                raise UsageError(f"{name} is empty: set it to a key, or unset it")
    return found


def setting(text: str) -> tuple[str, Any]:
    """`key=value`, the value as JSON where it reads as such, else as text."""
    import orjson

    from leftfold.checking import MOST, short

    key, equals, raw = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form key=value")
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError:
        value = raw
    endless = isinstance(value, str) and re.fullmatch(r"-?\d+", value)
    if endless or (isinstance(value, int | float) and abs(value) > MOST):
        raise argparse.ArgumentTypeError(f"{short(text)} is out of range: numbers of settings are within ±{MOST}")
    return key, value


def print_json(found: Any) -> None:
    """One JSON object on one line, whatever it holds of numpy."""
    import orjson

    sys.stdout.write(orjson.dumps(found, default=str, option=orjson.OPT_SERIALIZE_NUMPY).decode() + "\n")
    sys.stdout.flush()


def subcommands(parser: argparse.ArgumentParser, commands: dict[str, tuple[str, Any, Any]]) -> None:
    """Nested commands: name to (help, add_arguments, run)."""
    group = parser.add_subparsers(dest="subcommand", metavar="COMMAND", required=True, parser_class=Parser)
    for name, (text, add_arguments, run) in commands.items():
        sub = group.add_parser(name, help=text, description=text)
        add_arguments(sub)
        sub.set_defaults(run=run)
