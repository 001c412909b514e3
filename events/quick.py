"""Code written for a class of records at import, where a loop over its fields costs too much on every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from typing import Any, TypeVar

_Record = TypeVar("_Record", bound=type)


def quick(cls: _Record) -> _Record:
    """Give a frozen, keyword-only dataclass with slots a quicker `__init__` of the same signature.

    Its own sets each field through `object.__setattr__`. Here a record is filled as an instance of a plain class with
    the same slots, and becomes what it is when it is full.

    Raises `TypeError` for one that has default factories or does more than to set its fields.
    """
    made: Any = cls
    annotations = made.__init__.__annotations__
    known: Any = fields(made)
    if hasattr(cls, "__post_init__") or any(field.default_factory is not MISSING for field in known):
        raise TypeError(f"{cls.__name__} does more than to set its fields")
    scope: dict[str, Any] = {"frozen": cls, "swap": object.__setattr__}
    scope["plain"] = type(f"_{cls.__name__}", (), {"__slots__": [field.name for field in known]})
    parameters, settings = [], []
    for field in known:
        value = field.name if field.init else f"default_{field.name}"
        scope[f"default_{field.name}"] = field.default
        if field.init:
            parameters.append(field.name if field.default is MISSING else f"{field.name}=default_{field.name}")
        settings.append(f"    self.{field.name} = {value}")
    made.__init__ = init = _defined("__init__", scope, [
        f"def __init__(self, *, {', '.join(parameters)}):",
        "    swap(self, '__class__', plain)",
        *settings,
        "    self.__class__ = frozen",
    ])  # fmt: skip
    init.__qualname__, init.__annotations__ = f"{cls.__qualname__}.__init__", annotations
    return cls


def picker(fields: Sequence[tuple[str, Any]]) -> Callable[[Any], list[tuple[int, Any]]]:
    """What finds the fields of a record that are not at their defaults: index and value of each.

    `fields`: name and default of each. A value counts as the default only if it is the same object.
    """
    lines = ["def pick(record):", "    found = []"]
    for index, (name, _) in enumerate(fields):
        lines += [f"    value = record.{name}", f"    if value is not default_{index}:"]
        lines += [f"        found.append(({index}, value))"]
    scope = {f"default_{index}": default for index, (_, default) in enumerate(fields)}
    made: Callable[[Any], list[tuple[int, Any]]] = _defined("pick", scope, [*lines, "    return found"])
    return made


def _defined(name: str, scope: dict[str, Any], lines: Sequence[str]) -> Any:
    exec("\n".join(lines), scope)
    return scope[name]
