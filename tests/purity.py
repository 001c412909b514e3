"""What the pure rooms may not write, found in the syntax tree: chance, clocks, addresses, hash order, floats."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

PURE_STDLIB = {
    "__future__", "bisect", "collections", "collections.abc", "dataclasses", "enum", "functools", "hashlib", "heapq",
    "itertools", "operator", "types", "typing",
}  # fmt: skip
PURE_EVENTS = {
    "leftfold.events", "leftfold.events.codec", "leftfold.events.digest", "leftfold.events.plan",
    "leftfold.events.quick", "leftfold.events.types",
}  # fmt: skip
IMPURE_EVENT_NAMES = {"EventLog"}

BANNED_NAMES = {
    "hash": "hash() differs from process to process",
    "id": "id() is an address",
    "float": "no float is computed or compared here",
    "complex": "no float is computed or compared here",
    "eval": "no code at run time",
    "exec": "no code at run time",
    "__import__": "imports stand at the top",
    "open": "no I/O",
    "input": "no I/O",
    "print": "no I/O",
    "breakpoint": "no I/O",
}
UNSTABLE = {"sort", "argsort", "partition", "argpartition"}
FLOAT_MAKERS = {
    "true_divide", "divide", "mean", "average", "median", "std", "var", "sqrt", "cbrt", "exp", "log", "log2", "log10",
    "linspace", "logspace", "reciprocal", "percentile", "quantile", "longdouble", "double", "single", "half", "inexact",
}  # fmt: skip
DEFAULT_IS_FLOAT = {"zeros": 1, "ones": 1, "empty": 1, "identity": 1, "eye": 3}  # position of dtype
FLOAT_DTYPE = re.compile(r"[<>=]?(float|complex|f|c|d)\d*")
TAKES_ORDER = {
    "list", "tuple", "enumerate", "iter", "next", "map", "filter", "zip", "reversed", "dict", "fromkeys", "array",
    "asarray", "fromiter", "join", "extend", "chain", "from_iterable", "str", "repr", "deque",
}  # fmt: skip
SET_TYPES = {"set", "frozenset", "Set", "AbstractSet", "MutableSet", "FrozenSet"}
SET_METHODS = {"union", "intersection", "difference", "symmetric_difference"}
SET_OPERATORS = (ast.BitOr, ast.BitAnd, ast.BitXor, ast.Sub)


def _is_set_type(annotation: ast.expr | None) -> bool:
    if isinstance(annotation, ast.BinOp):
        return _is_set_type(annotation.left) or _is_set_type(annotation.right)
    if isinstance(annotation, ast.Subscript):
        annotation = annotation.value
    return (isinstance(annotation, ast.Name) and annotation.id in SET_TYPES) or (
        isinstance(annotation, ast.Attribute) and annotation.attr in SET_TYPES
    )


def _function_name(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def _is_view(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and _function_name(node) in ("keys", "items") and not node.args


class _Sets:
    """Which expressions of a module are sets, by their form, their annotation or what was assigned to them.

    Names are taken module-wide: a name that is a set anywhere may not be iterated anywhere.
    """

    def __init__(self, tree: ast.AST, attributes: frozenset[str]) -> None:
        self.names: set[str] = set()
        self.attributes = set(attributes)
        self.functions: set[str] = set()
        before = -1
        while before != (before := len(self.names) + len(self.attributes) + len(self.functions)):
            for node in ast.walk(tree):
                self._learn(node)

    def _learn(self, node: ast.AST) -> None:
        if isinstance(node, ast.arg) and _is_set_type(node.annotation):
            self.names.add(node.arg)
        elif isinstance(node, ast.AnnAssign) and _is_set_type(node.annotation):
            self._add(node.target)
        elif isinstance(node, ast.Assign) and self.holds(node.value):
            for target in node.targets:
                self._add(target)
        elif isinstance(node, ast.NamedExpr) and self.holds(node.value):
            self._add(node.target)
        elif isinstance(node, ast.FunctionDef) and _is_set_type(node.returns):
            self.functions.add(node.name)
        elif isinstance(node, ast.ClassDef):
            fields = [n.target for n in node.body if isinstance(n, ast.AnnAssign) and _is_set_type(n.annotation)]
            self.attributes |= {target.id for target in fields if isinstance(target, ast.Name)}

    def _add(self, target: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self.names.add(target.id)
        elif isinstance(target, ast.Attribute):
            self.attributes.add(target.attr)

    def holds(self, node: ast.expr) -> bool:
        match node:
            case ast.Set() | ast.SetComp():
                return True
            case ast.Name():
                return node.id in self.names
            case ast.Attribute():
                return node.attr in self.attributes
            case ast.BinOp(op=op) if isinstance(op, SET_OPERATORS):
                sides = (node.left, node.right)
                return any(self.holds(side) for side in sides) or (
                    any(_is_view(side) for side in sides) and not isinstance(op, ast.BitOr)
                ) or all(_is_view(side) for side in sides)  # fmt: skip
            case ast.IfExp():
                return self.holds(node.body) or self.holds(node.orelse)
            case ast.Call():
                name = _function_name(node)
                return (
                    name in ("set", "frozenset")
                    or name in self.functions
                    or name in SET_METHODS
                    or (name == "copy" and isinstance(node.func, ast.Attribute) and self.holds(node.func.value))
                )
        return False


def set_attributes(source: str) -> frozenset[str]:
    """Attribute names that a module declares as sets, for checking the other modules of its room."""
    return frozenset(_Sets(ast.parse(source), frozenset()).attributes)


def _imports(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name not in PURE_STDLIB | PURE_EVENTS | {"numpy", "numpy.typing"} and not _own(alias.name):
                yield f"imports {alias.name}"
    elif isinstance(node, ast.ImportFrom):
        module = node.module or "."
        names = {alias.name for alias in node.names}
        if node.level or not (module in PURE_STDLIB | PURE_EVENTS | {"numpy", "numpy.typing"} or _own(module)):
            yield f"imports {module}"
        if module == "numpy":
            yield from (f"imports numpy.{name}" for name in sorted(names & (UNSTABLE | FLOAT_MAKERS | {"random"})))
        if module.startswith("leftfold.events") and names & IMPURE_EVENT_NAMES:
            yield f"imports {min(names & IMPURE_EVENT_NAMES)}"


def _own(module: str) -> bool:
    return module == "leftfold.fsm" or module.startswith("leftfold.fsm.")


def _floats(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, float | complex):
        yield f"float literal {node.value!r}"
    elif isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Div):
        yield "true division"
    elif isinstance(node, ast.Attribute) and (
        node.attr in FLOAT_MAKERS or re.fullmatch(r"(float|complex)\d+|truediv|itruediv", node.attr)
    ):
        yield f"{node.attr} makes floats"
    elif isinstance(node, ast.keyword) and node.arg == "dtype" and isinstance(node.value, ast.Constant):
        if FLOAT_DTYPE.fullmatch(str(node.value.value)):
            yield f"dtype {node.value.value!r}"
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        name = node.func.attr
        numpy = isinstance(node.func.value, ast.Name) and node.func.value.id in ("np", "numpy")
        if name == "astype" and any(isinstance(a, ast.Constant) and FLOAT_DTYPE.fullmatch(str(a.value))
                                    for a in node.args):  # fmt: skip
            yield "astype to a float"
        if numpy and name in DEFAULT_IS_FLOAT and not _has_dtype(node, DEFAULT_IS_FLOAT[name]):
            yield f"np.{name} without a dtype is float64"


def _has_dtype(call: ast.Call, position: int) -> bool:
    return len(call.args) > position or any(keyword.arg == "dtype" for keyword in call.keywords)


def _sorts(node: ast.AST) -> Iterator[str]:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in UNSTABLE):
        return
    kinds = [keyword.value for keyword in node.keywords if keyword.arg == "kind"]
    stable = bool(kinds) and all(isinstance(kind, ast.Constant) and kind.value == "stable" for kind in kinds)
    numpy = isinstance(node.func.value, ast.Name) and node.func.value.id in ("np", "numpy")
    # A bare `.sort()` may be a list's, which is stable; everything else is an array's.
    list_sort = node.func.attr == "sort" and not numpy and not kinds
    if not stable and not list_sort and not (node.func.attr == "partition" and not numpy and _is_text(node)):
        yield f"{node.func.attr} without kind='stable'"


def _is_text(call: ast.Call) -> bool:
    return len(call.args) == 1 and isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, str)


def _set_order(node: ast.AST, sets: _Sets) -> Iterator[str]:
    if isinstance(node, ast.For | ast.comprehension) and sets.holds(node.iter):
        yield "iterates over a set"
    elif isinstance(node, ast.Starred | ast.YieldFrom) and sets.holds(node.value):
        yield "unpacks a set"
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple | ast.List) and sets.holds(node.value):
        yield "unpacks a set"
    elif isinstance(node, ast.FormattedValue) and sets.holds(node.value):
        yield "formats a set"
    elif isinstance(node, ast.Call):
        name = _function_name(node)
        if name in TAKES_ORDER and any(sets.holds(argument) for argument in node.args):
            yield f"{name}() takes a set in hash order"
        if name in ("min", "max") and node.keywords and any(sets.holds(argument) for argument in node.args):
            yield f"{name}() by a key breaks ties in hash order"
        if name == "pop" and not node.args and isinstance(node.func, ast.Attribute) and sets.holds(node.func.value):
            yield "pops from a set"


def violations(source: str, attributes: frozenset[str] = frozenset()) -> list[str]:
    """Every impurity of a module as "line: what"; `attributes`: names declared as sets elsewhere in its room."""
    tree = ast.parse(source)
    sets = _Sets(tree, attributes)
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0) or getattr(getattr(node, "iter", None), "lineno", 0)
        what = [*_imports(node), *_floats(node), *_sorts(node), *_set_order(node, sets)]
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in BANNED_NAMES:
            what.append(f"{node.id}: {BANNED_NAMES[node.id]}")
        if isinstance(node, ast.Attribute) and node.attr in ("random", "default_rng"):
            what.append("chance comes from outside")
        found += [(line, text) for text in what]
    return [f"{line}: {text}" for line, text in sorted(set(found))]
