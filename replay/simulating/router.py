"""Routers: which replica gets a request. Pure functions of the replicas' states, so that runs repeat."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from leftfold.events import Admit
from leftfold.fsm import State
from leftfold.fsm.prefix import extend_keys, namespace
from leftfold.replay.simulating.jobs import TokenArray

Router = Callable[[Admit, Sequence[State], int], int]
"""(request, states, number of the request) -> index of a replica."""

UNEVEN = 2.0
"""The prefix router leaves a replica that has so many times the load of the least loaded one (and 8 requests more)."""


def round_robin(event: Admit, states: Sequence[State], number: int) -> int:
    """One after the other."""
    return number % len(states)


def least_loaded(event: Admit, states: Sequence[State], number: int) -> int:
    """The one with the fewest live requests, the first among equals."""
    return min(range(len(states)), key=lambda index: (len(states[index].live), index))


def prefix(event: Admit, states: Sequence[State], number: int) -> int:
    """The one whose prefix cache holds most of the prompt, unless it is far busier; else the least loaded."""
    least = least_loaded(event, states, number)
    bound = max(UNEVEN * len(states[least].live), len(states[least].live) + 8)
    found = [_found(state, event) if len(state.live) <= bound else -1 for state in states]
    best = max(range(len(states)), key=lambda index: (found[index], -len(states[index].live), -index))
    return best if found[best] > 0 else least


def _found(state: State, event: Admit) -> int:
    """Pages of the prompt that `state` could take from its prefix cache."""
    size, tokens, keys = state.config.page_size, event.prompt, list[bytes]()
    root, published, found = namespace(generation=state.generation), state.pool.published, 0
    while (found + 1) * size < len(tokens):
        extend_keys(keys, root, _array(tokens), found + 1, size)
        if keys[found] not in published:
            break
        found += 1
    return found


def _array(tokens: object) -> TokenArray:
    return np.asarray(tokens, np.int32)


ROUTERS: dict[str, Router] = {"round_robin": round_robin, "least_loaded": least_loaded, "prefix": prefix}
