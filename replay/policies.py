"""Policies of a user's own, given as `module:function`: registered by name before a state is made or folded with them.

A log may name such a policy, but only whoever runs the program says that it may be imported. What it returns is looked
at before the reducer takes it: a function that fails must not keep the reducer from going on, nor a log from being
folded again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from importlib import import_module
from operator import index
from typing import Any

from leftfold.events import Admit, SamplingParams, Tick
from leftfold.fsm import POLICIES, Config, Policy, State, register, step
from leftfold.fsm.policy import BUILT_IN, ChooseFunction, Rank, RankFunction
from leftfold.fsm.request import Request

logger = logging.getLogger("leftfold.policies")

LARGEST = 2**63 - 1
"""Of a rank: what a snapshot's file can hold."""


class PolicyError(ValueError):
    """A policy that cannot be had, or that fails on a request; the message says why."""


def load(name: str, *, tried: bool = True, strict: bool = False) -> str:
    """Make `name` known if it is a `module:function`, and give it back. Raises `PolicyError`.

    The function takes a request (see `fsm/request.py`) and returns integers, smallest first; it must depend on nothing
    that changes while a request lives. Or the name is that of a `leftfold.fsm.Policy`.

    `tried`: it must have ranked two made-up requests. Where it fails on a request later, that one is ranked by its
    arrival; where it chooses none of those it was given, the one that has waited longest is next; the first time a
    warning is logged. `strict`: such a failure raises `PolicyError` instead, out of the reducer.
    """
    if name in BUILT_IN or (":" not in name and name in POLICIES):
        return name
    found = _found(name)
    if tried:
        _try(name, _guarded(name, found, strict=True))
    if strict or name not in POLICIES:
        register(name, _guarded(name, found, strict))
    return name


def _found(name: str) -> Policy | Callable[..., Any]:
    module, colon, attribute = name.partition(":")
    if not colon:
        raise PolicyError(f"policy {name!r} is none of {', '.join(POLICIES)}, and no module:function")
    found: object
    try:
        found = getattr(import_module(module), attribute)
    except (Exception, SystemExit) as error:  # somebody else's module: whatever it raises is told as its own
        text = _told(error) if isinstance(error, ImportError | AttributeError | ValueError) else _described(error)
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
            text += ": it is looked for on PYTHONPATH (PYTHONPATH=. for this folder)"
        raise PolicyError(f"policy {name!r} cannot be imported: {text}") from error
    if isinstance(found, Policy) or callable(found):
        return found
    raise PolicyError(f"policy {name!r} is a {type(found).__name__}, not a function or a Policy")


class _Guard:
    """What is done about a policy that fails."""

    def __init__(self, name: str, strict: bool) -> None:
        self._name = name
        self._strict = strict
        self._said = False

    def failed(self, error: BaseException, instead: str) -> None:
        """`instead`: what goes on in its place."""
        if self._strict:
            raise PolicyError(f"policy {self._name!r} failed on a request: {_described(error)}") from error
        if not self._said:
            self._said = True
            logger.warning(
                "policy %r failed on a request: %s; %s, each time (said once)", self._name, _described(error), instead
            )


def _guarded(name: str, found: Policy | Callable[..., Any], strict: bool) -> Policy:
    guard = _Guard(name, strict)
    if not isinstance(found, Policy):
        return Policy(_ranking(found, guard, always=True))
    ours = [POLICIES[built_in] for built_in in BUILT_IN]
    rank, choose = found.rank, found.choose
    if rank not in [policy.rank for policy in ours]:  # ours do not fail, and the planner knows them by who they are
        rank = _ranking(rank, guard, always=False)
    if choose is not None and choose not in [policy.choose for policy in ours]:
        choose = _choosing(choose, guard)
    return Policy(rank, choose, found.preempts)


def _ranking(found: Callable[..., Any], guard: _Guard, always: bool) -> RankFunction:
    """`always`: the arrival, which makes ranks unique, is added even where a rank ends in it already."""

    def rank(request: Request) -> Rank:
        try:
            ranks = _integers(found(request))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            guard.failed(error, "it is ranked by its arrival")
            ranks = ()
        if not always and ranks[-1:] == (request.arrival,):
            return ranks
        return (*ranks, request.arrival)

    return rank


def _integers(ranks: Any) -> Rank:
    """Raises TypeError, ValueError."""
    if not isinstance(ranks, tuple | list):
        raise TypeError(f"it returned {ranks!r:.80}, not a tuple of integers")
    integers = tuple([int(index(value)) for value in ranks])
    if integers and (max(integers) > LARGEST or min(integers) < -LARGEST):
        raise ValueError(f"it returned {ranks!r:.80}, with an integer of more than 64 bits")
    return integers


def _choosing(found: ChooseFunction, guard: _Guard) -> ChooseFunction:
    def choose(state: State, waiting: Sequence[Request]) -> Request:
        given = tuple(waiting)  # it may sort or empty the list
        try:
            chosen = found(state, waiting)
            if type(chosen) is not Request or chosen not in given:
                raise ValueError(f"it chose {chosen!r:.80}, none of those it was given")
            return chosen
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            guard.failed(error, "the one that has waited longest is next")
            return given[0]

    return choose


def _try(name: str, policy: Policy) -> None:
    """Let it rank a short and a long request, and choose between them. Raises `PolicyError`."""
    before = POLICIES.get(name)
    register(name, policy)
    params = SamplingParams(max_tokens=8)
    try:
        state = State(Config(64, 16, 2, 1024, 1024, policy=name))
        step(state, Admit(t=1, rid="made-up-1", prompt=[1, 2, 3], params=params))
        step(state, Admit(t=2, rid="made-up-2", prompt=[*range(200)], params=params, priority=1, tenant="made-up"))
        step(state, Tick(t=3))
    except PolicyError:
        raise
    except Exception as error:  # it has changed the state or a request, on which the reducer fails then
        raise PolicyError(f"policy {name!r} failed on a request: {_described(error)}") from error
    finally:
        if before is None:
            del POLICIES[name]
        else:
            register(name, before)


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {_told(error)}"


def _told(error: BaseException) -> str:
    """What an error says, in a line."""
    try:
        return " ".join(str(error).split())[:300]
    except Exception:  # somebody else's error, too
        return "it cannot even be told"


__all__ = ["PolicyError", "load"]
