"""Cases from the field: several tokens of one row in one result (C72)."""

from __future__ import annotations

import pytest

from leftfold.events import Admit, ForwardDone, SamplingParams, Tick
from leftfold.fsm import Config, FinishReason, Phase, State, step

STOP = 9


def decoding(depth: int) -> State:
    """A request of at most 5 tokens that has 2 of them."""
    state = State(Config(16, 4, 4, 16, 64, pipeline_depth=depth))
    params = SamplingParams(max_tokens=5, stop_token_ids=(STOP,))
    step(state, Admit(t=0, rid="a", prompt=[1, 2, 3], params=params))
    for _ in range(2):
        plan = step(state, Tick(t=0)).plan
        assert plan is not None
        step(state, ForwardDone(t=0, step=plan.step, tokens=[7], digest=plan.digest))
    return state


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_c72_tokens_after_the_one_that_ends_a_request_do_not_count(depth: int) -> None:
    state = decoding(depth)
    plans = [plan for _ in range(depth + 1) if (plan := step(state, Tick(t=0)).plan) is not None]
    done = ForwardDone(t=0, step=plans[0].step, tokens=[STOP, 20, 21, 22], counts=[4], digest=plans[0].digest)
    [output] = step(state, done).outputs
    assert (output.tokens, output.finish_reason) == ((STOP,), FinishReason.STOP)
    assert output.usage is not None and output.usage.completion_tokens == 3
    state.check()
    for plan in plans[1:]:
        assert not len(step(state, ForwardDone(t=0, step=plan.step, tokens=[5], digest=plan.digest)).outputs)
    state.check()
    assert state.requests["a"].phase is Phase.FINISHED


@pytest.mark.parametrize("tokens, counts", [
    ([5, 6], [2]), ([STOP, 6], [1]), ([STOP], [2]), ([STOP], [0]), ([STOP], []), ([STOP, 6], [1, 1]), ([5], "x"),
    ([5], ["x"]), ([5], 7), ([5], [1.0]),
])  # fmt: skip
def test_more_tokens_than_a_row_can_have_are_no_result_of_its_plan(tokens: list[int], counts: object) -> None:
    state = decoding(0)
    plan = step(state, Tick(t=0)).plan
    assert plan is not None
    done = ForwardDone(t=0, step=plan.step, tokens=tokens, counts=counts)  # type: ignore[arg-type]  # wrong on purpose
    assert not len(step(state, done).outputs)
    assert not state.executor_present
    state.check()


def test_counts_of_one_each_say_nothing() -> None:
    state = decoding(0)
    plan = step(state, Tick(t=0)).plan
    assert plan is not None
    [output] = step(state, ForwardDone(t=0, step=plan.step, tokens=[5], counts=[1], digest=plan.digest)).outputs
    assert output.tokens == (5,) and output.finish_reason is None
