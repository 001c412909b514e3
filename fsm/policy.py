"""Policies: small pure functions that rank requests; the smallest rank runs first and is preempted last."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from leftfold.fsm.request import Request

Rank = tuple[int, ...]
Policy = Callable[["Request"], Rank]


def fcfs(request: Request) -> Rank:
    """First come, first served; a preempted request keeps its place."""
    return (request.arrival,)


def priority(request: Request) -> Rank:
    """The larger `Admit.priority` first, first come first served within a class."""
    return (-request.priority, request.arrival)


POLICIES: Mapping[str, Policy] = {"fcfs": fcfs, "priority": priority}
