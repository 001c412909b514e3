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
        """Some lines for a reader, both plans side by side, field by field."""
        title = f"divergence at seq {self.seq}, field {self.field}"
        if self.expected_plan is None and self.got_plan is None:
            return "\n".join([title, f"  expected {self.expected}", f"  got      {self.got}"])
        rows = [("", "expected (logged)", "got (decided anew)")]
        for name in _FIELDS:
            left, right = _cell(self.expected_plan, name), _cell(self.got_plan, name)
            if left or right:
                rows.append((name if left == right else f"* {name}", left, right))
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines = [f"  {name:>{widths[0]}}  {left:{widths[1]}}  {right}" for name, left, right in rows]
        return "\n".join([title, *(line.rstrip() for line in lines)])


def _cell(plan: dict[str, Any] | None, name: str) -> str:
    """A field as it is logged, nothing where it is at its default."""
    if plan is None:
        return "no plan" if name == "step" else ""
    return orjson.dumps(plan[name]).decode() if name in plan else ""


def plan_dict(plan: Plan) -> dict[str, Any]:
    """A plan as its record holds it."""
    parsed: dict[str, Any] = orjson.loads(plan_json(plan))
    return parsed


def compare_plans(seq: int, logged: Plan, decided: Plan | None) -> Divergence | None:
    """None when both say the same."""
    if decided is not None and plan_json(logged) == plan_json(decided):
        return None
    return compare_records(seq, plan_dict(logged), None if decided is None else plan_dict(decided))


def compare_records(seq: int, expected: dict[str, Any], got: dict[str, Any] | None) -> Divergence | None:
    """The same for plans as their records hold them."""
    if got is None:
        return Divergence(seq, "plan", expected, None, expected, None)
    for name in _FIELDS:
        if expected.get(name) != got.get(name):
            return Divergence(seq, name, expected.get(name), got.get(name), expected, got)
    return None


__all__ = ["Divergence", "compare_plans", "compare_records", "plan_dict"]
