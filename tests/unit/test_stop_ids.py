"""Stop ids, `min_tokens` and limits: when a request ends, whatever column does or does not watch its ids."""

from __future__ import annotations

import pytest

from leftfold.events import Admit, ForwardDone, SamplingParams, Tick
from leftfold.fsm import Config, FinishReason, Output, State, step
from leftfold.fsm.columns import WATCHED

BIG = WATCHED + 5
CONFIG = Config(num_pages=64, page_size=4, max_running=4, max_batch_tokens=16, max_model_len=100)


def answers(script: list[int], others: int = 0, prompt: int = 3, **params: object) -> list[Output]:
    """What `a` hears when its tokens are `script`, with `others` rows beside it that say 1."""
    state = State(CONFIG)
    for number in range(others):
        step(state, Admit(t=0, rid=f"o{number}", prompt=[9, number], params=SamplingParams(max_tokens=60)))
    sampling = SamplingParams(max_tokens=len(script), **params)  # type: ignore[arg-type]
    step(state, Admit(t=0, rid="a", prompt=[5] * prompt, params=sampling))
    heard: list[Output] = []
    said = iter(script)
    while ("a", 0, 0) in state.live:
        plan = step(state, Tick(t=1)).plan
        assert plan is not None
        tokens = [next(said) if row.rid == "a" else 1 for row in plan.rows if row.samples]
        effects = step(state, ForwardDone(t=1, step=plan.step, tokens=tokens))
        state.check()
        heard += [output for output in effects.outputs if output.rid == "a"]
    return heard


def ending(heard: list[Output]) -> tuple[FinishReason | None, int]:
    return heard[-1].finish_reason, len(heard)


@pytest.mark.parametrize("stop", [2, WATCHED - 1, WATCHED, BIG, (1 << 31) - 1])
@pytest.mark.parametrize("others", [0, 2])
@pytest.mark.parametrize("at", [0, 1, 4, 7, 8])
def test_a_stop_id_ends_the_request_and_is_part_of_its_output(stop: int, others: int, at: int) -> None:
    script = [7] * at + [stop] + [7] * 4
    heard = answers(script, others, stop_token_ids=(3, stop))
    assert ending(heard) == (FinishReason.STOP, at + 1)
    assert heard[-1].tokens == (stop,) and heard[-1].usage is not None
    assert heard[-1].usage.completion_tokens == at + 1
    assert [output.finish_reason for output in heard[:-1]] == [None] * at


@pytest.mark.parametrize("stop", [2, BIG])
@pytest.mark.parametrize("least", [0, 1, 2, 3, 5, 99])
def test_min_tokens_counts_the_stop_token_itself(stop: int, least: int) -> None:
    heard = answers([stop] * 6, stop_token_ids=(stop,), min_tokens=least)
    assert ending(heard) == ((FinishReason.STOP, max(1, least)) if least <= 6 else (FinishReason.LENGTH, 6))


@pytest.mark.parametrize("stop", [2, BIG])
def test_stop_beats_length_on_the_last_token(stop: int) -> None:
    assert ending(answers([7, 7, stop], stop_token_ids=(stop,))) == (FinishReason.STOP, 3)


def test_stop_ids_of_a_neighbour_are_not_ours() -> None:
    state = State(CONFIG)
    step(state, Admit(t=0, rid="a", prompt=[1], params=SamplingParams(max_tokens=5, stop_token_ids=(7,))))
    step(state, Admit(t=0, rid="b", prompt=[2], params=SamplingParams(max_tokens=5, stop_token_ids=(8,))))
    ended = {}
    while state.live:
        plan = step(state, Tick(t=1)).plan
        assert plan is not None
        effects = step(state, ForwardDone(t=1, step=plan.step, tokens=[8] * len(plan.rows)))
        ended |= {output.rid: output.position for output in effects.outputs if output.finish_reason}
        state.check()
    assert ended == {"a": 5, "b": 1}


@pytest.mark.parametrize("shared", [2, BIG])
def test_what_two_requests_watch_is_watched_until_both_are_gone(shared: int) -> None:
    state = State(CONFIG)
    for rid, tokens in (("a", 2), ("b", 9)):
        params = SamplingParams(max_tokens=tokens, stop_token_ids=(shared, shared))
        step(state, Admit(t=0, rid=rid, prompt=[1], params=params))
    script = iter([[7, 7], [7, 7], [7], [shared]])
    while state.live:
        plan = step(state, Tick(t=1)).plan
        assert plan is not None
        effects = step(state, ForwardDone(t=1, step=plan.step, tokens=next(script)))
    (last,) = effects.outputs
    assert (last.rid, last.finish_reason, last.position) == ("b", FinishReason.STOP, 4)
    assert not state.columns.watchers and not state.columns.watch.any()


def test_no_stop_id_given_means_none() -> None:
    assert ending(answers([0, 1, 2, 3, (1 << 31) - 1])) == (FinishReason.LENGTH, 5)
