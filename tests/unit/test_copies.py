"""A copied state shares nothing that can change, and has every attribute: found by walking both object graphs."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from enum import Enum
from typing import Any

import numpy as np
import pytest

from leftfold.events import EVENTS, Abort, Admit, Call, Pause, SamplingParams, UpdateWeights
from leftfold.fsm import Config, Gate, Phase, State, step
from leftfold.fsm.columns import Cells, Columns
from leftfold.fsm.pages import PagePool
from leftfold.fsm.policy import Policy
from leftfold.fsm.request import Request
from tests.unit.test_check import busy, live

FROZEN = (int, str, bytes, bool, float, type(None), Enum, frozenset, Config, SamplingParams, Policy, range, *EVENTS)
"""What no event ever changes."""

SHARED: tuple[tuple[str, str], ...] = (
    ("Request", "tokens"),  # replaced, never written
    ("Request", "want"),  # of the event
    ("ChunkRow", "tokens"),
    ("StepRows", "starts"), ("StepRows", "ends"),  # a plan's rows hold values only
    ("StepRows", "inputs"),
)
"""Mutable values that copies may share: class and attribute that holds them."""


def over(value: Any) -> bool:
    """Whether it is a request that has finished: nothing of it changes any more, and it leads nowhere."""
    return isinstance(value, Request) and value.phase is Phase.FINISHED


def parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What a value is made of, by name."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield "key", key
            yield f"[{key!r}]", item
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from zip(value._fields, value, strict=True)
    elif hasattr(value, "__slots__") or hasattr(value, "__dict__"):
        for name in (*getattr(type(value), "__slots__", ()), *getattr(value, "__dict__", {})):
            if hasattr(value, name):
                yield name, getattr(value, name)
        if isinstance(value, list):  # what derives from a container
            yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, np.ndarray | memoryview):
        return
    else:
        try:
            yield from ((f"[{index}]", item) for index, item in enumerate(value))
        except TypeError:
            raise AssertionError(f"the walk does not know {type(value)}") from None


def mutable(root: State) -> dict[int, tuple[str, Any, bool]]:
    """Every object that can be reached and may change: its path, itself, and whether it may be shared."""
    found: dict[int, tuple[str, Any, bool]] = {}
    todo: list[tuple[str, Any, bool]] = [("state", root, False)]
    while todo:
        path, value, allowed = todo.pop()
        if isinstance(value, FROZEN) or over(value) or callable(value) or id(value) in found:
            continue
        empty = isinstance(value, tuple) and not value
        if not empty:
            found[id(value)] = (path, value, allowed)
        for name, part in parts(value):
            todo.append((f"{path}.{name}", part, allowed or (type(value).__name__, name) in SHARED))
    return found


def states() -> list[State]:
    state = busy()
    state.listen()
    step(state, UpdateWeights(t=3, call="u", source="s", version="2"))
    step(state, Call(t=3, call="c", verb="profile", args={"a": [1]}))
    state.suspects[next(iter(state.live))] = 5
    return [state, State(state.config), after_some()]


def after_some() -> State:
    """As busy, and some are over: one in line, and one of three choices that follows a first one, which lives."""
    state = busy()
    step(state, Admit(t=3, rid="g", prompt=[1, 2, 3, 4, 5], params=SamplingParams(max_tokens=4, n=3)))
    step(state, Abort(t=3, rid="g", choice=1))
    step(state, Abort(t=3, rid="d"))
    assert [request.key for request in state.finished] == [("g", 0, 1), ("d", 0, 0)]
    assert state.live["g", 0, 2].leader is state.live["g", 0, 0]
    return state


@pytest.mark.parametrize("state", states(), ids=["busy", "fresh", "after some"])
def test_copy_shares_nothing_mutable(state: State) -> None:
    original, twin = mutable(state), mutable(state.copy())
    shared = [original[key] for key in original.keys() & twin.keys()]
    assert not [path for path, value, allowed in shared if not allowed and not isinstance(value, tuple)]


@pytest.mark.parametrize("state", states(), ids=["busy", "fresh", "after some"])
def test_arrays_and_views_of_a_copy_are_its_own(state: State) -> None:
    twin = state.copy()
    for name in Columns.__slots__:
        value = getattr(state.columns, name)
        if isinstance(value, np.ndarray):
            assert not np.shares_memory(value, getattr(twin.columns, name)), name
    for name in Cells.__slots__:
        assert np.shares_memory(np.asarray(getattr(twin.columns.cells, name)), getattr(twin.columns, name)), name
    assert np.shares_memory(twin.pool.behind, twin.pool.tokens)
    assert not np.shares_memory(twin.pool.behind, state.pool.behind)
    twin.pool.tokens[0, 0] = 77
    assert twin.pool.raw[:4].tobytes() == np.int32(77).tobytes() != state.pool.raw[:4].tobytes()


def test_a_copy_has_every_number_and_text_of_the_original() -> None:
    state = busy()
    step(state, Pause(t=3, call="p", mode="keep"))
    assert state.gate is not Gate.RUNNING
    plain = {name: value for name, value in vars(state).items() if isinstance(value, int | str | bytes)}
    for name, value in plain.items():
        setattr(state, name, _another(value))
    twin = state.copy()
    assert {name: getattr(twin, name) for name in plain} == {name: getattr(state, name) for name in plain}
    assert twin.gate is state.gate and twin.policy is state.policy and twin.config is state.config


def test_requests_and_states_are_copied_by_their_own_word_and_never_pickled() -> None:
    state = busy()
    twin = copy.copy(state)
    assert twin is not state and twin.digest() == state.digest()
    request = live(state, "a")
    again = copy.copy(request)
    assert again is not request and again.key == request.key and again.seat is None is not request.seat
    for one in (state, request):
        for how in (pickle.dumps, copy.deepcopy):
            with pytest.raises(TypeError, match="not pickled"):
                how(one)


def _another(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    return value + {int: 7, str: "7", bytes: b"7"}[type(value)]


@pytest.mark.parametrize("state", states(), ids=["busy", "fresh", "after some"])
def test_a_copy_has_every_attribute_and_says_the_same(state: State) -> None:
    twin = state.copy()
    assert vars(twin).keys() == vars(state).keys()
    for mine, its in ((state.columns, twin.columns), (state.pool, twin.pool)):
        for name in type(mine).__slots__:
            assert hasattr(its, name), f"{type(mine).__name__}.{name} was not copied"
    for seat, other in zip(state.running(), twin.running(), strict=True):
        for name in type(seat).__slots__:
            if name != "request":
                assert getattr(seat, name) == getattr(other, name), f"Seat.{name} was not copied"
        for name in type(seat.request).__slots__:
            if name not in ("seat", "leader", "tokens"):
                assert getattr(seat.request, name) == getattr(other.request, name), f"Request.{name} was not copied"
    assert [[seat.request.key for seat in step.rows.decode.seats] for step in twin.in_flight] == [
        [seat.request.key for seat in step.rows.decode.seats] for step in state.in_flight
    ]
    twin.check()
    assert twin.digest() == state.digest()


def test_copies_share_what_is_over_and_it_leads_nowhere() -> None:
    state = after_some()
    twin = state.copy()
    assert [*map(id, twin.finished)] == [*map(id, state.finished)] and twin.requests["d"] is state.requests["d"]
    for request in state.finished:
        assert over(request)
        for name, part in parts(request):
            frozen = isinstance(part, (*FROZEN, tuple)) or callable(part)
            assert frozen or not len(part), f"{request.key} leads to {name} {part!r}"


def test_the_walk_finds_what_is_shared() -> None:
    state = busy()
    twin = state.copy()
    twin.left = state.left
    twin.pool.refs = state.pool.refs
    assert isinstance(twin.pool, PagePool)
    both = mutable(state).keys() & mutable(twin).keys()
    assert {id(state.left), id(state.pool.refs)} <= both
