"""A `Started` with other limits, and how long finished requests are remembered."""

from __future__ import annotations

import pytest

from leftfold.events import Admit, SamplingParams, Started
from leftfold.fsm import Config, FinishReason, Phase, State, step
from leftfold.fsm.state import KEPT_FINISHED
from leftfold.replay.fuzzing import World


def world(**limits: object) -> World:
    fields = {"num_pages": 16, "page_size": 4, "max_running": 2, "max_batch_tokens": 8, "max_model_len": 60}
    return World(**{**fields, **limits})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"page_size": 3}, {"page_size": 16}, {"num_pages": 9}, {"max_running": 1}, {"max_running": 5},
        {"max_batch_tokens": 1}, {"policy": "priority"}, {"prefix_cache": False}, {"max_chunk_tokens": 2},
        {"page_size": 1, "num_pages": 40, "max_running": 3},
    ],
)  # fmt: skip
def test_live_requests_go_on_under_other_limits(changes: dict[str, object]) -> None:
    w = world()
    for rid in ("a", "b", "c"):
        w.admit(rid, [1, 2, 3, 4, 5, ord(rid)], 20)
    w.steps(6)
    w.tick()
    w.start(**changes)
    w.steps(1)
    w.finish()
    assert {w.ended[rid, 0, 0].finish_reason for rid in "abc"} == {FinishReason.LENGTH}
    assert [w.ended[rid, 0, 0].position for rid in "abc"] == [25] * 3


def test_what_no_longer_fits_ends_where_it_stands() -> None:
    w = world()
    w.admit("a", [1] * 6, 30)
    w.steps(11)
    w.admit("b", [2] * 20, 5)
    w.admit("c", [3] * 4, 30)
    heard = w.clients["a", 0, 0].heard
    assert heard > 8
    w.start(max_model_len=14)
    assert (w.ended["a", 0, 0].finish_reason, w.ended["a", 0, 0].position) == (FinishReason.LENGTH, 6 + heard)
    error = w.ended["b", 0, 0].error
    assert error is not None and error["code"] == "failed" and "20" in error["text"]
    w.finish()
    assert (w.ended["c", 0, 0].finish_reason, w.ended["c", 0, 0].position) == (FinishReason.LENGTH, 13)


def test_larger_limits_do_not_lengthen_what_was_promised() -> None:
    w = world(max_model_len=10)
    w.admit("a", [1] * 4, 30)
    w.start(max_model_len=60)
    w.finish()
    assert w.ended["a", 0, 0].position == 9


@pytest.mark.parametrize(("kept", "cached"), [([], 0), (["device"], 8)])
def test_the_prefix_cache_survives_only_if_its_memory_did(kept: list[str], cached: int) -> None:
    w = world()
    w.admit("a", list(range(9)), 1)
    w.steps(2)
    w.start(kept)
    w.admit("a", list(range(9)), 1)
    w.finish()
    usage = w.ended["a", 0, 0].usage
    assert usage is not None and usage.cached_tokens == cached


def test_tokens_found_after_a_loss_are_not_reported_as_a_cached_prompt() -> None:
    w = world()
    w.admit("a", list(range(9)), 20)
    w.steps(15)
    w.start(["device"])
    w.finish()
    usage = w.ended["a", 0, 0].usage
    assert usage is not None and usage.cached_tokens == 0


def test_no_page_is_published_once_the_cache_is_off() -> None:
    w = world()
    w.admit("a", list(range(9)), 20)
    w.steps(3)
    w.start(prefix_cache=False)
    w.finish()
    assert not w.state.pool.published


def test_a_start_without_config_keeps_the_limits() -> None:
    state = State(Config(num_pages=4, page_size=4, max_running=1, max_batch_tokens=8, max_model_len=20))
    config = state.config
    step(state, Started(t=0, incarnation=3))
    assert state.config is config and state.incarnation == 3


def test_losing_the_executor_twice_and_starting_twice_is_harmless() -> None:
    w = world()
    w.admit("a", [1] * 5, 8)
    w.steps(3)
    for _ in range(2):
        w.lose()
        w.tick()
    for _ in range(2):
        w.start()
    w.finish()
    assert w.ended["a", 0, 0].finish_reason is FinishReason.LENGTH


def test_finished_requests_are_remembered_for_a_while() -> None:
    state = State(Config(num_pages=4, page_size=4, max_running=1, max_batch_tokens=8, max_model_len=20))
    for number in range(KEPT_FINISHED + 10):
        step(state, Admit(t=0, rid=f"r{number}", prompt=[], params=SamplingParams()))
    state.check()
    assert len(state.finished) == KEPT_FINISHED and len(state.requests) == KEPT_FINISHED
    assert "r9" not in state.requests and state.requests["r10"].phase is Phase.FINISHED


def test_forgetting_an_old_request_spares_the_newer_one_of_that_rid() -> None:
    state = State(Config(num_pages=4, page_size=4, max_running=1, max_batch_tokens=8, max_model_len=20))
    step(state, Admit(t=0, rid="x", prompt=[], params=SamplingParams()))
    step(state, Admit(t=0, rid="x", prompt=[1], params=SamplingParams()))
    for number in range(KEPT_FINISHED + 1):
        step(state, Admit(t=0, rid=f"r{number}", prompt=[], params=SamplingParams()))
    assert state.requests["x"].phase is Phase.WAITING and ("x", 0, 0) in state.live
    state.check()


def test_a_finished_request_holds_no_tokens() -> None:
    w = world()
    w.admit("a", [1] * 20, 2)
    w.finish()
    assert len(w.state.requests["a"].tokens) == 0 and w.state.requests["a"].seat is None
