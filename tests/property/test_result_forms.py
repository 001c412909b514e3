"""Results in every form an executor may give them say the same, and each wrong one loses the executor."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leftfold.events import ForwardDone
from leftfold.fsm import step
from leftfold.replay.fuzzing import World
from leftfold.replay.fuzzing.results import FORMS, SPOILS
from tests.unit.test_check import busy


def begun(depth: int, limit: int = 9) -> World:
    """Two requests that decode, and a third whose next token is its last."""
    world = World(num_pages=32, page_size=4, max_running=4, max_batch_tokens=64, max_model_len=40, pipeline_depth=depth)
    world.admit("a", [1, 2, 3], limit)
    world.admit("b", [4, 5, 6], limit)
    world.steps(2)
    world.admit("c", [7, 8], 1)
    world.tick()
    return world


def result(world: World) -> ForwardDone:
    return next(event for event in reversed(world.log) if isinstance(event, ForwardDone))


@given(form=st.sampled_from(FORMS), depth=st.integers(0, 2), gone=st.booleans())
def test_in_every_form_each_client_hears_the_same(form: str, depth: int, gone: bool) -> None:
    """What stands behind a row's last token, and behind that of one whose client has gone, is dropped."""
    world = begun(depth)
    while not any(row.rid == "c" for row in world.flights[0].rows):
        world.done()
    if gone:
        world.abort("b")
    world.done(form=form)
    told = result(world)
    assert [type(told.tokens), told.digest is None] == [list, form == "bare"]
    assert told.counts == {"counts": [1, 1, 1], "more": [1, 1 + gone, 2]}.get(form)
    assert world.state.executor_present and ("c", 0, 0) in world.ended
    world.finish()


@pytest.mark.parametrize("kind", SPOILS)
@pytest.mark.parametrize("depth", [0, 2])
def test_each_wrong_result_loses_the_executor(kind: str, depth: int) -> None:
    world = begun(depth)
    heard = [client.heard for client in world.clients.values()]
    world.spoiled(kind)
    assert not world.state.executor_present and [client.heard for client in world.clients.values()] == heard
    assert (result(world).counts is not None) is (kind in ("counts", "none", "more") or (kind == "order" and not depth))
    world.finish()


ARRAYS = (np.array(1), np.array([0, 1]), np.array([[0, 1]]), np.array(["a", "b"]), np.array([]))


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}{[*array.shape]}")
@pytest.mark.parametrize("name", ["tokens", "counts", "ended", "scores"])
def test_an_array_in_any_field_of_a_result_is_taken_or_loses_the_executor(name: str, array: np.ndarray) -> None:
    state = busy()
    step_now, wanted = state.in_flight[0], state.in_flight[0].expected
    done = ForwardDone(t=3, step=step_now.step, tokens=[7] * wanted, digest=step_now.digest)
    step(state, replace(done, **{name: array}))
    taken = name == "scores" or (name == "ended" and not array.size)
    assert state.executor_present is taken
    state.check()


def test_a_second_token_is_wrong_only_where_a_row_goes_on() -> None:
    """Where every row is over with its next token, more of them are right, so something else is spoiled."""
    world = World(num_pages=32, page_size=4, max_running=4, max_batch_tokens=64, max_model_len=40)
    world.admit("a", [1, 2, 3], 1)
    world.tick()
    world.spoiled("more")
    assert result(world).counts == [2, 1] and not world.state.executor_present
    world.finish()
