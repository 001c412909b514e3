"""The scheduler as machine code, where this very source has been compiled (`leftfold compile`); else it is interpreted.

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
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from zlib import crc32

from leftfold.cache import cache_root

ROOMS = ("events", "executor", "fsm", "replay", "replay/fuzzing")
"""Folders of what is compiled, and of what that takes its types from."""

_FSM = (
    "admitting", "audit", "check", "columns", "commit", "draft", "ending", "few", "laws", "lifecycle", "line", "pages",
    "planner", "prefix", "queue", "reducer", "request", "room", "rows", "seating", "sketch", "state", "validity",
)  # fmt: skip
"""What every step goes through. What is at the edge stays interpreted: what clients and operators give may be of any
type, and is refused there in words.
"""
_FUZZING = ("audience", "clients", "core", "device", "durable", "provenance", "turns", "world")

MODULES = (
    "leftfold.executor.oracle",
    *[f"leftfold.fsm.{name}" for name in _FSM],
    *[f"leftfold.replay.fuzzing.{name}" for name in _FUZZING],
)

GROUP = "leftfold_compiled"
LIBRARY = f"{GROUP}__mypyc"
"""Holds the code of all modules, which are thin beside it."""

MANIFEST = "manifest"
"""In a folder of machine code: names, sizes and checksums of its files. Written last."""

OFF = ("off", "no", "false", "0")


def folder(source: Path | None = None) -> Path:
    """Where the machine code of a source is kept (None: this one), in `$LEFTFOLD_CACHE` or `~/.cache/leftfold`.

    It is named by a hash of all that the code depends on. Raises `OSError` or `RuntimeError` where there is none.
    """
    return cache_root() / "compiled" / _digest(source or Path(__file__).parent)


def sources(package: Path) -> list[Path]:
    """All files that what is compiled depends on."""
    return [file for room in ROOMS for file in sorted((package / room).glob("[!.]*.py"))]


def _digest(package: Path) -> str:
    digest = hashlib.sha256(f"{sys.version} {os.uname().machine} {EXTENSION_SUFFIXES[0]} {MODULES}".encode())
    for file in sources(package):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(package)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def file_of(module: str, place: Path) -> Path:
    """The file of a module's machine code in `place`."""
    return place.joinpath(*module.split(".")).with_name(module.rpartition(".")[2] + EXTENSION_SUFFIXES[0])


def files(place: Path) -> dict[str, Path]:
    """The file of each module in `place`."""
    return {name: file_of(name, place) for name in (LIBRARY, *MODULES)}


def manifest(place: Path) -> str:
    """What the manifest of what is in `place` says. Raises `OSError` where a file is missing."""
    contents = {name: file.read_bytes() for name, file in files(place).items()}
    return "".join([f"{name} {len(content)} {crc32(content):08x}\n" for name, content in contents.items()])


def is_whole(place: Path) -> bool:
    """Whether machine code is there, all of it."""
    try:
        return place.joinpath(MANIFEST).read_text() == manifest(place)
    except (OSError, UnicodeDecodeError):
        return False


class Finder(MetaPathFinder):
    """Finds compiled modules; looks for machine code when the first of them is imported."""

    def __init__(self) -> None:
        self._files: dict[str, Path] | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in MODULES and fullname != LIBRARY:
            return None
        if self._files is None:
            self._files = {}
            self._files = _found()
        file = self._files.get(fullname)
        return None if file is None else spec_from_file_location(fullname, file)


def _found() -> dict[str, Path]:
    """The files of the machine code of this source; none if it is not there, or cannot be loaded on this machine."""
    try:
        place = folder()
        if not is_whole(place):
            return {}
        found = files(place)
        library = spec_from_file_location(LIBRARY, found[LIBRARY])
        assert library is not None
        sys.modules[LIBRARY] = module_from_spec(library)
    except (OSError, RuntimeError):  # no home, or a cache that cannot be read
        return {}
    except ImportError as error:
        print(f"leftfold: interpreted, since the machine code cannot be loaded: {error}", file=sys.stderr)
        return {}
    return found


def use() -> None:
    """From now on import machine code, if there is some. Modules that are imported already stay as they are."""
    if os.environ.get("LEFTFOLD_COMPILED", "on").lower() not in OFF:
        sys.meta_path.insert(0, Finder())


def in_use() -> bool:
    """Whether the scheduler runs as machine code in this process."""
    from leftfold.fsm import reducer

    return not str(reducer.__file__).endswith(".py")
