"""Errors of the reducer: all of them are programmers' errors, never a client's."""

from __future__ import annotations


class InvariantViolation(AssertionError):
    """A state that must not be; the message says which invariant and where."""


class SnapshotInvalid(ValueError):
    """Plain data that is no state; the message says what is missing or wrong in it."""


class PlanRefused(ValueError):
    """A plan that this state cannot apply; the state is unchanged. The message names field and value."""
