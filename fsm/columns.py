"""What changes every step, as int64 columns indexed by slot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from leftfold.events.plan import IntArray

WATCHED = 1 << 18
"""Stop ids below this are watched by column; a request with a larger one is looked at every step."""


ONE = np.array(1)
"""Adds to a column in half the time that a Python integer takes."""

_COLUMNS = ("computed", "planned", "limit", "runway", "base", "alarm", "last")


class Columns:
    """One entry per slot; an entry means nothing while its slot is free.

    `computed`: positions whose K/V is written and committed. `planned`: those, and what steps in flight compute.
    `limit`: positions computed when its limit is reached.
    `runway`: the row is planned on only while `planned` is less (it needs a page then, or is at its limit).
    `base`: what position `computed` has to be added to for its place in the pool's flat token mirror.
    `alarm`: the row is looked at one by one once `computed` reaches it (a page is full, or its limit is reached).
    `last`: the newest token, whose K/V is not computed yet.
    `watchers`: running requests by the token that they stop at.
    """

    __slots__ = ("alarm", "base", "computed", "last", "limit", "planned", "runway", "watch", "watchers")

    def __init__(self, slots: int) -> None:
        self.computed: IntArray = np.zeros(slots, np.int64)
        self.planned: IntArray = np.zeros(slots, np.int64)
        self.limit: IntArray = np.zeros(slots, np.int64)
        self.runway: IntArray = np.zeros(slots, np.int64)
        self.base: IntArray = np.zeros(slots, np.int64)
        self.alarm: IntArray = np.zeros(slots, np.int64)
        self.last: IntArray = np.zeros(slots, np.int64)
        # watch[token]: whether a running request stops at it; the last entry stays False, larger tokens clip to it
        self.watch: npt.NDArray[np.bool_] = np.zeros(1, np.bool_)
        self.watchers: dict[int, int] = {}

    def watch_for(self, stops: Sequence[int], change: int) -> None:
        """A request that stops at these ids (ascending) begins (`change` 1) or ceases (-1) to run."""
        if stops[-1] + 1 >= len(self.watch):
            self.watch = np.concatenate((self.watch, np.zeros(stops[-1] + 2 - len(self.watch), np.bool_)))
        for token in stops:
            count = self.watchers.get(token, 0) + change
            if count:
                self.watchers[token] = count
            else:
                del self.watchers[token]
            if count < 2:
                self.watch[token] = bool(count)

    def widen(self, slots: int) -> None:
        """Make the columns at least `slots` long."""
        more = np.zeros(slots - len(self.computed), np.int64)
        for name in _COLUMNS:
            setattr(self, name, np.concatenate((getattr(self, name), more)))

    def copy(self) -> Columns:
        """An independent copy."""
        other = object.__new__(Columns)
        for name in (*_COLUMNS, "watch"):
            setattr(other, name, getattr(self, name).copy())
        other.watchers = self.watchers.copy()
        return other
