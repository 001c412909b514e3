"""How often an engine's process that died is started again, and how long to wait before each time."""

from __future__ import annotations

import time
from collections.abc import Callable

STEADY_SECONDS = 60.0
"""A process that was ready for so long starts a new count."""
FIRST_DELAY, LONGEST_DELAY = 0.5, 30.0


class Restarts:
    """At most `most` starts in a row: the first at once, then after half a second, twice as long each time."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._ready_since: float | None = None
        self.in_a_row = 0

    def ready(self) -> None:
        """A process takes work now."""
        self._ready_since = self._clock()

    def died(self) -> float | None:
        """A process has ended; seconds until the next start, or None: it was once too often."""
        since, self._ready_since = self._ready_since, None
        if since is not None and self._clock() - since >= STEADY_SECONDS:
            self.in_a_row = 0
        if self.in_a_row >= self._most:
            return None
        self.in_a_row += 1
        return 0.0 if self.in_a_row == 1 else min(LONGEST_DELAY, FIRST_DELAY * 2.0 ** (self.in_a_row - 2))


__all__ = ["Restarts"]
