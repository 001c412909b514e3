"""`fsm/` as machine code, where this very source has been compiled (`leftfold compile`); else it is interpreted.

Both are one source: the same events fold to the same states, and the same plans are decided. What is compiled refuses
values that are not of the types written down, and nothing in it can be replaced at run time, so whoever plants faults
or looks inside sets `LEFTFOLD_COMPILED=off`.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

ROOMS = ("events", "fsm")
"""What is compiled, and what that takes its types from."""

MODULES = (
    "admitting", "audit", "check", "columns", "commit", "draft", "ending", "few", "laws", "lifecycle", "line", "pages",
    "planner", "prefix", "queue", "reducer", "request", "room", "rows", "seating", "sketch", "state", "validity",
)  # fmt: skip
"""Modules of `fsm/` that every step goes through. Those at the edge stay interpreted: what clients and operators give
may be of any type, and is refused there in words.
"""

GROUP = "leftfold_fsm"
LIBRARY = f"{GROUP}__mypyc"
"""Holds the code of all modules, which are thin beside it."""


def wanted() -> bool:
    """Whether machine code may be used."""
    return os.environ.get("LEFTFOLD_COMPILED", "on") != "off"


def folder() -> Path:
    """Where the machine code of this source, for this Python, is kept: in `$LEFTFOLD_CACHE`, or `~/.cache/leftfold`."""
    named = os.environ.get("LEFTFOLD_CACHE")
    root = Path(named).expanduser() if named else Path.home() / ".cache" / "leftfold"
    return root / "compiled" / _digest()


def sources() -> list[Path]:
    """All files that what is compiled depends on."""
    here = Path(__file__).parent
    return [file for room in ROOMS for file in sorted((here / room).glob("*.py"))]


def _digest() -> str:
    digest = hashlib.sha256(f"{sys.version} {EXTENSION_SUFFIXES[0]} {MODULES}".encode())
    for file in sources():
        digest.update(b"\0".join((file.parent.name.encode(), file.name.encode(), file.read_bytes())))
    return digest.hexdigest()[:16]


def file_of(module: str, place: Path) -> Path:
    """The file of a module's machine code in `place`."""
    return place.joinpath(*module.split(".")).with_name(module.rpartition(".")[2] + EXTENSION_SUFFIXES[0])


class Finder(MetaPathFinder):
    """Finds modules that are compiled in `place`."""

    def __init__(self, place: Path) -> None:
        self._files = {LIBRARY: file_of(LIBRARY, place)}
        for name in MODULES:
            module = f"leftfold.fsm.{name}"
            self._files[module] = file_of(module, place)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = self._files.get(fullname)
        return None if file is None else spec_from_file_location(fullname, file)


def use() -> None:
    """From now on import machine code, if there is some. Modules that are imported already stay as they are."""
    if not wanted():
        return
    try:
        place = folder()
        if not place.is_dir():
            return
    except (OSError, RuntimeError):  # no home, or a cache that cannot be read
        return
    sys.meta_path.insert(0, Finder(place))


def in_use() -> bool:
    """Whether `fsm/` runs as machine code in this process."""
    from leftfold.fsm import reducer

    return not str(reducer.__file__).endswith(".py")
