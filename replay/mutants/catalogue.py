"""The catalogue of planted faults: small patches of source, kept as text beside the tests (tests/mutants/*.toml).

A file is a class of mistakes, an entry one fault: `name`, `story` (what a user would meet), `file` (below the package),
`within` (the function or method that holds the place, as `name` or `Class.name`; left out: the whole file), `old` and
`new` (exact text; `old` stands there once), perhaps `case` (its number among the cases from the field) and `profile`
(of the fuzzer, where another than the usual one is needed).
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

PACKAGE = Path(__file__).parents[2]
"""Where the rooms are, links to folders in a checkout."""

PROFILE = "lite"
"""What the fuzzer is run with, unless an entry says otherwise."""


class CatalogueError(Exception):
    """No catalogue, an entry that is none, or one whose place is not there (any more)."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One planted fault. `kind`: the class of mistakes, which is the name of its file."""

    name: str
    kind: str
    story: str
    file: str
    old: str
    new: str
    within: str = ""
    case: str = ""
    profile: str = PROFILE

    @property
    def module(self) -> str:
        """The import name of the patched file."""
        return ".".join(("leftfold", *Path(self.file).with_suffix("").parts))

    def planted(self) -> str:
        """The source with the fault in it. Raises `CatalogueError` when its place is not there exactly once."""
        path = PACKAGE / self.file
        try:
            source = path.read_text()
        except OSError as error:
            raise CatalogueError(f"mutant {self.name}: cannot read {path}: {error.strerror}") from error
        begin, end = self._span(source) if self.within else (0, len(source))
        found = source.count(self.old, begin, end)
        if found != 1:
            where = f"{self.file}, {self.within}" if self.within else self.file
            raise CatalogueError(f"mutant {self.name}: {self.old!r} stands {found} times in {where}, expected once")
        at = source.index(self.old, begin, end)
        return source[:at] + self.new + source[at + len(self.old) :]

    def _span(self, source: str) -> tuple[int, int]:
        """Where `within` begins and ends, in characters."""
        body: Sequence[ast.stmt] = ast.parse(source).body
        found: ast.stmt | None = None
        for part in self.within.split("."):
            found = next((node for node in body if getattr(node, "name", None) == part), None)
            if found is None:
                raise CatalogueError(f"mutant {self.name}: there is no {self.within} in {self.file}")
            body = getattr(found, "body", ())
        assert found is not None and found.end_lineno is not None
        lines = source.splitlines(keepends=True)
        return sum(map(len, lines[: found.lineno - 1])), sum(map(len, lines[: found.end_lineno]))


def home() -> Path:
    """Where the catalogue lies in a checkout. Raises `CatalogueError` where the package was installed without it."""
    folder = PACKAGE.resolve().parent / "tests" / "mutants"
    if not any(folder.glob("*.toml")):
        raise CatalogueError(f"there is no catalogue of mutants at {folder}: it comes with the sources, not installed")
    return folder


def read(folder: Path) -> list[Mutant]:
    """All entries, file by file in the order of their names. Raises `CatalogueError`."""
    mutants: list[Mutant] = []
    for path in sorted(folder.glob("*.toml")):
        try:
            entries = tomllib.loads(path.read_text())["mutant"]
            mutants += [Mutant(kind=path.stem, **entry) for entry in entries]
        except (KeyError, TypeError, tomllib.TOMLDecodeError) as error:
            raise CatalogueError(f"{path} is no catalogue of mutants: {error}") from error
    names = [mutant.name for mutant in mutants]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise CatalogueError(f"mutants {', '.join(twice)} stand twice in {folder}")
    return mutants


def chosen(mutants: Sequence[Mutant], patterns: Sequence[str]) -> list[Mutant]:
    """Those whose name or kind fits one of the patterns (as of a shell). Raises `CatalogueError` for one without."""
    for pattern in patterns:
        if not any(_fits(mutant, pattern) for mutant in mutants):
            raise CatalogueError(f"no mutant is called {pattern!r}")
    return [mutant for mutant in mutants if any(_fits(mutant, pattern) for pattern in patterns)]


def _fits(mutant: Mutant, pattern: str) -> bool:
    return fnmatchcase(mutant.name, pattern) or mutant.kind == pattern
