"""What no test reaches: `make coverage` compares it with `tests/coverage-exceptions.toml`, where each gap has a reason.

    python tests/coverage_gaps.py PROPERTY.json ALL.json

Both are written by `coverage json`: what property tests and fuzz runs of fixed seeds reach, and what all tests without
a server reach. The first counts for `events/` and `fsm/`, the second for `replay/`, most of which prints. A gap is a
line that is not reached, or a branch that is taken one way only; an exception names its file, the function that holds
it and the text of the line (or patterns of these, as of a shell), so it stays true when code moves and ends when code
changes. Examples in `tests/unit` may reach what chance does not: an exception that says so is held to it.
"""

from __future__ import annotations

import ast
import json
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
EXCEPTIONS = Path(__file__).with_name("coverage-exceptions.toml")
BY_PROPERTIES = ("events/", "fsm/")
BY_ALL = ("replay/",)


class Gap(NamedTuple):
    """A line that is not reached, or whose branch is taken one way only. `where`: its function, or "" for none."""

    file: str
    where: str
    text: str


def functions(source: str) -> list[tuple[int, int, str]]:
    """First line, last line and name (as `name` or `Class.name`) of each function, outer ones first."""
    found: list[tuple[int, int, str]] = []

    def look(body: Sequence[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = prefix + node.name
                assert node.end_lineno is not None
                if not isinstance(node, ast.ClassDef):
                    found.append((node.lineno, node.end_lineno, name))
                look(node.body, f"{name}.")

    look(ast.parse(source).body, "")
    return found


def gaps(report: Mapping[str, Any], rooms: Sequence[str], root: Path = ROOT) -> dict[Gap, int]:
    """Gaps in the files of `rooms`, and the number of the first line of each."""
    found: dict[Gap, int] = {}
    for file, told in report["files"].items():
        if file.startswith(tuple(rooms)):
            for line in sorted({*told["missing_lines"], *_half_taken(told)}):
                found.setdefault(_gap(file, line, root), line)
    return found


def _half_taken(told: Mapping[str, Any]) -> Iterator[int]:
    """Lines that are reached and do not go both ways; those behind one that is not reached are told by that."""
    missing = {*told["missing_lines"]}
    for begin, end in told["missing_branches"]:
        if begin not in missing and end not in missing:
            yield begin


def _gap(file: str, line: int, root: Path) -> Gap:
    source = (root / file).read_text()
    holds = [name for first, last, name in functions(source) if first <= line <= last]
    return Gap(file, holds[-1] if holds else "", source.splitlines()[line - 1].strip())


class Known(NamedTuple):
    """An exception. `file`, `function` and `lines` may end with `*`; `by_examples`: tests that are no property tests
    reach it, which is held to."""

    file: str
    function: str
    lines: Sequence[str]
    why: str
    by_examples: bool = False

    def holds(self, gap: Gap) -> bool:
        """Whether it speaks of this gap."""
        fits = _fits(self.file, gap.file) and _fits(self.function, gap.where)
        return fits and any(_fits(line, gap.text) for line in self.lines)


def _fits(pattern: str, text: str) -> bool:
    return text.startswith(pattern[:-1]) if pattern.endswith("*") else text == pattern


def exceptions(path: Path = EXCEPTIONS) -> list[Known]:
    """What may stay unreached, and why. Raises ValueError for an entry without a reason."""
    known = [Known(**entry) for entry in tomllib.loads(path.read_text()).get("exception", [])]
    for entry in known:
        if not entry.why.endswith("."):
            raise ValueError(f"{entry}: say why, in a sentence")
    return known


def main(properties: str, everything: str) -> int:
    """Tell gaps that are not listed, and listed ones that are none (any more); 1 if there are any of the former."""
    by_properties, by_all = (json.loads(Path(path).read_text()) for path in (properties, everything))
    never = gaps(by_all, (*BY_PROPERTIES, *BY_ALL))
    found = gaps(by_properties, BY_PROPERTIES) | gaps(by_all, BY_ALL)
    known = exceptions()
    used: set[int] = set()
    new: dict[Gap, int] = {}
    for gap, line in found.items():
        fitting = [index for index, entry in enumerate(known) if entry.holds(gap)]
        why = [index for index in fitting if not (known[index].by_examples and gap in never)]
        used.update(why[:1])
        if not why:
            new[gap] = line
    for index, entry in enumerate(known):
        if index not in used:
            print(f"of no use any more: {entry}")
    for gap, line in sorted(new.items(), key=lambda item: (item[0].file, item[1])):
        print(f"{gap.file}:{line} {gap.where}: {gap.text}")
    print(f"{len(found)} gaps, {len(new)} of them without a reason in {EXCEPTIONS.name}")
    return 1 if new else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
