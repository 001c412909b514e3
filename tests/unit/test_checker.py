"""A `Checker` that has seen a state before finds in it exactly what one finds that sees it for the first time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from leftfold.events import Admit, ForwardDone, SamplingParams, Tick
from leftfold.fsm import InvariantViolation, State, check, step
from leftfold.fsm.check import Checker
from leftfold.fsm.lifecycle import Phase
from leftfold.fsm.request import Seat
from leftfold.fsm.rows import RowSet
from leftfold.replay.fuzzing import World
from tests.unit.test_check import CONFIG, busy

Spoil = Callable[[], object]


def calm() -> State:
    """Two rows decode, one of them on a page that it found; another page is cached, and nobody waits."""
    state = State(CONFIG)

    def run(steps: int) -> None:
        for token in range(steps):
            plan = step(state, Tick(t=1)).plan
            assert plan is not None
            tokens = [40 + token + row.slot for row in plan.rows if row.samples]
            step(state, ForwardDone(t=1, step=plan.step, tokens=tokens, digest=plan.digest))

    shared = [1, 2, 3, 4]
    for rid, prompt, answer in (("a", [*shared, 5, 6, 7, 8, 9], 3), ("b", [*shared, 50, 51], 30), ("c", [60] * 6, 30)):
        step(state, Admit(t=0, rid=rid, prompt=prompt, params=SamplingParams(max_tokens=answer)))
        run(3)
    step(state, Tick(t=1))
    return state


def at_rest() -> State:
    """Of two rows one is planned up to its limit, and computes the last but one of its positions."""
    world = World(num_pages=8, page_size=4, max_running=2, max_batch_tokens=8, max_model_len=20, pipeline_depth=2)
    world.admit("short", [1, 2, 3], 2)
    world.admit("long", [4, 5], 9)
    world.tick()
    world.tick()
    assert len(world.state.resting) == 1 and len(world.state.decoding.seats) == 1
    return world.state


def seats_of(state: State) -> list[Seat]:
    return [*state.decoding.seats, *state.resting.values(), *state.prefilling.values(), *state.stopping]


def spoils(state: State) -> Iterator[tuple[str, Spoil]]:
    """One thing made wrong, or just another: all that slots, pages and rows are judged by."""
    columns, pool, decoding = state.columns, state.pool, state.decoding.seats
    for number, seat in enumerate(seats_of(state)):
        for by in (-1, 1, 4):
            for name in ("computed", "planned", "runway", "base"):
                column = getattr(columns, name)
                yield f"{name} {number} {by}", partial(column.__setitem__, seat.slot, column[seat.slot] + by)
            for name in ("slot", "order", "target", "edge", "last"):
                yield f"{name} {number} {by}", partial(setattr, seat, name, getattr(seat, name) + by)
            limit = int(columns.computed[seat.slot]) + by
            yield f"limit {number} {by}", partial(setattr, seat.request, "limit", limit)
        for phase in Phase:
            yield f"{phase} {number}", partial(setattr, seat.request, "phase", phase)
        yield f"no seat {number}", partial(setattr, seat.request, "seat", None)
        yield f"page more {number}", partial(seat.pages.append, [*pool.free][0])
        yield f"page less {number}", seat.pages.pop
        yield f"page again {number}", partial(seat.pages.__setitem__, -1, seat.pages[0])
        yield f"slot to nobody {number}", partial(state.by_slot.__setitem__, seat.slot, None)
        yield f"slot free {number}", partial(state.free_slots.append, seat.slot)
        yield f"waits at edge {number}", partial(state.at_edge.append, seat.slot)
        yield f"rests {number}", partial(state.resting.__setitem__, seat.slot, seat)
        yield f"rests in another slot {number}", partial(state.resting.__setitem__, seat.slot + 1, seat)
        yield f"does not rest {number}", partial(state.resting.pop, seat.slot, None)
        yield f"row more {number}", partial(decoding.append, seat)
        yield f"stops {number}", partial(state.stopping.append, seat)
        yield f"prefills {number}", partial(state.prefilling.__setitem__, seat.slot, seat)
    for page in range(len(pool)):
        for by in (-1, 1):
            yield f"refs {page} {by}", partial(pool.refs.__setitem__, page, pool.refs[page] + by)
        yield f"free {page}", partial(pool.free.__setitem__, page, None)
        yield f"not free {page}", partial(pool.free.pop, page, None)
        yield f"cached {page}", partial(pool.cached.__setitem__, page, None)
        yield f"not cached {page}", partial(pool.cached.pop, page, None)
        yield f"key {page}", partial(pool.keys.__setitem__, page, b"k" * 16)
        yield f"no key {page}", partial(pool.keys.__setitem__, page, None)
        yield f"published {page}", partial(pool.published.__setitem__, b"k" * 16, page)
    for key in [*pool.published]:
        yield f"withdrawn {key.hex()}", partial(pool.published.pop, key)
        yield f"elsewhere {key.hex()}", partial(pool.published.__setitem__, key, 0)
    yield "slot lost", state.free_slots.pop
    yield "slots more", partial(state.by_slot.append, None)
    yield "out of order", decoding.reverse
    yield "row less", decoding.pop
    yield "no rows", partial(setattr, state, "decoding", RowSet([], np.zeros(0, np.int64)))
    yield "nobody prefills", state.prefilling.clear
    yield "nobody stops", state.stopping.clear
    yield "edge forgotten", state.at_edge.clear
    yield "rest forgotten", state.resting.clear
    yield "nothing flies", state.in_flight.clear
    yield "other pages", partial(setattr, state, "config", replace(CONFIG, page_size=3))
    yield "other config", partial(setattr, state, "config", replace(CONFIG))


def verdict(checker: Checker, state: State) -> str | None:
    """What is found, by message; other exceptions, of a state that is spoiled beyond reading, by type."""
    try:
        checker.check(state, thorough=False)
    except InvariantViolation as error:
        return str(error)
    except (LookupError, ValueError) as error:
        return type(error).__name__
    return None


@pytest.mark.parametrize("make", [busy, calm, at_rest])
def test_what_became_wrong_is_found_as_if_seen_for_the_first_time(make: Callable[[], State]) -> None:
    names = [name for name, _ in spoils(make())]
    found = 0
    for number, name in enumerate(names):
        state, checker = make(), Checker()
        checker.check(state)
        _, spoil = [*spoils(state)][number]
        spoil()
        expected = verdict(Checker(), state)
        assert [verdict(checker, state), verdict(checker, state)] == [expected, expected], name
        found += expected is not None
    assert found > len(names) / 2


def test_rows_that_move_within_their_pages_are_all_that_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    state, checker, looks = calm(), Checker(), []
    assert state.pool.cached and state.pool.published and len(state.decoding.seats) == 2
    checker.check(state)
    look = check._check_pages
    monkeypatch.setattr(check, "_check_pages", lambda *seen: [looks.append(seen), look(*seen)])
    slot = next(seat.slot for seat in state.decoding.seats if seat.slot not in state.at_edge)
    state.columns.planned[slot] -= 1
    checker.check(state, thorough=False)
    assert not looks
    state.pool.free.move_to_end([*state.pool.free][0])
    checker.check(state, thorough=False)
    assert len(looks) == 1
