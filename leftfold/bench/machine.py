"""How quiet the machine is: short figures mean little where something takes the processor all the time."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns

GAP_NS = 1500
"""A loop that does nothing but read the clock never pauses for so long by itself."""


def interruptions(seconds: float = 0.1, clock: Callable[[], int] = perf_counter_ns) -> float:
    """How often per second something takes the processor from a loop that does nothing for so long.

    Beside the time that it takes, an interruption leaves cold caches and branch predictors behind. A virtual machine
    has them from its host, where no figure of its own shows them. `clock` counts nanoseconds.
    """
    begun = last = clock()
    end = begun + int(seconds * 1e9)
    gaps = 0
    while last < end:
        now = clock()
        if now - last > GAP_NS:
            gaps += 1
        last = now
    return gaps * 1e9 / (last - begun)
