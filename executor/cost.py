"""What a step costs: its work in a few numbers, and a model of the time that such work takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from leftfold.executor.errors import CostError


class Work(NamedTuple):
    """The work of one step. `rows`: rows that decode one token; `context`: positions that these read, all together.

    `chunks`: rows that compute a chunk of their prompt; `tokens`: positions of all chunks; `reach`: positions that
    these read, summed over the chunks' tokens (attention's part of prefill).
    """

    rows: int = 0
    context: int = 0
    chunks: int = 0
    tokens: int = 0
    reach: int = 0

    def chunk(self, start: int, length: int) -> Work:
        """This work and a chunk of `length` positions from `start` on."""
        reach = length * start + length * (length + 1) // 2
        return Work(self.rows, self.context, self.chunks + 1, self.tokens + length, self.reach + reach)


HINGES = (16, 64, 256, 512)
"""Counts of input tokens from which each more may cost more: a device computes a few at the price of one."""

FEATURES = ("step", "row", "context", "chunk", "token", "reach", *(f"input_over_{count}" for count in HINGES))


def features(work: Work) -> tuple[int, ...]:
    """What a step's time is a weighted sum of, in the order of `FEATURES`."""
    inputs = work.rows + work.tokens
    over = [inputs - count if inputs > count else 0 for count in HINGES]
    return (1, work.rows, work.context, work.chunks, work.tokens, work.reach, *over)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Microseconds for each unit of each feature (`FEATURES`; what is absent costs nothing).

    `source`: where the figures come from, for whoever reads a result. `quality`: how well they fit that. Raises
    `CostError` for figures that make no model.
    """

    microseconds: Mapping[str, float]
    source: str
    quality: Mapping[str, Any] = field(default_factory=dict)
    _weights: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, value in self.microseconds.items():
            if name not in FEATURES:
                raise CostError(f"cost of {name!r}: no such feature; there are {', '.join(FEATURES)}")
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e12:
                raise CostError(f"cost of {name!r} is {value!r}, it must be microseconds of at least 0")
        weights = tuple(float(self.microseconds.get(name, 0.0)) for name in FEATURES)
        if not any(weights):
            raise CostError("a cost model in which nothing takes any time")
        object.__setattr__(self, "_weights", weights)

    def micros(self, work: Work) -> int:
        """Whole microseconds that a step with this work takes, 1 at least."""
        spent = 0.0
        for weight, count in zip(self._weights, features(work), strict=True):
            spent += weight * count
        return max(1, round(spent))

    def as_dict(self) -> dict[str, Any]:
        """As a file holds it."""
        return {"microseconds": dict(self.microseconds), "source": self.source, "quality": dict(self.quality)}

    @classmethod
    def from_dict(cls, raw: Any) -> CostModel:
        """From what `as_dict` gave. Raises `CostError`."""
        if not isinstance(raw, dict) or not isinstance(raw.get("microseconds"), dict):
            raise CostError('a cost model is an object with "microseconds" by feature')
        return cls(raw["microseconds"], str(raw.get("source", "")), raw.get("quality") or {})

    @classmethod
    def load(cls, path: str | Path) -> CostModel:
        """From a JSON file. Raises `CostError`."""
        try:
            return cls.from_dict(json.loads(Path(path).read_text()))
        except (OSError, ValueError) as error:
            raise CostError(f"the cost model {path} cannot be read: {error}") from error


__all__ = ["CostModel", "FEATURES", "HINGES", "Work", "features"]
