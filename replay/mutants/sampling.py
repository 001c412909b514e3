"""Small changes of source, drawn from all that can be made: what a general mutation run plants.

The operators are the usual ones (Offutt et al., "An experimental determination of sufficient mutant operators", 1996):
a comparison, a number, a connective or an arithmetic operator becomes its neighbour, a condition is negated, a
statement that writes is dropped. Nothing is changed in annotations, docstrings and the texts of errors.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from leftfold.replay.mutants.catalogue import PACKAGE, Mutant

ROOMS = ("events", "fsm")

_NEIGHBOURS: dict[type[ast.AST], Callable[[], Any]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sampled(Mutant):
    """A change that was drawn. `source`: the whole file with it."""

    source: str = ""

    def planted(self) -> str:
        return self.source


def sampled(count: int, rng: Random) -> list[Sampled]:
    """`count` changes (or all there are), spread evenly over the places of `ROOMS`, in the order of the files."""
    every = [change for room in ROOMS for path in sorted((PACKAGE / room).glob("*.py")) for change in changes(path)]
    count = min(count, len(every))
    return [every[int((at + rng.random()) * len(every) / count)] for at in range(count)]


def changes(path: Path) -> list[Sampled]:
    """All changes that can be made in one file."""
    source = path.read_text()
    tree = ast.parse(source)
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: list[Sampled] = []
    for node, text in _changed(tree):
        begin = starts[node.lineno - 1] + node.col_offset
        assert node.end_lineno is not None and node.end_col_offset is not None
        end = starts[node.end_lineno - 1] + node.end_col_offset
        raw = source.encode()
        file = f"{path.parent.name}/{path.name}"
        old = raw[begin:end].decode()
        story, planted = f"{_short(old)} -> {_short(text)}", raw[:begin] + text.encode() + raw[end:]
        name, kind = f"{file}:{node.lineno}", path.parent.name
        found.append(Sampled(name, kind, story, file, old, text, source=planted.decode()))
    return found


def _short(text: str) -> str:
    return " ".join(text.split())


def _changed(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Nodes below `node` that can be changed, each with what stands there then."""
    for child in _children(node):
        if isinstance(child, ast.stmt):
            yield from ((child, text) for text in _statement(child))
        elif isinstance(child, ast.expr):
            yield from ((child, text) for text in _expression(child))
        yield from _changed(child)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """What belongs to the program: no annotations, decorators, texts, or what only a type checker reads."""
    if isinstance(node, (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom, ast.Assert)):
        return
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases", "keywords") and not isinstance(node, ast.Call):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child


def _statement(node: ast.stmt) -> list[str]:
    writes = isinstance(node, (ast.Delete, ast.AugAssign, ast.Raise, ast.Continue, ast.Break))
    if isinstance(node, ast.Expr):
        writes = isinstance(node.value, ast.Call)
    elif isinstance(node, ast.Assign):
        writes = any(isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets)
    texts = ["pass"] if writes else []
    if isinstance(node, ast.AugAssign) and type(node.op) in _NEIGHBOURS:
        texts.append(ast.unparse(ast.AugAssign(node.target, _NEIGHBOURS[type(node.op)](), node.value)))
    return texts


def _expression(node: ast.expr) -> list[str]:
    changed: ast.expr | None = None
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _NEIGHBOURS:
        changed = ast.Compare(node.left, [_NEIGHBOURS[type(node.ops[0])](), *node.ops[1:]], node.comparators)
    elif isinstance(node, ast.BoolOp):
        changed = ast.BoolOp(_NEIGHBOURS[type(node.op)](), node.values)
    elif isinstance(node, ast.BinOp) and type(node.op) in _NEIGHBOURS:
        changed = ast.BinOp(node.left, _NEIGHBOURS[type(node.op)](), node.right)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        changed = node.operand
    elif isinstance(node, ast.IfExp):
        changed = ast.IfExp(node.test, node.orelse, node.body)
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        changed = ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        changed = ast.Constant(node.value + 1)
    return [] if changed is None else [f"({ast.unparse(changed)})"]
