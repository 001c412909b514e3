"""What a whole log looks like: figures after each record as columns, and the lives of its requests."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from leftfold.events import EVENTS, Event, ForwardDone, Tick
from leftfold.fsm import Effects, State
from leftfold.replay.worlds.lives import Lives

FIGURES = ("waiting", "running", "held", "cached", "tokens", "prefill", "took", "preemptions", "queries", "hits")
"""After each record: requests in line, rows, pages held and cached; of the step that a `Tick` planned, its input tokens
and those of them that are of prompts; of the step that a `ForwardDone` ended, the µs from its plan; and, since the
beginning, preemptions, prompt tokens looked up in the prefix cache, and found there."""

CODES: Mapping[type, int] = {kind: code for code, kind in enumerate(EVENTS)}

Column = npt.NDArray[np.int64]


class Overview:
    """Columns by record, from record `first` on. `t` in µs; `code`: of the event's type, its place in `EVENTS`."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.t = array("q")
        self.code = array("B")
        self.figures = {name: array("q") for name in FIGURES}
        self.lives = Lives()
        self._planned: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.t)

    def until(self, seq: int, state: State) -> Overview:
        """As it was after record `seq`, when `state` was."""
        count = seq - self.first + 1
        twin = Overview(self.first)
        twin.t, twin.code = self.t[:count], self.code[:count]
        twin.figures = {name: column[:count] for name, column in self.figures.items()}
        twin.lives = self.lives.until(seq, state)
        return twin

    def take(self, seq: int, event: Event, effects: Effects, state: State) -> None:
        """Follow one record and what it led to; `state` is as it was after."""
        self.lives.take(seq, event, effects, state)
        tokens = prefill = took = 0
        if type(event) is Tick:
            if effects.plan is not None:
                rows = state.in_flight[-1].rows
                prefill = sum([chunk.length for chunk in rows.chunks])
                tokens = len(rows.decode.seats) + prefill
                self._planned[effects.plan.step] = event.t
        elif type(event) is ForwardDone:
            took = event.t - self._planned.pop(event.step, event.t)
            if event.error is not None:
                self._planned.clear()
        pool, counts = state.pool, state.counts
        usable, cached = len(pool.free) + len(pool.cached), len(pool.cached)
        values = (
            len(state.waiting), state.row_count, len(pool.refs) - usable, cached, tokens,
            prefill, took, counts["preemptions"], counts["prefix_queries"], counts["prefix_hits"],
        )  # fmt: skip
        for column, value in zip(self.figures.values(), values, strict=True):
            column.append(value)
        self.code.append(CODES[type(event)])
        self.t.append(event.t)  # last: whoever reads meanwhile goes by its length

    def column(self, name: str) -> Column:
        """A figure as it is now."""
        return np.array(self.figures[name][: len(self.t)], np.int64)

    def times(self) -> Column:
        """`t` of every record so far."""
        return np.array(self.t[:], np.int64)  # of a copy: what numpy looks at cannot grow meanwhile

    def at_time(self, t: int) -> int:
        """The last record at or before `t`, at least the first."""
        return self.first + max(0, int(np.searchsorted(self.times(), t, "right")) - 1)

    def figures_at(self, seq: int) -> dict[str, Any]:
        """All figures after record `seq`."""
        return {name: column[seq - self.first] for name, column in self.figures.items()}


__all__ = ["CODES", "FIGURES", "Overview"]
