"""A request, and the seat it holds while it runs: what it owns is here, what changes every step is in columns."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from leftfold.events.plan import TokenArray
from leftfold.events.types import SamplingParams
from leftfold.fsm.columns import WATCHED
from leftfold.fsm.lifecycle import Phase
from leftfold.fsm.policy import Rank


@lru_cache(maxsize=64)
def _stops(ids: tuple[int, ...]) -> tuple[frozenset[int], tuple[int, ...]]:
    """The ids that end a request, and those of them that are watched by column; most requests have the same."""
    return frozenset(ids), tuple([token for token in sorted({*ids}) if token < WATCHED])


NEVER_LOOKED = ((-1, -1, -1), 0)
NO_TOKENS: TokenArray = np.empty(0, np.int32)

SEAT_FIELDS = (
    "edge", "final", "last", "order", "pages", "parent", "publishes", "request", "slot", "start", "stops", "target",
)  # fmt: skip
REQUEST_FIELDS = (
    "arrival", "cached", "choice", "deadline_at", "epoch", "failures", "key", "keys", "leader", "limit", "looked",
    "params", "phase", "preemptions", "priority", "prompt_len", "publishes", "queue_deadline_at", "rank",
    "reads_cache", "rid", "root", "salt", "seat", "seen", "stops", "tenant", "tokens", "want", "watched", "wishes",
)  # fmt: skip


class Seat:
    """One stay of a request in a slot. `pages` only grows, so a view of a plan may hold it for ever.

    `order`: counts joins, so rows sort by it. `start`: tokens found in cache. `target`: tokens known at the join, which
    the prefill computes. `last`: positions computed when its limit is reached. `publishes`: its full pages enter the
    prefix cache; not any more once the generation it joined with is over.
    While it decodes: `edge` is the position at which its current page is full; `parent` the prefix key of the page
    before that (None: it does not publish); `final` is `last` (0: look at every token, since it has stop ids that are
    too large to be watched).
    """

    __slots__ = SEAT_FIELDS

    def __init__(self, request: Request, slot: int, order: int, pages: list[int], start: int) -> None:
        self.request = request
        self.slot = slot
        self.order = order
        self.pages = pages
        self.start = start
        self.target = len(request.tokens)
        self.stops = request.stops
        self.last = request.limit - 1
        self.publishes = request.publishes
        self.edge = 0
        self.final = 0
        self.parent: bytes | None = None


class Request:
    """What rarely changes of a request, which is one choice of what was admitted.

    `key`: how plans address it: rid, epoch, choice.
    `tokens`: int32, all that is known (prompt, then generated) as of the last join; a running request's newer tokens
    are in its pages. `limit`: tokens at which it ends. `keys`: prefix keys of full pages, as far as computed, under
    `root`. `leader`: the choice of the same request that computes the prompt first. `deadline_at`,
    `queue_deadline_at`: absolute µs, 0 for none. `failures`: failed steps in which it was alone. `cached`: prompt
    tokens that the prefix cache held at its first join (-1 before). `seen`: pages found when last looked up, and how
    many had ever been published then: a bound on what can be found now, which changes no decision. `looked`: what its
    cached pages were counted from last, and how many they were.
    """

    __slots__ = REQUEST_FIELDS

    phase: Phase | None

    def __init__(
        self, rid: str, epoch: int, choice: int, arrival: int, tokens: TokenArray, params: SamplingParams
    ) -> None:
        self.rid = rid
        self.epoch = epoch
        self.choice = choice
        self.key = (rid, epoch, choice)
        self.arrival = arrival
        self.tokens = tokens
        self.prompt_len = len(tokens)
        self.params = params
        self.stops, self.watched = _stops(tuple(params.stop_token_ids))
        self.phase = None
        self.priority = 0
        self.tenant = ""
        self.want: Mapping[str, Any] | None = None
        self.rank: Rank = ()
        self.limit = 0
        self.deadline_at = 0
        self.queue_deadline_at = 0
        self.wishes = (True, True)
        self.reads_cache = self.publishes = True
        self.seen: tuple[int, int] | None = None
        self.looked = NEVER_LOOKED
        self.leader: Request | None = None
        self.salt = ""
        self.root = b""
        self.keys: list[bytes] = []
        self.seat: Seat | None = None
        self.cached = -1
        self.preemptions = 0
        self.failures = 0

    def use_cache(self, there: bool) -> None:
        """Whether it finds and publishes pages: as it wishes (to find, to publish), where there is a prefix cache."""
        self.reads_cache = there and self.wishes[0]
        self.publishes = there and self.wishes[1]

    def __reduce__(self) -> str:
        raise TypeError("a request is not pickled, nor copied with all that it leads to: fsm/snapshot.py writes states")

    def __copy__(self) -> Request:
        return self.copy()

    def copy(self) -> Request:
        """A copy without its seat."""
        other = Request(self.rid, self.epoch, self.choice, self.arrival, self.tokens, self.params)
        for name in REQUEST_FIELDS:
            setattr(other, name, getattr(self, name))
        other.keys = self.keys.copy()
        other.seat = None
        return other
