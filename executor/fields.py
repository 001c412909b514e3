"""Typed reading of a model's configuration, which anybody may have written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from leftfold.executor.errors import ModelError

MOST = 1 << 24
"""No size of a model comes near; and numbers lie between 1e-12 and 1e12, or single precision overflows."""


class Fields:
    """Fields of a configuration by name; null means absent. `where`: what messages call it.

    Each getter returns `default` for an absent field and raises `ModelError`, with field and value, for a field of
    another kind, and for an absent one without a default.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self._where = where

    def count(self, key: str, default: int | None = None, *, least: int = 1, most: int = MOST) -> int:
        """A whole number from `least` to `most`."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._wrong(key, value, f"a whole number from {least} to {most}")
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 1e-12 <= value <= 1e12:
            raise self._wrong(key, value, "a number above 0 and of sensible size")
        return float(value)

    def flag(self, key: str) -> bool:
        """True or false; absent means false."""
        value = self._get(key, False)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings; absent means none."""
        value = self._get(key, ())
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, value, "a list of strings")
        return tuple(value)

    def ids(self, key: str) -> tuple[int, ...]:
        """A token id, or a list of them; absent means none."""
        value = self._get(key, ())
        ids = value if isinstance(value, list | tuple) else (value,)
        if not all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item < MOST for item in ids):
            raise self._wrong(key, value, "a token id or a list of them")
        return tuple(int(item) for item in ids)

    def part(self, key: str) -> Fields | None:
        """An object with fields of its own; None if absent or empty."""
        value = self._get(key, {})
        if not isinstance(value, Mapping):
            raise self._wrong(key, value, "an object")
        return Fields(value, f"{self._where}: {key}") if value else None

    def _get(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        if value is None and default is None:
            raise ModelError(f"{self._where} lacks {key!r}")
        return default if value is None else value

    def _wrong(self, key: str, value: Any, expected: str) -> ModelError:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else f"{shown[:77]}…"
        return ModelError(f"{self._where} has {key} = {shown}; it must be {expected}")
