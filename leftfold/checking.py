"""What an option may be, told beside its field and checked in one place: its type, its range, its words."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import types
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, Union, get_args, get_origin, get_type_hints

from leftfold.errors import ConfigurationError

MOST = 1 << 48
"""Counts and sizes stay far from where 64 bits end."""
MOST_SECONDS = 10**9
_TYPES = {int: "a whole number", float: "a number", bool: "True or False", str: "text"}


class Rule(Protocol):
    """What a value of the right type must be beyond that."""

    def holds(self, value: Any) -> bool:
        """Whether it is."""

    def __str__(self) -> str:
        """As it stands in a message, after "give"."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number in a range, both ends included."""

    least: int = 1
    most: int = MOST

    def holds(self, value: int) -> bool:
        return self.least <= value <= self.most

    def __str__(self) -> str:
        return f"a whole number from {self.least} to {self.most}"


@dataclass(frozen=True, slots=True)
class Threads:
    """A number of threads that this machine can run beside everything else."""

    def holds(self, value: int) -> bool:
        return 1 <= value <= most_threads()

    def __str__(self) -> str:
        return f"a whole number from 1 to {most_threads()} (this machine has {_processors()})"


@dataclass(frozen=True, slots=True)
class Seconds:
    """A time, fractions allowed."""

    def holds(self, value: float) -> bool:
        return 0 <= value < MOST_SECONDS

    def __str__(self) -> str:
        return f"a number of seconds from 0 to {MOST_SECONDS}"


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of some words."""

    words: tuple[str, ...]

    def holds(self, value: str) -> bool:
        return value in self.words

    def __str__(self) -> str:
        return f"one of {', '.join(self.words)}"


@dataclass(frozen=True, slots=True)
class Named:
    """A name or a place; an empty one would be the folder we are in."""

    def holds(self, value: str) -> bool:
        return bool(value.strip())

    def __str__(self) -> str:
        return "a name that is not empty"


@dataclass(frozen=True, slots=True)
class Functions:
    """Functions by their names."""

    def holds(self, value: list[Any]) -> bool:
        return all(isinstance(name, str) and ":" in name for name in value)

    def __str__(self) -> str:
        return "a list of module:function"


def most_threads() -> int:
    """Four for each processor, and 64 anywhere. Beyond that they only wait for each other, and soon none can begin."""
    return max(64, 4 * (os.cpu_count() or 1))


def _processors() -> str:
    count = os.cpu_count() or 1
    return f"{count} processor{'s' if count > 1 else ''}"


def check(options: Any) -> None:
    """Looks at every field of a dataclass. Raises ConfigurationError that names field and value, and what it may be.

    The annotations decide: a type or several, and within `Annotated` rules such as `Whole(1)`. None is exempt from
    them. A whole number will do for a float; True and False are no numbers.
    """
    for name, (kinds, rules) in _fields(type(options)).items():
        value = getattr(options, name)
        fits = isinstance(value, kinds) or (isinstance(value, int) and float in kinds)
        fits = fits and (not isinstance(value, bool) or bool in kinds)
        if fits and (value is None or all(rule.holds(value) for rule in rules)):
            if not isinstance(value, float) or math.isfinite(value):
                continue
        allowed = [str(rule) for rule in rules] or [_TYPES[kind] for kind in kinds if kind in _TYPES]
        told = type(value).__name__ if name.endswith("_key") else short(value)  # a key is shown to nobody
        raise ConfigurationError(f"{name} is {told}: give {' or '.join(allowed)}")


@functools.cache
def _fields(kind: type) -> dict[str, tuple[tuple[type, ...], tuple[Rule, ...]]]:
    """Types and rules of every field."""
    hints, found = get_type_hints(kind, include_extras=True), {}
    for field in dataclasses.fields(kind):
        hint, rules = hints[field.name], ()
        if get_origin(hint) is Annotated:
            hint, *rules = get_args(hint)
        kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        found[field.name] = (tuple([get_origin(kind) or kind for kind in kinds]), tuple(rules))
    return found


def short(value: Any) -> str:
    """A value as it stands in a message: in one line that is not long."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no numbers of thousands of digits
        return "a number of thousands of digits"
    text = " ".join(text.split()) if "\n" in text else text
    return text if len(text) <= 80 else text[:79] + "…"


__all__ = [
    "Functions", "MOST", "MOST_SECONDS", "Named", "OneOf", "Seconds", "Threads", "Whole", "check", "most_threads",
    "short",
]  # fmt: skip
