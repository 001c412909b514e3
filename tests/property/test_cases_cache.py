"""Faults from the field that concern the prefix cache and what is told of it (C40, C41, C42, C44, C77)."""

from __future__ import annotations

import pytest

from leftfold.fsm import KvRemoved, KvStored
from leftfold.fsm.prefix import namespace
from tests.cases import AT_EACH_DEPTH, cached, fill, one_by_one, small

pytestmark = AT_EACH_DEPTH


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("length", [4, 8, 12])
def test_c40_a_full_hit_still_computes_a_token(depth: int, page_size: int, length: int) -> None:
    world = small(depth, page_size=page_size, num_pages=32 // page_size)
    for _ in range(2):
        world.admit("a", list(range(1, length + 1)), 1)
        world.finish(replay=False)
    assert cached(world, "a") == (length - 1) // page_size * page_size


def test_c41_another_salt_does_not_hit(depth: int) -> None:
    world = small(depth)
    for salt, hit in (("", 0), ("x", 0), ("", 4), ("x", 4)):
        world.admit("a", list(range(1, 9)), 1, salt=salt)
        world.finish()
        assert cached(world, "a") == hit


def test_c41_every_part_of_the_namespace_is_told_apart(depth: int) -> None:
    parts = [
        namespace(generation=depth), namespace(generation=depth + 1), namespace(generation=depth, adapter="x"),
        namespace(generation=depth, salt="x"), namespace(generation=depth, adapter="x", adapter_generation=1),
        namespace(generation=depth, adapter="x", salt="x"), namespace(generation=depth, media=["x"]),
        namespace(generation=depth, adapter="", adapter_generation=1), namespace(generation=depth, salt='x"],["media'),
    ]  # fmt: skip
    assert len(set(parts)) == len(parts)


@pytest.mark.parametrize("live", ["recompute", "keep"])
def test_c42_other_weights_find_nothing_of_the_old_ones(depth: int, live: str) -> None:
    world = small(depth)
    for version, hit in (("", 0), ("", 4), ("2", 0), ("2", 4)):
        if version != world.desk.version:
            call = world.control("UpdateWeights", source="w", version=version, live=live)
            world.finish()
            assert world.desk.answered[call].ok
        world.admit("a", range(1, 9), 1)
        world.finish()
        assert (cached(world, "a"), world.ended["a", 0, 0].version) == (hit, version)


def test_c42_weights_that_cannot_be_had_change_nothing(depth: int) -> None:
    world = small(depth)
    world.admit("a", range(1, 9), 1)
    world.finish()
    call = world.control("UpdateWeights", source="missing", version="2")
    world.admit("a", range(1, 9), 1)
    world.finish()
    assert not world.desk.answered[call].ok and "missing" in world.desk.answered[call].info
    assert (cached(world, "a"), world.ended["a", 0, 0].version) == (4, "")


@pytest.mark.parametrize("length", [8, 12])
def test_c44_what_a_step_in_flight_computed_before_a_flush_is_not_found_after_it(depth: int, length: int) -> None:
    world = small(depth)
    world.admit("a", range(1, 9), length - 7)
    if length > 8:
        one_by_one(world, length - 8)
    fill(world)
    call = world.control("FlushCache")
    assert world.desk.answered[call].ok
    world.finish()
    assert not world.state.pool.published and not world.state.pool.cached
    world.admit("b", range(1, 9), 1)
    world.finish()
    assert cached(world, "b") == 0


def test_c77_routers_hold_what_can_be_found_while_copies_come_and_go(depth: int) -> None:
    world = small(depth, num_pages=4)
    heard = []
    take = world.take

    def listening(event, plan=None):  # type: ignore[no-untyped-def]
        effects = take(event, plan)
        heard.extend(effects.kv_events)
        return effects

    world.take = listening  # type: ignore[method-assign]
    world.admit("a", range(1, 9), 1)
    world.admit("b", range(1, 9), 1)
    world.finish(replay=False)  # both computed both pages
    stored = [event for event in heard if isinstance(event, KvStored)]
    assert [event.parent for event in stored] == [None, stored[0].key]
    assert [tuple(event.tokens) for event in stored] == [(1, 2, 3, 4), (5, 6, 7, 8)]
    world.admit("c", [9] * 16, 1)  # needs every page
    world.finish(replay=False)
    removed = [event.key for event in heard if isinstance(event, KvRemoved)]
    assert sorted(removed) == sorted(event.key for event in stored)
    assert world.router is not None and len(world.router.resident) == 4
