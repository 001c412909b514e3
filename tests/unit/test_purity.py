"""The reducer's room is pure: no clock, chance, address, hash order or float can reach a decision."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.purity import set_attributes, violations

FSM = Path(__file__).resolve().parents[2] / "fsm"

IMPURE = [
    "import time",
    "import random",
    "import os",
    "import threading",
    "import asyncio",
    "import socket",
    "import torch",
    "import math",
    "import importlib",
    "import json",
    "import numpy.random",
    "from time import monotonic",
    "from os.path import join",
    "from . import state",
    "from leftfold.executor import oracle",
    "from leftfold.events import EventLog",
    "from leftfold.events.log import EventLog",
    "from numpy import argsort",
    "from numpy import random",
    "def f():\n    import time",
    "x = hash(key)",
    "x = id(request)",
    "x = sorted(rows, key=id)",
    "x = {key: 1 for key in map(hash, rows)}",
    "x = eval(text)",
    "print(x)",
    "open(path)",
    "for x in {1, 2}:\n    pass",
    "for x in set(rows):\n    pass",
    "for x in frozenset(rows):\n    pass",
    "x = [y for y in {z for z in rows}]",
    "x = {y: 1 for y in set(rows)}",
    "live = set()\nfor x in live:\n    pass",
    "live: set[int] = other()\nfor x in live:\n    pass",
    "def f(live: set[int]):\n    return [x for x in live]",
    "def f(live: frozenset[int] | None):\n    return tuple(live)",
    "def f(self):\n    self.live = set()\ndef g(self):\n    return list(self.live)",
    "class A:\n    live: set[int]\ndef g(a):\n    return list(a.live)",
    "def live() -> set[int]: ...\nfor x in live():\n    pass",
    "for x in a.keys() & b.keys():\n    pass",
    "for x in a.keys() - b:\n    pass",
    "for x in {1} | more:\n    pass",
    "for x in a.union(b):\n    pass",
    "a = set()\nb = a.copy()\nx = list(b)",
    "x = list({1, 2})",
    "x = tuple(set(rows))",
    "x = next(iter({1, 2}))",
    "x = dict.fromkeys({1, 2})",
    "x = np.array({1, 2})",
    "x = ','.join({'a', 'b'})",
    "x = [*{1, 2}]",
    "a, b = {1, 2}",
    "x = f'{ {1, 2} }'",
    "x = {1, 2}.pop()",
    "x = min({1, 2}, key=rank)",
    "x = list(a if c else {1})",
    "x = np.sort(a)",
    "x = np.argsort(a)",
    "x = np.argsort(a, kind='quicksort')",
    "x = np.argsort(a, kind=kind)",
    "x = a.argsort()",
    "a.sort(kind='heapsort')",
    "x = np.partition(a, 3)",
    "x = a.argpartition(3)",
    "x = np.random.rand()",
    "x = np.random.default_rng(0)",
    "x = 0.5",
    "x = 1e3",
    "x = 2j",
    "x = a / b",
    "a /= b",
    "x = operator.truediv(a, b)",
    "x = float(a)",
    "x = np.float32(a)",
    "x = a.astype(np.float64)",
    "x = a.astype('f4')",
    "x = np.full(3, 1, dtype='float32')",
    "x = np.zeros(3)",
    "x = np.empty((3, 4))",
    "x = a.mean()",
    "x = np.true_divide(a, b)",
    "def f(x: float): ...",
]

PURE = [
    "from __future__ import annotations\nfrom collections import deque\nfrom collections.abc import Mapping",
    "import numpy as np\nimport numpy.typing as npt\nfrom hashlib import blake2b",
    "from leftfold.events import Admit, Plan\nfrom leftfold.events.types import Tick\nimport leftfold.fsm.pages",
    "x = sorted({1, 2})",
    "x = 3 in {1, 2}",
    "live = set()\nlive.add(3)\nlive.discard(3)\nx = len(live)",
    "live = set()\nfor x in sorted(live):\n    pass",
    "x = min({1, 2})",
    "for key in table:\n    pass",
    "for key in table.keys():\n    pass",
    "x = list(a.items())",
    "x = np.argsort(a, kind='stable')",
    "x = np.sort(a, kind='stable')",
    "rows.sort(key=rank)",
    "x = a // b",
    "x = 3",
    "x = np.zeros(3, np.int64)",
    "x = np.empty((3, 4), dtype=np.int32)",
    "x = request.id",
    "head, _, tail = name.partition(':')",
    "x = a | b",
    "x = rows.pop()",
]


def test_the_reducers_room_is_pure() -> None:
    files = sorted(FSM.rglob("*.py"))
    assert files
    shared = frozenset[str]().union(*(set_attributes(path.read_text()) for path in files))
    found = [f"fsm/{path.relative_to(FSM)}:{text}" for path in files for text in violations(path.read_text(), shared)]
    assert found == []


@pytest.mark.parametrize("source", IMPURE)
def test_a_planted_impurity_is_found(source: str) -> None:
    assert violations(source)


@pytest.mark.parametrize("source", PURE)
def test_what_is_pure_passes(source: str) -> None:
    assert violations(source) == []


def test_sets_declared_in_another_module_are_known() -> None:
    shared = set_attributes("class Pool:\n    free: set[int]\n")
    assert violations("x = list(pool.free)", shared) == ["1: list() takes a set in hash order"]
    assert violations("x = list(pool.free)") == []
