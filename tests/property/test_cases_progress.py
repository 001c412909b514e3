"""Faults from the field that concern progress (C10, C11, C13, C16, C55)."""

from __future__ import annotations

import pytest

from leftfold.fsm import FinishReason, Phase
from leftfold.fsm.policy import BUILT_IN
from tests.cases import AT_EACH_DEPTH, completion, one_by_one, small

pytestmark = AT_EACH_DEPTH


def test_c10_what_can_never_fit_ends_at_once_and_holds_up_nobody(depth: int) -> None:
    world = small(depth)
    world.admit("a", [1] * 40, 1)
    error = world.ended["a", 0, 0].error
    assert error is not None and error["code"] == "invalid" and "40" in error["text"] and "32" in error["text"]
    world.admit("b", [1] * 4, 1)
    world.finish()
    assert completion(world, "b") == (FinishReason.LENGTH, 1)


@pytest.mark.parametrize("max_model_len", [20, 33, 64])
@pytest.mark.parametrize("neighbours", [0, 2])
def test_c11_how_many_tokens_a_request_gets_depends_on_nobody_else(
    depth: int, max_model_len: int, neighbours: int
) -> None:
    for total in range(max_model_len - 2, max_model_len + 3) if max_model_len < 33 else range(30, 36):
        for prompt in (1, 17, total - 1, total):
            world = small(depth, max_model_len=max_model_len)
            for number in range(neighbours):
                world.admit(f"n{number}", [number] * 6, 12)
            max_tokens = max(1, total - prompt)
            world.admit("a", [7] * prompt, max_tokens)
            world.finish(replay=False)
            room = min(max_model_len, 33) - prompt
            if prompt >= max_model_len or prompt > 32:
                assert world.ended["a", 0, 0].finish_reason is FinishReason.ERROR
            else:
                assert completion(world, "a") == (FinishReason.LENGTH, min(max_tokens, room))


@pytest.mark.parametrize("policy", BUILT_IN)
def test_c13_preemptions_between_two_tokens_are_bounded(depth: int, policy: str) -> None:
    world = small(depth, max_chunk_tokens=4, prefix_cache=False, policy=policy)
    world.admit("a", [1] * 13, 19, priority=1)
    one_by_one(world, 5)
    world.admit("b", [2] * 24, 2)
    most, heard, before = 0, 0, 0
    while ("b", 0, 0) in world.clients:
        world.steps()
        client, request = world.clients.get(("b", 0, 0)), world.state.requests["b"]
        if client is not None and client.heard > heard:
            heard, before = client.heard, request.preemptions
        most = max(most, request.preemptions - before)
    assert most <= 1
    world.finish()


def test_c16_the_last_token_needs_no_page(depth: int) -> None:
    world = small(depth)
    world.admit("a", [1] * 28, 16)
    world.finish()
    assert completion(world, "a") == (FinishReason.LENGTH, 5)
    world.admit("b", [2] * 4, 3)
    world.finish()
    assert completion(world, "b") == (FinishReason.LENGTH, 3)


@pytest.mark.parametrize("phase", ["WAITING", "PREFILLING", "DECODING", "PREEMPTED"])
def test_c55_only_ticks_past_its_deadline_end_a_request_in_any_phase(depth: int, phase: str) -> None:
    world = small(depth, max_chunk_tokens=4, max_running=2, prefix_cache=False)
    world.admit("first", [1] * 6, 26)
    if phase == "WAITING":
        world.admit("second", [2] * 6, 26)
    world.admit("a", [3] * 9, 20, deadline=10_000)
    request = world.state.requests["a"]
    while request.phase is not Phase[phase]:
        world.steps()
    world.wait(10_000)
    world.tick()
    assert completion(world, "a")[0] is FinishReason.DEADLINE
    world.land()
    assert request.phase is Phase.FINISHED
    world.finish()


def test_c55_a_request_that_is_stopping_is_gone_once_its_step_is_over(depth: int) -> None:
    world = small(depth)
    world.admit("a", [3] * 9, 20, deadline=5)
    request = world.state.requests["a"]
    world.tick()
    world.abort("a")
    world.wait(5)
    world.tick()
    assert request.phase is Phase.STOPPING and world.state.wake_at is None
    world.done()
    assert request.phase is Phase.FINISHED
    world.finish()
