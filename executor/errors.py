"""What can go wrong in an executor."""

from __future__ import annotations


class ExecutorError(Exception):
    """Root of this room's errors."""


class ModelError(ExecutorError):
    """A model that cannot be read or is of a kind that is not supported."""


class PlanError(ExecutorError):
    """A plan that does not fit the mirrors: a fault of whoever made it, so trying again is of no use."""


class RowError(ExecutorError):
    """A step failed because of some of its rows: `rows` are indices into the plan's rows."""

    def __init__(self, text: str, rows: tuple[int, ...]) -> None:
        super().__init__(text)
        self.rows = rows


class CostError(ExecutorError):
    """Figures that make no cost model; the message says why."""
