"""What to do about steps that go wrong: run them again, run their requests apart, or end the one that is to blame."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING

from leftfold.events import Event, ExecutorLost, ForwardDone
from leftfold.events.plan import as_list

if TYPE_CHECKING:
    from leftfold.fsm.state import InFlight, State

APART = 2
"""After so many losses (or failed steps) without getting past them, the requests of the step run one by one."""

LOSSES = 3
"""A request that was in so many losses without getting past them, and alone in the last, ends with an error."""

DELAYS = 6
"""The wait before a reset doubles with each loss in a row, so many times at most."""

Key = tuple[str, int, int]
"""A choice: rid, epoch, choice."""
Place = tuple[Key, int]
"""A row of a step: whose it is, and the position behind what it computes."""


class Verdict(Enum):
    """What becomes of the requests of a step that went wrong."""

    AGAIN = "all of them run again"
    APART = "each runs alone until it is past that position"
    END = "it ends with an error"


def places(flight: InFlight | None) -> list[Place]:
    """The rows of a step in flight whose requests live."""
    if flight is None:
        return []
    rows = flight.rows
    seated = [*zip(rows.decode.seats, as_list(rows.ends), strict=True)]
    seated += [(row.seat, row.start + row.length) for row in rows.chunks if row.length]
    return [(seat.request.key, end) for seat, end in seated if seat.slot not in flight.ended]


def computed(state: State) -> Callable[[Key], int | None]:
    """Positions that a request has committed since the executor's start; None if it does not live."""

    def of(key: Key) -> int | None:
        request = state.live.get(key)
        if request is None:
            return None
        return 0 if request.seat is None else int(state.columns.computed[request.seat.slot])

    return of


class Losses:
    """Counts, request by request, the losses and the failed steps that it was in and has not got past.

    A good result says nothing about a request that has only come back to where things went wrong, so a count is
    dropped when the request has computed more than was to be computed then, or is gone. `in_a_row`: losses since
    everybody in one of them got past it.
    """

    def __init__(self) -> None:
        self._lost: dict[Key, tuple[int, int]] = {}
        self._failed: dict[Key, tuple[int, int]] = {}
        self._judged: list[Place] = []
        self.in_a_row = 0
        self.forged = 0

    def __bool__(self) -> bool:
        return bool(self.in_a_row or self._failed)

    def recall(self, event: Event, oldest: InFlight | None) -> None:
        """An event of the log, and the oldest step in flight before it: losses of earlier processes count as well.

        Where requests were judged the error comes before the loss (decision 6).
        """
        judged, self._judged = self._judged, []
        if type(event) is ExecutorLost:
            self.lost(judged or places(oldest))
        elif type(event) is ForwardDone and event.error is not None:
            self._judged = places(oldest)

    def lost(self, rows: Sequence[Place]) -> Verdict:
        """The executor was lost in a step of these rows."""
        self.in_a_row += 1
        most = _count(self._lost, rows)
        if len(rows) > 1:
            return Verdict.APART if most >= APART else Verdict.AGAIN
        return Verdict.END if most >= LOSSES else Verdict.AGAIN

    def forge(self, rows: Sequence[Place]) -> bool:
        """A result was not that of its plan, which loses the executor; whether that was once too often."""
        self.in_a_row += 1
        self.forged += 1
        _count(self._lost, rows)
        return self.forged >= LOSSES

    def failed(self, rows: Sequence[Place]) -> Verdict:
        """A step of these rows failed and may be run again. (One that fails alone is ended by the reducer.)"""
        most = _count(self._failed, rows)
        return Verdict.APART if len(rows) > 1 and most >= APART else Verdict.AGAIN

    def passed(self, computed: Callable[[Key], int | None]) -> None:
        """A step went well. `computed`: positions that a request has committed, None for one that is gone."""
        for counts in (self._lost, self._failed):
            for key, (_, end) in list(counts.items()):
                at = computed(key)
                if at is None or at >= end:
                    del counts[key]
        if not self._lost:
            self.in_a_row = self.forged = 0

    def delay(self, seconds: float) -> float:
        """How long to wait before the next reset: nothing after the first loss, then `seconds`, doubling."""
        return seconds * 2.0 ** (min(self.in_a_row, DELAYS) - 2) if self.in_a_row > 1 else 0.0


def _count(counts: dict[Key, tuple[int, int]], rows: Sequence[Place]) -> int:
    """Count one more for each row; the highest count among them."""
    most = 0
    for key, end in rows:
        count, before = counts.get(key, (0, 0))
        counts[key] = (count + 1, max(before, end))
        most = max(most, count + 1)
    return most


__all__ = ["Losses", "Place", "Verdict", "computed", "places"]
