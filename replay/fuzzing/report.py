"""A finding as a regression test that a person can read."""

from __future__ import annotations

import re
import shutil
from dataclasses import fields
from hashlib import blake2b
from pathlib import Path
from pprint import pformat
from typing import Any

import orjson

from leftfold.events import EventLog, encode
from leftfold.fsm import Config
from leftfold.replay.fuzzing.journal import opening
from leftfold.replay.fuzzing.loop import Run
from leftfold.replay.fuzzing.world import Command

WIDTH = 116


def name_of(run: Run) -> str:
    """Equal runs have equal names."""
    mark = blake2b(repr((run.config, run.commands)).encode(), digest_size=4).hexdigest()
    kind = re.sub(r"(?<=[a-z])(?=[A-Z])|[^A-Za-z0-9]+", "_", run.kind or "nothing").lower()
    return f"test_{kind}_{mark}"


def source_of(run: Run, again: str, commit: str = "unknown") -> str:
    """A self-contained module of one test, which fails as long as the fault is there; `again`: what found it."""
    settings = {key: value for key, value in run.config.items() if value is not None}
    world = "DurableWorld" if "sync_every" in settings else "World"
    lines = [_call(f"world = {world}", settings), *(_line(command) for command in run.commands)]
    body = "\n".join("    " + part for line in lines for part in line.splitlines())
    fault = " ".join(str(run.fault).replace("\\", "/").replace('"', "'").split())
    said = _wrapped(f'"""Found by `{again}` at {commit}: {type(run.fault).__name__}: {fault[:300]}"""')
    return f"{said}\n\nfrom leftfold.replay.fuzzing import {world}\n\n\ndef {name_of(run)}() -> None:\n{body}\n"


def _line(command: Command) -> str:
    name, arguments = command
    return _call(f"world.{name}", dict(arguments))


def _call(function: str, arguments: dict[str, Any]) -> str:
    """One line, or one argument a line when that is too long."""
    parts = [f"{name}={_literal(value)}" for name, value in arguments.items()]
    line = f"{function}({', '.join(parts)})"
    if len(line) <= WIDTH and "\n" not in line:
        return line
    inner = "\n".join(f"    {part}," for part in parts)
    return f"{function}(\n{inner}\n)"


def _literal(value: Any) -> str:
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return f"[{', '.join(map(_literal, value))}]"
    return pformat(value, width=WIDTH - 20, compact=True).replace("\n", "\n        ")


def _wrapped(docstring: str) -> str:
    lines, line = [], ""
    for word in docstring.split(" "):
        if line and len(line) + 1 + len(word) > WIDTH:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}" if line else word
    return "\n".join([*lines, line])


def write_test(run: Run, source: str, directory: Path) -> Path:
    """Write the test into `directory` (made if need be) and say where it is."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name_of(run)}.py"
    path.write_text(source)
    return path


def write_log(run: Run, directory: Path) -> Path:
    """Write what the reducer took as a log that `leftfold replay` opens, into a folder of the run's name."""
    path = directory / name_of(run).removeprefix("test_")
    if path.exists():
        shutil.rmtree(path)
    limits = {each.name: run.config[each.name] for each in fields(Config) if each.name in run.config}
    with EventLog.open(path) as log:
        log.append(opening(Config(**limits)))
        for event in run.log:
            log.append(event)
    return path


def events_of(run: Run) -> list[str]:
    """What the reducer took, a line an event, numbered as in the log of `write_log`."""
    lines = []
    for seq, event in enumerate(run.log, 2):
        said = orjson.loads(encode(event, seq))
        shown = [f"{name}={orjson.dumps(value).decode()}" for name, value in said.items() if name not in _HEAD]
        lines.append(f"{seq:>6}  t={said['t']:<8} {said['type']:<13} {' '.join(shown)}".rstrip())
    return lines


_HEAD = ("seq", "t", "type", "digest")
