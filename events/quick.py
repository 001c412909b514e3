"""Code written for a class of records at import, where a loop over its fields costs too much on every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, NoReturn, TypeVar

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


def filler(
    fields: Sequence[tuple[str, Any, Callable[[Any], bool] | None]],
    is_default: Callable[[Any, Any], bool],
    refuse: Callable[[str, str, Any], NoReturn],
    writers: Mapping[type, Callable[[Any], Any]],
    seldom: Sequence[str] = (),
) -> Callable[[dict[str, Any], Any, str], None]:
    """What puts the fields of a record that are not at their defaults into a dictionary: `fill(out, record, where)`.

    `fields`: name, default and check of each. `refuse(where, name, value)` is called for what fails its check;
    `writers`: by the type of a default, what makes of a value what is put there, or None for nothing. `seldom`: names
    of fields that are nearly always at their defaults, and so are looked at all at once.
    """
    scope: dict[str, Any] = {"is_default": is_default, "refuse": refuse}
    lines = ["def fill(out, record, where):"]
    rare = {name: default for name, default, _ in fields if name in seldom}
    if rare:
        scope["as_ever"] = untouched(rare)
        often = [field for field in enumerate(fields) if field[1][0] not in rare]
        lines += ["    if as_ever(record):", *_indented(_filling(often, scope, writers)), "        return"]
    lines += _filling([*enumerate(fields)], scope, writers)
    made: Callable[[dict[str, Any], Any, str], None] = _defined("fill", scope, lines)
    return made


def untouched(defaults: Mapping[str, Any]) -> Callable[[Any], bool]:
    """Whether all of these fields of a record hold the very objects that are their defaults."""
    scope = {f"default{index}": default for index, default in enumerate(defaults.values())}
    test = " and ".join([f"record.{name} is default{index}" for index, name in enumerate(defaults)])
    made: Callable[[Any], bool] = _defined("as_ever", scope, ["def as_ever(record):", f"    return {test}"])
    return made


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _filling(
    fields: Sequence[tuple[int, tuple[str, Any, Callable[[Any], bool] | None]]],
    scope: dict[str, Any],
    writers: Mapping[type, Callable[[Any], Any]],
) -> list[str]:
    """The lines that put these fields, each with its number, into `out`; what they name goes into `scope`."""
    lines: list[str] = []
    for index, (name, default, check) in fields:
        kind = type(default)
        scope |= {f"default{index}": default, f"check{index}": check, f"kind{index}": kind}
        lines += [f"    value = record.{name}", f"    if value is not default{index}:"]
        if check is not None:
            lines += [f"        if not check{index}(value):", f"            refuse(where, '{name}', value)"]
        if kind in writers:
            scope[f"write{index}"] = writers[kind]
            lines += [f"        value = write{index}(value)", "        if value is not None:"]
        elif default is not MISSING:
            scalar = f"type(value) is not kind{index} or value != default{index}"
            listed = f"(type(value) is tuple and value) or not is_default(value, default{index})"
            lines += [f"        if {scalar if kind in _SCALARS else listed}:"]
        else:
            lines += ["        if True:"]
        lines += [f"            out['{name}'] = value"]
    return lines


_SCALARS = (int, float, bool, str, type(None))


def _defined(name: str, scope: dict[str, Any], lines: Sequence[str]) -> Any:
    exec("\n".join(lines), scope)
    return scope[name]
