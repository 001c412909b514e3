"""Two plans beside each other: the first field in which they differ, by the log's own words."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import orjson

from leftfold.events import Plan
from leftfold.events.codec import plan_json

_FIELDS = tuple(f.name for f in fields(Plan) if not f.name.startswith("_"))


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a replay leaves the log. `field`: of the plan ("plan": one side has none), "digest", or "fold".

    `expected` is what the log holds, `got` what the replay made of it. The two plans stand in `expected_plan` and
    `got_plan` as they would be logged (None: no plan).
    """

    seq: int
    field: str
    expected: Any
    got: Any
    expected_plan: dict[str, Any] | None = None
    got_plan: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """The four parts that name it."""
        return {"seq": self.seq, "field": self.field, "expected": self.expected, "got": self.got}

    def describe(self) -> str:
        """Some lines for a reader, both plans included."""
        lines = [f"divergence at seq {self.seq}, field {self.field}"]
        if self.expected_plan is None and self.got_plan is None:
            return "\n".join([*lines, f"  expected {self.expected}", f"  got      {self.got}"])
        for name, plan in (("expected", self.expected_plan), ("got", self.got_plan)):
            shown = "no plan" if plan is None else orjson.dumps(plan).decode()
            lines.append(f"  {name:8} {shown}")
        return "\n".join(lines)


def plan_dict(plan: Plan) -> dict[str, Any]:
    """A plan as its record holds it."""
    parsed: dict[str, Any] = orjson.loads(plan_json(plan))
    return parsed


def compare_plans(seq: int, logged: Plan, decided: Plan | None) -> Divergence | None:
    """None when both say the same."""
    if decided is not None and plan_json(logged) == plan_json(decided):
        return None
    expected = plan_dict(logged)
    if decided is None:
        return Divergence(seq, "plan", expected, None, expected, None)
    got = plan_dict(decided)
    for name in _FIELDS:
        if expected.get(name) != got.get(name):
            return Divergence(seq, name, expected.get(name), got.get(name), expected, got)
    return None


__all__ = ["Divergence", "compare_plans", "plan_dict"]
