"""Who is to blame for steps that go wrong: counted by request, until it is past the place where they did."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from leftfold.events import Event, ExecutorLost, ForwardDone, Tick
from leftfold.losses import APART, DELAYS, LOSSES, Losses, Verdict

A, B = ("a", 0, 0), ("b", 0, 0)


def computed(**positions: int) -> object:
    return lambda key: positions.get(key[0])


def test_one_alone_ends_with_its_third_loss_at_one_place() -> None:
    losses = Losses()
    assert [losses.lost([(A, 5)]) for _ in range(LOSSES)] == [Verdict.AGAIN] * (LOSSES - 1) + [Verdict.END]


def test_a_good_step_that_stays_behind_the_loss_forgives_nothing() -> None:
    losses = Losses()
    for _ in range(LOSSES - 1):
        losses.lost([(A, 24)])
        losses.passed(computed(a=16))
    assert losses.lost([(A, 24)]) is Verdict.END


@pytest.mark.parametrize("positions", [{"a": 24}, {"a": 30}, {}], ids=["at it", "beyond", "gone"])
def test_whoever_got_past_the_loss_or_is_gone_starts_anew(positions: dict[str, int]) -> None:
    losses = Losses()
    for _ in range(5):
        assert losses.lost([(A, 24)]) is Verdict.AGAIN
        assert losses
        losses.passed(computed(**positions))
        assert not losses and losses.in_a_row == 0


def test_the_farthest_place_counts() -> None:
    losses = Losses()
    losses.lost([(A, 24)])
    losses.lost([(A, 8)])
    losses.passed(computed(a=16))
    assert losses.lost([(A, 24)]) is Verdict.END


def test_a_company_is_run_apart_and_only_one_who_is_alone_ends() -> None:
    losses = Losses()
    verdicts = [losses.lost([(A, 5), (B, 9)]) for _ in range(APART + 3)]
    assert verdicts == [Verdict.AGAIN] * (APART - 1) + [Verdict.APART] * 4
    losses.passed(computed(a=5, b=0))
    assert losses.lost([(A, 6)]) is Verdict.AGAIN
    assert losses.lost([(B, 9)]) is Verdict.END


def test_failed_steps_are_counted_apart_from_losses_and_end_nobody() -> None:
    losses = Losses()
    for _ in range(LOSSES):
        assert losses.failed([(A, 5)]) is Verdict.AGAIN
    assert losses.lost([(A, 5)]) is Verdict.AGAIN
    assert losses.failed([(A, 5), (B, 5)]) is Verdict.APART


def test_a_result_of_nobody_blames_nobody() -> None:
    losses = Losses()
    assert {losses.failed([]) for _ in range(20)} == {Verdict.AGAIN} and not losses
    assert {losses.lost([]) for _ in range(20)} == {Verdict.AGAIN}


def test_forged_results_are_too_many_once_nobody_gets_past_them() -> None:
    losses = Losses()
    for _ in range(4):
        assert [losses.forge([(A, 5)]) for _ in range(LOSSES - 1)] == [False] * (LOSSES - 1)
        losses.passed(computed(a=5))
    assert [losses.forge([(A, 9)]) for _ in range(LOSSES)][-1] is True


def test_waits_double_with_each_loss_in_a_row_up_to_a_bound() -> None:
    losses, waits = Losses(), []
    for _ in range(DELAYS + 2):
        losses.lost([(A, 5), (B, 5)])
        waits.append(losses.delay(0.2))
    assert waits == pytest.approx([0.0, *(0.2 * 2**n for n in range(DELAYS - 1)), *[0.2 * 2 ** (DELAYS - 2)] * 2])


def flight(*rows: tuple[Any, int]) -> Any:
    """A step in flight that decodes these choices, each at a position."""
    seats = [SimpleNamespace(slot=slot, request=SimpleNamespace(key=key)) for slot, (key, _) in enumerate(rows)]
    ends = np.array([at + 1 for _, at in rows])
    return SimpleNamespace(
        rows=SimpleNamespace(decode=SimpleNamespace(seats=seats), ends=ends, chunks=[]), ended=set()
    )


def told(*records: tuple[Event, Any]) -> Losses:
    """What a log says: events, and what was in flight before each."""
    losses = Losses()
    for event, oldest in records:
        losses.recall(event, oldest)
    return losses


LOST = ExecutorLost(t=0, error="gone")


def failed(**more: bool) -> ForwardDone:
    return ForwardDone(t=0, step=1, tokens=(), digest=None, error={"text": "gone", "retry": True, **more})


def test_losses_that_a_log_tells_of_count_again() -> None:
    both = flight((A, 4), (B, 8))
    assert told((LOST, both)).lost([(A, 5), (B, 9)]) is Verdict.APART
    losses = told((LOST, both), (failed(apart=True), both), (LOST, None))  # with the judgement the step was over
    assert losses.in_a_row == 2
    assert losses.lost([(A, 5)]) is Verdict.END
    assert losses.lost([(B, 9)]) is Verdict.END
    losses.passed(computed(a=5, b=9))
    assert not losses


def test_a_failure_before_a_loss_is_not_taken_for_its_judgement() -> None:
    losses = told((failed(), flight((A, 4))), (Tick(t=0), None), (LOST, flight((B, 8))))
    assert losses.lost([(A, 5), (B, 9)]) is Verdict.APART  # it was the second one of b
    losses.passed(computed(b=9))
    assert losses.lost([(A, 5)]) is Verdict.AGAIN
