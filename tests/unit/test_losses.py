"""Who is to blame for steps that go wrong: counted by request, until it is past the place where they did."""

from __future__ import annotations

import pytest

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
