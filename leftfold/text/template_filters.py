"""The filters of chat templates: Jinja's, without those that make much of little, each looking at what it gets."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jinja2 import pass_environment
from jinja2.filters import FILTERS, do_indent, make_attrgetter
from jinja2.tests import TESTS

from leftfold.text.template_limits import MAX_WIDTH, checked, joined, percent, replaced, too_large, weigh

_LEFT_OUT = {"batch", "filesizeformat", "pprint", "random", "slice", "urlize", "wordwrap", "xmlattr"}


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    separators = options.get("separators")
    sort_keys = bool(options.get("sort_keys", False))
    if indent is not None and not (isinstance(indent, int) and 0 <= indent <= 16):
        raise too_large("an indentation that wide")
    if separators is not None and any(len(separator) > 16 for separator in separators):
        raise too_large("separators that long")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _center(value: Any, width: int = 80) -> str:
    return str(value).center(min(int(width), MAX_WIDTH))


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    size = len(width) if isinstance(width, str) else int(width)
    if size > MAX_WIDTH:
        raise too_large("an indentation that wide")
    text = str(text)
    replaced(text, "\n", " " * (size + 1))
    return do_indent(text, width, first, blank)


def _format(template: Any, *args: Any, **kwargs: Any) -> str:
    template = str(template)
    percent(template, kwargs or args)
    return template % (kwargs or args)


def _replace(text: Any, old: Any, new: Any, count: int | None = None) -> str:
    return replaced(str(text), str(old), str(new), -1 if count is None else int(count))


@pass_environment
def _join(environment: Any, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    parts = map(make_attrgetter(environment, attribute), value) if attribute is not None else value
    return joined(str(d), parts)


_OWN: Mapping[str, Callable[..., Any]] = {
    "tojson": _tojson,
    "center": _center,
    "indent": _indent,
    "format": _format,
    "replace": _replace,
    "join": _join,
}


def _wary(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which may turn its arguments into text or compare them: neither they nor the result are too large."""

    passed = int(hasattr(function, "jinja_pass_arg"))  # then Jinja's own object comes first

    @functools.wraps(function)  # along with that mark
    def wary(*args: Any, **kwargs: Any) -> Any:
        weigh(*args[passed:], *kwargs.values())
        return checked(function(*args, **kwargs))

    return wary


def wary_filters() -> dict[str, Callable[..., Any]]:
    """By name."""
    return {name: _wary(function) for name, function in {**FILTERS, **_OWN}.items() if name not in _LEFT_OUT}


def wary_tests() -> dict[str, Callable[..., Any]]:
    """Jinja's tests, by name."""
    return {name: _wary(function) for name, function in TESTS.items()}
