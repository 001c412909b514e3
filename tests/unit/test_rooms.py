"""Each room imports only the rooms it may; whatever the table does not list is refused, new modules included."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FRONT = "front door"
ALLOWED: dict[str, set[str]] = {
    "events": set(),
    "fsm": {"events"},
    "kernels": set(),
    "executor": {"events", "kernels"},
    "replay": {"events", "fsm", "executor"},
    "server": {"events", "fsm", "kernels", "executor", "replay", FRONT},
    FRONT: {"events", "fsm", "kernels", "executor", "replay"},
}
COMMAND_LINE = ("leftfold/cli.py", "leftfold/commands/")


def imports(source: str, package: str = "leftfold") -> list[tuple[int, str]]:
    """Line and dotted name of everything of ours that a module imports, wherever the statement stands."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative imports are not used here"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return [(line, name) for line, name in found if name.split(".")[0] == package]


def room_of(dotted: str) -> str:
    part = [*dotted.split("."), ""][1]
    return part if part in ALLOWED else FRONT


def breaches(room: str, source: str, path: str = "") -> list[str]:
    allowed = ALLOWED[room] | {room} | ({"server"} if path.startswith(COMMAND_LINE) else set())
    return [f"{path}:{line} imports {name}" for line, name in imports(source) if room_of(name) not in allowed]


def modules() -> list[tuple[str, Path]]:
    rooms = [(room, path) for room in ALLOWED if room != FRONT for path in (ROOT / room).rglob("*.py")]
    front = [(FRONT, path) for path in (ROOT / "leftfold").rglob("*.py")]
    own = [(room, path) for room, path in front if path.relative_to(ROOT).parts[1] not in ALLOWED]
    return sorted(rooms + own, key=lambda item: item[1])


def test_no_module_imports_a_room_it_may_not() -> None:
    found = [
        breach
        for room, path in modules()
        for breach in breaches(room, path.read_text(), path.relative_to(ROOT).as_posix())
    ]
    assert found == []


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("events", "import leftfold.fsm"),
        ("fsm", "from leftfold.executor.oracle import OracleExecutor"),
        ("fsm", "from leftfold import kernels"),
        ("executor", "def f():\n    from leftfold.fsm import State"),
        ("executor", "from leftfold import LLM"),
        ("kernels", "from leftfold.events import Plan"),
        ("replay", "from leftfold.kernels import registry"),
        ("replay", "from leftfold.cli import main"),
        (FRONT, "import leftfold.server.app"),
    ],
)
def test_a_planted_breach_is_found(room: str, source: str) -> None:
    assert breaches(room, source)


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("fsm", "from leftfold.events import Tick"),
        ("executor", "from leftfold.events import Plan\nfrom leftfold.kernels import registry\nimport torch"),
        ("server", "from leftfold.engine import Engine"),
        (FRONT, "from leftfold.replay import verify"),
    ],
)
def test_what_the_table_allows_passes(room: str, source: str) -> None:
    assert breaches(room, source) == []


def test_only_the_command_line_imports_the_server() -> None:
    source = "from leftfold.server.app import serve"
    assert breaches(FRONT, source, "leftfold/commands/serve.py") == []
    assert breaches(FRONT, source, "leftfold/engine.py")
    assert breaches("replay", source, "replay/show.py")
