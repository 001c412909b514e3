"""Frozen records that are made on every step, at the price of ordinary ones.

The `__init__` of a frozen dataclass sets each field through `object.__setattr__`. Here a record is filled as an
instance of a plain class with the same slots, and becomes what it is when it is full.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any, TypeVar

_Record = TypeVar("_Record", bound=type)


def quick(cls: _Record) -> _Record:
    """Give a frozen, keyword-only dataclass with slots a quicker `__init__` of the same signature.

    Raises `TypeError` for one that has default factories or does more than to set its fields.
    """
    made: Any = cls
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
    lines = [
        f"def __init__(self, *, {', '.join(parameters)}):",
        "    swap(self, '__class__', plain)",
        *settings,
        "    self.__class__ = frozen",
    ]
    exec("\n".join(lines), scope)
    init = scope["__init__"]
    init.__qualname__, init.__annotations__ = f"{cls.__qualname__}.__init__", made.__init__.__annotations__
    made.__init__ = init
    return cls
