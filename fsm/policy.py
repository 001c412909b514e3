"""Policies: small pure functions that say who is admitted first, and who gives pages back first.

A policy ranks requests: the smallest rank is admitted first and preempted last. It may also choose anew at every
admission (`choose`), looking at the `LOOKS_AT` requests that have waited longest. Whatever a policy says, a request is
overtaken at most `MAX_OVERTAKEN` times by requests that came after it: then it is next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leftfold.fsm.request import Request
    from leftfold.fsm.state import State

Rank = tuple[Any, ...]
"""Of integers, if it is to be the same everywhere; who registers a policy is taken at his word."""
RankFunction = Callable[["Request"], Rank]
ChooseFunction = Callable[["State", Sequence["Request"]], "Request"]

LOOKS_AT = 256
MAX_OVERTAKEN = 64

NO_DEADLINE = 1 << 62


@dataclass(frozen=True, slots=True)
class Policy:
    """`rank`: pure and fixed while a request lives, unique by ending in its arrival. `choose`: the next of those that
    have waited longest (in order of arrival). `preempts`: a waiting request may take the place of a running one whose
    `rank[0]` is larger.
    """

    rank: RankFunction
    choose: ChooseFunction | None = None
    preempts: bool = False


def fcfs(request: Request) -> Rank:
    """First come, first served; a preempted request keeps its place."""
    return (request.arrival,)


def priority(request: Request) -> Rank:
    """The larger `Admit.priority` first, first come first served within a class."""
    return (-request.priority, request.arrival)


def sjf(request: Request) -> Rank:
    """Shortest job first: by the tokens a request can reach at most."""
    return (request.limit, request.arrival)


def edf(request: Request) -> Rank:
    """Earliest deadline first; those without one after all others."""
    return (request.deadline_at or NO_DEADLINE, request.arrival)


def longest_prefix(state: State, waiting: Sequence[Request]) -> Request:
    """The one of which most tokens are in the prefix cache."""
    return max(waiting, key=lambda request: (state.cached_pages(request), -request.arrival))


def shortest_prefill(state: State, waiting: Sequence[Request]) -> Request:
    """The one with the fewest tokens to compute before its next one; those that have begun to answer before all others,
    since somebody reads along.
    """
    size = state.config.page_size

    def place(request: Request) -> Rank:
        known = len(request.tokens)
        return (known == request.prompt_len, known - size * state.cached_pages(request), request.arrival)

    return min(waiting, key=place)


def least_served(state: State, waiting: Sequence[Request]) -> Request:
    """One of the tenant that has had the fewest tokens computed (virtual token counters, Sheng et al. 2024)."""
    served = state.served_tokens()
    return min(waiting, key=lambda request: (served.get(request.tenant, 0), request.arrival))


POLICIES: dict[str, Policy] = {
    "fcfs": Policy(fcfs),
    "priority": Policy(priority, preempts=True),
    "lpm": Policy(fcfs, longest_prefix),
    "sjf": Policy(sjf),
    "spf": Policy(fcfs, shortest_prefill),
    "fair": Policy(fcfs, least_served),
    "edf": Policy(edf),
}

BUILT_IN: Sequence[str] = tuple(sorted(POLICIES))
"""Names of those that are always there."""


def register(name: str, policy: Policy) -> None:
    """Make a policy known by `name`; whoever makes or folds a state with it registers it first."""
    POLICIES[name] = policy
