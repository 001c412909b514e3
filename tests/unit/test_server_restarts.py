"""How often an engine's process is started again, and after which waits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leftfold.server.restarts import FIRST_DELAY, LONGEST_DELAY, STEADY_SECONDS, Restarts


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def test_the_first_is_at_once_and_later_ones_wait_twice_as_long_each() -> None:
    restarts = Restarts(5, Clock())
    assert [restarts.died() for _ in range(6)] == [0.0, 0.5, 1.0, 2.0, 4.0, None]
    assert restarts.died() is None, "once too often stays so"


def test_no_wait_is_longer_than_the_longest() -> None:
    restarts = Restarts(40, Clock())
    waits = [restarts.died() for _ in range(40)]
    assert max(wait for wait in waits if wait is not None) == LONGEST_DELAY and waits[1] == FIRST_DELAY


def test_without_restarts_the_first_death_is_the_end() -> None:
    assert Restarts(0, Clock()).died() is None


@pytest.mark.parametrize(("seconds", "anew"), [(STEADY_SECONDS - 0.1, False), (STEADY_SECONDS, True)])
def test_a_minute_without_a_death_begins_a_new_count(seconds: float, anew: bool) -> None:
    clock = Clock()
    restarts = Restarts(3, clock)
    restarts.died()
    restarts.died()
    restarts.ready()
    clock.now += seconds
    assert (restarts.died(), restarts.in_a_row) == ((0.0, 1) if anew else (1.0, 3))


def test_time_in_which_none_is_ready_does_not_count() -> None:
    clock = Clock()
    restarts = Restarts(2, clock)
    restarts.ready()
    assert restarts.died() == 0.0
    clock.now += 10 * STEADY_SECONDS  # it loads, and dies before it is ready
    assert restarts.died() == 0.5
    assert restarts.died() is None


@given(most=st.integers(0, 8), lives=st.lists(st.one_of(st.none(), st.floats(0, 200)), max_size=40))
def test_never_more_than_so_many_in_a_row(most: int, lives: list[float | None]) -> None:
    """`lives`: for how long each process was ready, None: not at all."""
    clock = Clock()
    restarts, row = Restarts(most, clock), 0
    for life in lives:
        if life is not None:
            restarts.ready()
            clock.now += life
        row = 0 if life is not None and life >= STEADY_SECONDS else row
        delay = restarts.died()
        assert (delay is None) == (row >= most)
        if delay is None:
            break
        row += 1
        assert restarts.in_a_row == row and 0 <= delay <= LONGEST_DELAY
