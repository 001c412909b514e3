"""What changes every step, as int64 columns indexed by slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from leftfold.events.plan import IntArray

WATCHED = 1 << 18
"""Stop ids below this are watched by column; a request with a larger one is looked at every step."""


ONE = np.array(1)
"""Adds to a column in half the time that a Python integer takes."""

COLUMNS = ("computed", "planned", "limit", "runway", "base", "alarm", "last")


class Cells:
    """The same columns for who looks at one slot at a time: an item of a memoryview costs half of an array's."""

    __slots__ = COLUMNS

    alarm: memoryview
    base: memoryview
    computed: memoryview
    last: memoryview
    limit: memoryview
    planned: memoryview
    runway: memoryview


class Columns:
    """One entry per slot; an entry means nothing while its slot is free.

    `computed`: positions whose K/V is written and committed. `planned`: those, and what steps in flight compute.
    `limit`: positions computed when its limit is reached.
    `runway`: the row is planned on only while `planned` is less (it needs a page then, or is at its limit).
    `base`: what a position has to be added to for its place in the pool's token mirror.
    `alarm`: the row is looked at one by one once `computed` reaches it (a page is full, or its limit is reached).
    `last`: the newest token, whose K/V is not computed yet.
    `watchers`: running requests by the token that they stop at. `cells`: views of all of them.
    """

    __slots__ = (*COLUMNS, "cells", "watch", "watchers")

    alarm: IntArray
    base: IntArray
    computed: IntArray
    last: IntArray
    limit: IntArray
    planned: IntArray
    runway: IntArray

    def __init__(self, slots: int) -> None:
        self.fill({name: np.zeros(slots, np.int64) for name in COLUMNS})
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
        self.fill({name: np.concatenate((getattr(self, name), more)) for name in COLUMNS})

    def fill(self, columns: Mapping[str, IntArray]) -> None:
        """Put these arrays, one of each name, into the places of those that are there."""
        self.cells = Cells()
        for name in COLUMNS:
            setattr(self, name, columns[name])
            setattr(self.cells, name, columns[name].data)

    def copy(self) -> Columns:
        """An independent copy."""
        other = Columns(0)
        other.fill({name: getattr(self, name).copy() for name in COLUMNS})
        other.watch = self.watch.copy()
        other.watchers = self.watchers.copy()
        return other
