"""Several choices of one request: who computes the prompt for the others, and what the counters say of all of them."""

from __future__ import annotations

import pytest

from leftfold.events import Abort, Admit, ForwardDone, SamplingParams, Tick
from leftfold.executor.oracle import OracleExecutor
from leftfold.fsm import Config, State, step

CONFIG = Config(num_pages=64, page_size=4, max_running=8, max_batch_tokens=16, max_model_len=64)


def admitted(*, choices: int, epochs: int) -> State:
    """The same request in so many epochs; nothing has run."""
    state = State(CONFIG)
    for epoch in range(epochs):
        params = SamplingParams(max_tokens=5, n=choices)
        step(state, Admit(t=epoch, rid="a", epoch=epoch, prompt=list(range(1, 10)), params=params))
    return state


def leaders(state: State) -> dict[tuple[int, int], tuple[int, int] | None]:
    """Epoch and choice of whom each waits for."""
    return {
        (request.epoch, request.choice): None if (who := request.leader) is None else (who.epoch, who.choice)
        for request in state.live.values()
    }


@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_choices_follow_the_first_that_lives_of_their_own_epoch(epoch: int) -> None:
    state = admitted(choices=3, epochs=3)
    before = leaders(state)
    assert all(before[number, choice] == ((number, 0) if choice else None) for number, choice in before)
    step(state, Abort(t=9, rid="a", epoch=epoch, choice=0))
    others = {who: leader for who, leader in before.items() if who[0] != epoch}
    assert leaders(state) == {**others, (epoch, 1): None, (epoch, 2): (epoch, 1)}
    state.check()


def test_counters_are_what_was_computed_and_heard() -> None:
    state, executor, heard, computed = admitted(choices=3, epochs=2), OracleExecutor(64, 4, 50), 0, 0
    for t in range(10, 100):
        plan = step(state, Tick(t=t)).plan
        if plan is None:
            break
        result = executor.execute(plan)
        computed += sum(chunk.length for chunk in plan.plan.chunks)
        effects = step(state, ForwardDone(t=t, step=plan.step, tokens=result.tokens, digest=plan.digest))
        heard += sum(len(output.tokens) for output in effects.outputs)
    assert not state.live and heard == 2 * 3 * 5
    assert state.counts["generation_tokens"] == heard
    assert state.counts["prompt_tokens"] == computed < 2 * 3 * 9, "choices share what the first one computed"
