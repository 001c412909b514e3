"""That a request did not fit is remembered, but decides nothing: what would fit now joins now."""

from __future__ import annotations

import pytest

from leftfold.events.codec import plan_json
from leftfold.fsm import State, decide
from leftfold.replay.fuzzing import World


def plan_of(state: State, forgetful: bool) -> bytes | None:
    """What is decided, perhaps by a state that remembers no refusal."""
    twin = state.copy()
    for request in twin.waiting if forgetful else ():
        request.seen = None
    plan = decide(twin, 1 << 20)
    return None if plan is None else plan_json(plan)


@pytest.mark.parametrize("depth", [0, 1])
def test_one_page_that_is_published_may_make_many_findable(depth: int) -> None:
    world = World(num_pages=20, page_size=1, max_running=4, max_batch_tokens=64, max_model_len=60, policy="priority",
                  pipeline_depth=depth)  # fmt: skip
    shared = list(range(10))
    world.admit("publisher", [0, 50], 1)
    world.admit("holder", shared, 9)  # its first page stays private, since the other's is published
    world.tick()
    world.done()
    world.admit("filler", range(20, 29), 1)  # evicts the published first page
    world.tick()
    world.done()
    world.admit("late", [*shared, 40, 41, 42], 1)
    world.tick()
    world.done()
    assert world.state.requests["late"].seat is None
    world.admit("bridge", [0, 49], 3, priority=1)  # publishes the first page anew
    for _ in range(4):
        assert plan_of(world.state, forgetful=False) == plan_of(world.state, forgetful=True)
        world.tick()
        world.done()
    usage = world.ended["late", 0, 0].usage if ("late", 0, 0) in world.ended else None
    assert usage is not None and usage.cached_tokens == 10
    world.finish()


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_what_fits_to_the_last_page_joins_although_it_was_refused(prefix_cache: bool) -> None:
    world = World(num_pages=6, page_size=1, max_running=4, max_batch_tokens=64, max_model_len=60,
                  prefix_cache=prefix_cache)  # fmt: skip
    world.admit("holder", [90], 2)
    world.tick()
    world.admit("all", [10, 11, 12, 13, 14], 3)  # with its first new token it fills the pool
    world.done()
    world.tick()  # the holder decodes on; the other one is refused, and nothing will be published before it fits
    assert world.state.requests["all"].seen is not None
    world.done()
    assert world.state.requests["holder"].seat is None
    world.tick()
    assert world.state.requests["all"].seat is not None
    world.finish()
