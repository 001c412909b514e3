"""Limits of a rendering: turns, characters made, seconds; and string operations that look at their size beforehand.

Every intercepted operation is short by itself, so that the time limit holds without any help from outside.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from leftfold.text.errors import TemplateError

MAX_TEXT_CHARS = 8 * 1024 * 1024
MAX_MADE_CHARS = 1024 * 1024 * 1024
"""All strings that one rendering makes, together."""
MAX_ITEMS = 1_000_000
"""Values in a list or mapping, those inside of them counted as often as they appear."""
MAX_INT_BITS = 4096
MAX_TURNS = 100_000
MAX_SECONDS = 10.0
MAX_WIDTH = 1000


class _Meter:
    def __init__(self, seconds: float) -> None:
        self.turns = MAX_TURNS
        self.chars = MAX_MADE_CHARS
        self.end = time.monotonic() + seconds


_METER: ContextVar[_Meter | None] = ContextVar("meter", default=None)


@contextmanager
def metered(seconds: float) -> Any:
    """What is rendered inside burns one allowance."""
    token = _METER.set(_Meter(seconds))
    try:
        yield
    finally:
        _METER.reset(token)


def too_large(what: str) -> TemplateError:
    return TemplateError(f"the chat template goes beyond its limits: {what}")


def burn() -> str:
    """One turn of a loop, or one call of a macro."""
    meter = _METER.get()
    if meter is not None:
        meter.turns -= 1
        if meter.turns < 0:
            raise too_large(f"more than {MAX_TURNS} turns of loops")
        _on_time(meter)
    return ""


def _on_time(meter: _Meter) -> None:
    if time.monotonic() >= meter.end:
        raise too_large("it takes too long")


def checked(value: Any) -> Any:
    """`value`, unless it is larger than a template may make or show."""
    meter = _METER.get()
    if meter is not None:
        _on_time(meter)
    if isinstance(value, str | bytes):
        if len(value) > MAX_TEXT_CHARS:
            raise too_large(f"a text of more than {MAX_TEXT_CHARS} characters")
        if meter is not None:
            meter.chars -= len(value)
            if meter.chars < 0:
                raise too_large(f"it makes more than {MAX_MADE_CHARS} characters in all")
    elif isinstance(value, int):
        if value.bit_length() > MAX_INT_BITS:
            raise too_large(f"a number of more than {MAX_INT_BITS} bits")
    elif isinstance(value, list | tuple | Mapping):
        weigh(value)
    return value


def weigh(*values: Any) -> int:
    """The characters that `values` have when they are shown, roughly; raises TemplateError when they are too many."""
    chars, items = 0, 0
    waiting: list[Iterable[Any]] = [iter(values)]
    while waiting:
        for value in waiting[-1]:
            items += 1
            if isinstance(value, str | bytes):
                chars += len(value)
            elif isinstance(value, int):
                chars += 20 + value.bit_length() // 3
            elif isinstance(value, Mapping):
                waiting.append(iter([*value, *value.values()]))
                break
            elif isinstance(value, list | tuple | set | frozenset):
                waiting.append(iter(value))
                break
            else:
                chars += 20
        else:
            waiting.pop()
        if items > MAX_ITEMS or chars > 2 * MAX_TEXT_CHARS or len(waiting) > 200:
            raise too_large("a value with too much in it")
    return chars


def product(left: Any, right: Any) -> None:
    """Raises TemplateError if `left * right` were too large."""
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > MAX_INT_BITS:
            raise too_large(f"a number of more than {MAX_INT_BITS} bits")
    for value, times in ((left, right), (right, left)):
        if isinstance(times, int) and isinstance(value, str | bytes | list | tuple):
            if times > 0 and len(value) * times > 100_000:
                raise too_large("a repetition that long")


def power(left: Any, right: Any) -> None:
    """Raises TemplateError if `left ** right` were too large."""
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > MAX_INT_BITS:
        raise too_large(f"a number of more than {MAX_INT_BITS} bits")


def narrow(spec: str) -> None:
    """Raises TemplateError if a format specification pads beyond `MAX_WIDTH`."""
    if any(int(digits) > MAX_WIDTH for digits in re.findall(r"\d{4,12}", spec)):
        raise too_large("a format that wide")


def percent(template: str, values: Any) -> None:
    """Raises TemplateError if `template % values` could be too long."""
    fields = 0
    at = template.find("%")
    while at >= 0:
        at = _skip_key(template, at + 1)
        match = re.compile(r"[-#0 +]*(\*|\d*)(?:\.(\*|\d*))?").match(template, at)
        assert match is not None  # it matches nothing as well
        for width in match.groups(default=""):
            if width == "*" or len(width) > 4 or int(width or 0) > MAX_WIDTH:
                raise too_large("a format that wide")
        fields += 1
        at = template.find("%", match.end() + 1)
    if fields * weigh(values) > MAX_TEXT_CHARS:
        raise too_large("a format of that many values")


def _skip_key(template: str, at: int) -> int:
    """Past the `(key)` of a field, whose parentheses may be nested."""
    depth = 0
    while template[at : at + 1] == "(" or depth:
        if at >= len(template):
            break
        depth += {"(": 1, ")": -1}.get(template[at], 0)
        at += 1
    return at


def replaced(text: str, old: str, new: str, count: int = -1) -> str:
    """`text.replace(old, new, count)`, unless it would be too long."""
    times = text.count(old)
    times = min(times, count) if count >= 0 else times
    if len(text) + times * (len(new) - len(old)) > MAX_TEXT_CHARS:
        raise too_large("a replacement that long")
    return text.replace(old, new, count)


def joined(separator: str, parts: Iterable[Any]) -> str:
    """`separator.join(parts)`, of any values, unless it would be too long."""
    texts: list[str] = []
    size = 0
    for part in parts:
        weigh(part)
        texts.append(str(part))
        size += len(texts[-1]) + len(separator)
        if size > MAX_TEXT_CHARS + len(separator) or len(texts) > MAX_ITEMS:
            raise too_large("a joined text that long")
    return str(checked(separator.join(texts)))


def _padded(text: str, width: Any, *rest: Any) -> None:
    if int(width) > max(MAX_WIDTH, len(text)):
        raise too_large("a padding that wide")


def _expanded(text: str, tabsize: Any = 8) -> None:
    if int(tabsize) > MAX_WIDTH or text.count("\t") * max(int(tabsize), 1) > MAX_TEXT_CHARS:
        raise too_large("tabs that wide")


def _translated(text: str, table: Any) -> None:
    raise TemplateError("the chat template uses str.translate, which it may not")


METHOD_CHECKS: Mapping[str, Callable[..., None]] = {
    "ljust": _padded,
    "rjust": _padded,
    "center": _padded,
    "zfill": _padded,
    "expandtabs": _expanded,
    "translate": _translated,
}
"""Called with a string and a method's arguments before the method is."""

METHODS: Mapping[str, Callable[..., str]] = {"replace": replaced, "join": joined}
"""Called instead of a string's method."""
