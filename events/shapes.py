"""What the fields of records may hold: one check per field, made from the dataclasses' annotations at import.

Most fields must be of their annotated kind, whether they are read or written. The others are `JUDGED`: what a client or
an executor put there wrongly is answered by the reducer, so the log must hold and give back whatever it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from math import isfinite
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np

from leftfold.events.types import Admit, ForwardDone, SamplingParams, Tokens

Check = Callable[[Any], bool]

JUDGED: Mapping[type, Sequence[str]] = {
    SamplingParams: ("max_tokens", "min_tokens", "stop_token_ids", "n", "grammar", "processors"),
    Admit: ("prompt", "priority", "deadline", "queue_deadline", "cache", "media"),
    ForwardDone: ("tokens", "counts", "ended", "error"),
}
"""Fields that the reducer looks at itself."""

_LEAST, _MOST = -(1 << 63), (1 << 63) - 1
_INT = {int}
_PLAIN = {int, str, bool, NoneType}


class Layout:
    """The fields of one class of records, private ones and `t` left out.

    `fields`: name and default of each, in order. `reads`: what each field's value must pass, by name (None: anything).
    `writes`: name, default and check (None: anything) of each before it is written.
    """

    __slots__ = ("fields", "reads", "writes")

    def __init__(self, cls: type) -> None:
        public = [f for f in fields(cls) if not f.name.startswith("_") and f.name != "t"]
        self.fields: tuple[tuple[str, Any], ...] = tuple((f.name, f.default) for f in public)
        hints, judged = get_type_hints(cls), JUDGED.get(cls, ())
        exact = {name: _check_of(hints[name]) for name, _ in self.fields}
        if cls is SamplingParams:
            exact["seed"] = _either((_is_none, _is_seed))
        self.reads: dict[str, Check | None] = {name: None if name in judged else exact[name] for name in exact}
        writes = self.reads.copy()
        if cls is not ForwardDone:  # what an executor put there is told to nobody
            listed = [name for name, default in self.fields if default == ()]
            writes.update({name: _is_writable_list if name in listed else _is_writable for name in judged})
            writes.update({name: _is_writable_prompt for name in judged if hints[name] == Tokens})
        found = [(name, default, writes[name]) for name, default in self.fields]
        self.writes = tuple(found)
        if "t" in hints:
            self.reads["t"] = None  # looked at first of all


def is_integer(value: Any) -> bool:
    """Whether `value` is an integer of 64 bits (True and False are none)."""
    return type(value) is int and _LEAST <= value <= _MOST


def _is_seed(value: Any) -> bool:
    return type(value) is int and _LEAST <= value <= 2 * _MOST + 1


def _is_number(value: Any) -> bool:
    return is_integer(value) or (type(value) is float and isfinite(value))


def _is_none(value: Any) -> bool:
    return value is None


def _is_integers(value: Any) -> bool:
    if type(value) is np.ndarray:
        kind = value.dtype.kind
        return value.ndim == 1 and (kind == "i" or (kind == "u" and not (value > _MOST).any()))
    if type(value) is not list and type(value) is not tuple:
        return False
    return not value or (set(map(type, value)) == _INT and _LEAST <= min(value) and max(value) <= _MOST)


def _is_writable(value: Any) -> bool:
    """Whether a value reads back from JSON as exactly what it is."""
    kind = type(value)
    if kind in _PLAIN:
        return True
    if kind is float:
        return isfinite(value)
    if kind is list:
        return all(map(_is_writable, value))
    return kind is dict and all(type(key) is str and _is_writable(item) for key, item in value.items())


def _is_writable_list(value: Any) -> bool:
    """The same for a field that holds a list, which may be a tuple."""
    if type(value) is list or type(value) is tuple:
        return set(map(type, value)) <= _INT or all(map(_is_writable, value))
    return _is_writable(value)


def _is_writable_prompt(value: Any) -> bool:
    """The same for token ids, which may be an array, too."""
    return value.dtype.kind in "iu" if type(value) is np.ndarray else _is_writable_list(value)


def _of_type(*kinds: type) -> Check:
    if len(kinds) == 1:
        (only,) = kinds
        return lambda value: type(value) is only
    return lambda value: type(value) in kinds


def _either(checks: Sequence[Check]) -> Check:
    if len(checks) == 2 and _is_none in checks:
        (other,) = [check for check in checks if check is not _is_none]
        return lambda value: value is None or other(value)
    return lambda value: any(check(value) for check in checks)


def _sequence_of(check: Check | None) -> Check:
    if check is None:
        return _of_type(list, tuple)
    return lambda value: (type(value) is list or type(value) is tuple) and all(map(check, value))


def _mapping_of(key: Check, value: Check | None) -> Check:
    def check(found: Any) -> bool:
        if not isinstance(found, Mapping) or not all(map(key, found)):
            return False
        return value is None or all(map(value, found.values()))

    return check


def _row_of(cls: Any) -> Check:
    """A list of a named tuple's values; those with a default may be missing at its end."""
    hints = get_type_hints(cls)
    checks = [_check_of(hints[name]) for name in cls._fields]
    most, least = len(checks), len(checks) - len(cls._field_defaults)

    def check(row: Any) -> bool:
        if not isinstance(row, (list, tuple)) or not least <= len(row) <= most:
            return False
        for one, value in zip(checks, row, strict=False):
            if one is not None and not one(value):
                return False
        return True

    return check


_SIMPLE: Mapping[Any, Check] = {
    int: is_integer, float: _is_number, bool: _of_type(bool), str: _of_type(str), NoneType: _is_none,
    Sequence[int]: _is_integers,
}  # fmt: skip


def _is_array(hint: Any) -> bool:
    """Whether an annotation is one of arrays: `NDArray` names `ndarray` itself, or (numpy ≥ 2.5) is an alias of it."""
    origin = get_origin(hint)
    target = getattr(origin, "__value__", origin)
    return (get_origin(target) or target) is np.ndarray


def _check_of(hint: Any) -> Check | None:
    """The check of an annotation, None where it allows anything."""
    if hint is Any:
        return None
    if hint in _SIMPLE:
        return _SIMPLE[hint]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        checks = [_check_of(argument) for argument in arguments if not _is_array(argument)]
        known = [check for check in checks if check is not None]
        return None if len(known) < len(checks) else known[0] if len(known) == 1 else _either(known)
    if origin is Sequence:
        return _sequence_of(_check_of(arguments[0]))
    if origin is Mapping:
        key = _check_of(arguments[0])
        assert key is not None
        return _mapping_of(key, _check_of(arguments[1]))
    if isinstance(hint, type) and issubclass(hint, tuple):
        return _row_of(hint)
    assert isinstance(hint, type) and is_dataclass(hint), f"there is no check for {hint}"
    return _of_type(hint)


__all__ = ["JUDGED", "Check", "Layout", "is_integer"]
