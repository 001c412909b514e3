"""How quiet the machine is, told by a clock that jumps."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import pytest

from leftfold.bench.machine import interruptions


def _clock(*strides_ns: int) -> Callable[[], int]:
    """A clock that goes on by these strides, over and over."""
    strides, now = cycle(strides_ns), 0

    def read() -> int:
        nonlocal now
        now += next(strides)
        return now

    return read


@pytest.mark.parametrize(
    ("strides_ns", "per_second"),
    [
        ([100], 0),
        ([1500], 0),  # as long as a loop may take by itself
        ([100] * 100 + [90_000], 10_000),
        ([50_000], 20_000),
    ],
)
def test_pauses_that_a_loop_does_not_make_are_counted(strides_ns: list[int], per_second: int) -> None:
    assert interruptions(0.1, _clock(*strides_ns)) == pytest.approx(per_second, rel=0.01)
