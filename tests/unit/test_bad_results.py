"""What an executor reports wrongly never raises: it counts as lost, or the step as failed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from leftfold.events import Admit, ForwardDone, SamplingParams, Started, Tick
from leftfold.fsm import Config, FinishReason, Phase, State, step
from leftfold.replay.fuzzing import World


def in_flight() -> tuple[State, int]:
    state = State(Config(num_pages=8, page_size=4, max_running=2, max_batch_tokens=16, max_model_len=30))
    step(state, Admit(t=0, rid="a", prompt=[1, 2], params=SamplingParams(max_tokens=5)))
    plan = step(state, Tick(t=0)).plan
    assert plan is not None
    return state, plan.step


@pytest.mark.parametrize(
    "tokens",
    [
        (), [1, 2], ["x"], None, [[1]], [1.5], [True], [1 << 31], [1 << 70], [-1], {"a": 1}, "a", 7, [None],
        np.array([1 << 35]), np.array([1.0]), np.array([[1]]), np.array([1, 2], np.int32), [[1], [2, 3]],
    ],
    ids=repr,
)  # fmt: skip
def test_what_is_no_list_of_so_many_tokens_loses_the_executor(tokens: Any) -> None:
    state, number = in_flight()
    effects = step(state, ForwardDone(t=1, step=number, tokens=tokens))
    state.check()
    assert not list(effects.outputs) and not state.executor_present
    assert state.requests["a"].phase is Phase.WAITING
    step(state, Started(t=2, incarnation=1))
    assert step(state, Tick(t=2)).plan is not None


@pytest.mark.parametrize("tokens", [[5], (5,), np.array([5], np.int32), np.array([5]), np.array([5], np.uint8)])
def test_any_integers_are_tokens(tokens: Any) -> None:
    state, number = in_flight()
    (output,) = step(state, ForwardDone(t=1, step=number, tokens=tokens)).outputs
    assert output.tokens == (5,) and type(output.tokens[0]) is int


@pytest.mark.parametrize(
    "error",
    ["boom", {}, {"text": None}, {"rows": 5}, {"rows": "abc"}, {"rows": [7]}, {"rows": [-1]}, {"rows": [None]}],
    ids=repr,
)
def test_an_error_of_whatever_form_ends_the_rows_unless_it_may_be_retried(error: Any) -> None:
    state, number = in_flight()
    (output,) = step(state, ForwardDone(t=1, step=number, error=error)).outputs
    state.check()
    assert output.finish_reason is FinishReason.ERROR
    assert output.error is not None and output.error["code"] == "failed"


def test_a_row_that_fails_alone_three_times_is_the_culprit() -> None:
    world = World(num_pages=8, page_size=4, max_running=2, max_batch_tokens=8, max_model_len=30)
    world.admit("a", [1, 2], 9)
    for _ in range(3):
        assert ("a", 0, 0) in world.clients
        world.tick()
        world.fail()
    assert world.ended["a", 0, 0].finish_reason is FinishReason.ERROR
    world.finish()


def test_in_company_nobody_is_blamed_for_failed_steps() -> None:
    world = World(num_pages=8, page_size=4, max_running=2, max_batch_tokens=8, max_model_len=30)
    world.admit("a", [1, 2], 9)
    world.admit("b", [3, 4], 9)
    for _ in range(7):
        world.tick()
        world.fail()
    world.finish()
    assert {world.ended[rid, 0, 0].finish_reason for rid in "ab"} == {FinishReason.LENGTH}


def test_only_the_named_culprit_ends() -> None:
    world = World(num_pages=8, page_size=4, max_running=2, max_batch_tokens=8, max_model_len=30)
    world.admit("a", [1, 2], 9)
    world.admit("b", [3, 4], 9)
    world.steps(2)
    world.tick()
    world.fail(retry=False, rows=[1])
    assert world.ended["b", 0, 0].finish_reason is FinishReason.ERROR
    world.finish()
    assert world.ended["a", 0, 0].finish_reason is FinishReason.LENGTH
