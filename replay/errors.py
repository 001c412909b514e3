"""What a replay can run into: a log that cannot be folded, and a record the reducer cannot take."""

from __future__ import annotations

from leftfold.events import Event


class ReplayError(Exception):
    """A log that cannot be replayed; the message says which record and why."""


class NotStarted(ReplayError):
    """A record before any `Started`: nothing says with which limits to fold it."""


class UnknownPolicy(NotStarted):
    """A policy of a user's own that nobody has made known. `where`: what was made with it."""

    def __init__(self, where: str, policy: str) -> None:
        super().__init__(f"{where} has the policy {policy!r}, a user's own: --allow-policy {policy} loads it")


class SettingsError(ReplayError):
    """Settings to re-decide with that make no usable config."""


class ReducerFault(ReplayError):
    """`step` or `decide` raised, which only a programmer's error does. `seq`: the record that showed it."""

    def __init__(self, seq: int, event: Event | None, cause: BaseException) -> None:
        what = "a decision after" if event is None else f"{type(event).__name__} at"
        super().__init__(f"the reducer failed on {what} seq {seq}: {type(cause).__name__}: {cause}")
        self.seq = seq
        self.cause = cause
