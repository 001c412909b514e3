"""Old schemas: records as they were written become records as they are written now, one version at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from leftfold.events.framing import SCHEMA

Upcast = Callable[[dict[str, Any]], dict[str, Any]]

UPCASTS: dict[int, Upcast] = {}
"""By the schema that a record was written in: what makes it one of the next schema. There is one for each schema but
the newest; a new field with a default needs none, and no new schema.
"""


def upcast(raw: dict[str, Any], schema: int) -> dict[str, Any]:
    """A parsed record of `schema` as one of the newest; `seq`, `t` and `type` stay where they are."""
    for version in range(schema, SCHEMA):
        raw = UPCASTS[version](raw)
    return raw


def complete(upcasts: Mapping[int, Upcast], newest: int) -> bool:
    """Whether every schema before `newest` has its step."""
    return [*upcasts] == list(range(1, newest))


__all__ = ["UPCASTS", "complete", "upcast"]
