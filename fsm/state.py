"""The state that events fold into, and its faces: check, digest, copy, stats."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from leftfold.events.digest import START
from leftfold.fsm import check, copying, fingerprint
from leftfold.fsm.columns import Columns
from leftfold.fsm.gate import RUNNING, STOPPED
from leftfold.fsm.limits import Config
from leftfold.fsm.line import Line
from leftfold.fsm.pages import PagePool
from leftfold.fsm.policy import POLICIES, Policy, fcfs
from leftfold.fsm.prefix import extend_keys, namespace
from leftfold.fsm.queue import SortedQueue
from leftfold.fsm.request import Request, Seat
from leftfold.fsm.rows import EMPTY, RowSet, StepRows
from leftfold.fsm.tenants import Tenants

KEPT_FINISHED = 256
"""So many finished requests can still be looked up by rid."""


class InFlight:
    """A step that the executor has and has not answered.

    `expected`: tokens its result brings; `ended`: slots of its rows that ended meanwhile; `ops`: control operations
    that it starts.
    """

    __slots__ = ("digest", "ended", "expected", "ops", "rows", "step")

    def __init__(
        self, step: int, digest: str, rows: StepRows, ops: Sequence[int] = (), ended: list[int] | None = None
    ) -> None:
        self.step = step
        self.ops = ops
        self.expected = len(rows.decode.seats)
        if rows.chunks:
            self.expected += sum([chunk.samples for chunk in rows.chunks])
        self.digest = digest
        self.rows = rows
        self.ended = ended or []


class ControlCall:
    """A control call in the queue. `barrier`: no rows while it waits; `op`: its operation, once that is in a plan."""

    __slots__ = ("barrier", "event", "op")

    def __init__(self, event: Any, barrier: bool, op: int | None = None) -> None:
        self.event = event
        self.barrier = barrier
        self.op = op


class State:
    """A fresh state is RUNNING with its executor present.

    `requests[rid]` is the newest request of that id (its first choice), finished ones included for a while; `live`
    holds those without a terminal output by (rid, epoch, choice), `by_rid` the same by id, in the order they came.
    `prefilling` (by slot) are the rows with prompt left to plan, `decoding` those that are planned on by one token
    each, both in join order; `resting` (by slot, in the order they came there) those that are planned up to their
    limit. `at_edge`: slots of `decoding` that need a page to be planned on. `stopping`: seats that ended while a step
    in flight names them. `left`: slots that left the rows since the last plan. `voids`: failed steps since the
    executor's start.

    `suspects`: live requests that may be what made steps fail, and the positions they have to get past to be cleared.

    A drain has its `drain_mode` and runs what arrived before `gate_seq`; `frozen`: the gate closes from PAUSED.
    `controls`: control calls in log order; `asleep`: some of weights, kv; `version`: of the weights.
    """

    def __init__(self, config: Config, pool: PagePool | None = None, columns: Columns | None = None) -> None:
        self.config = config
        self.policy: Policy = POLICIES[config.policy]
        self.gate = RUNNING
        self.drain_mode = ""
        self.gate_seq = 0
        self.pause_calls: list[str] = []
        self.frozen = False
        self.controls: deque[ControlCall] = deque()
        self.asleep: list[str] = []
        self.version = ""
        self.executor_present = True
        self.incarnation = 0
        self.generation = 0
        self.root = namespace(generation=0)
        self.requests: dict[str, Request] = {}
        self.live: dict[tuple[str, int, int], Request] = {}
        self.by_rid: dict[str, list[Request]] = {}
        self.finished: deque[Request] = deque()
        self.waiting = Line(self.policy.rank is not fcfs)
        self.tenants = Tenants()
        self.deadlines = SortedQueue()
        self.pool = PagePool(config.num_pages, config.page_size) if pool is None else pool
        self.columns = Columns(config.slots) if columns is None else columns
        self.free_slots = list(range(config.slots - 1, -1, -1))
        self.by_slot: list[Seat | None] = [None] * config.slots
        self.decoding: RowSet = EMPTY
        self.prefilling: dict[int, Seat] = {}
        self.at_edge: list[int] = []
        self.resting: dict[int, Seat] = {}
        self.stopping: list[Seat] = []
        self.suspects: dict[tuple[str, int, int], int] = {}
        self.left: list[int] = []
        self.in_flight: deque[InFlight] = deque()
        self.next_step = 1
        self.next_arrival = 0
        self.next_order = 0
        self.next_op = 1
        self.chain = START
        self.voids = 0
        self.memo: dict[str, int] = {}
        self.closing_calls: list[str] = []
        self.closing_at = 0
        self.counts: dict[str, int] = dict.fromkeys(COUNTERS, 0)

    def count(self, name: str, by: int = 1) -> None:
        """Add to a counter of `stats`."""
        self.counts[name] += by

    def running(self) -> list[Seat]:
        """Seats of all rows, in the order they joined."""
        if not self.prefilling and not self.resting:
            return self.decoding.seats
        rows = (*self.decoding.seats, *self.resting.values(), *self.prefilling.values())
        return sorted(rows, key=lambda seat: seat.order)

    @property
    def row_count(self) -> int:
        """How many rows there are."""
        return len(self.decoding.seats) + len(self.resting) + len(self.prefilling)

    def known(self, request: Request) -> int:
        """Tokens a request has: its prompt and what was committed."""
        seat = request.seat
        if seat is None:
            return len(request.tokens)
        return max(len(request.tokens), self.columns.cells.computed[seat.slot] + 1)

    @property
    def queued_tokens(self) -> int:
        """Tokens of all requests in line."""
        return self.waiting.tokens

    def cached_pages(self, request: Request) -> int:
        """Pages of a waiting request that the prefix cache holds now; counted again when that can have changed."""
        if not request.reads_cache:
            return 0
        published, known = self.pool.published, len(request.tokens)
        basis = (known, self.pool.published_ever, len(published))  # while nothing is published, pages are only lost
        if request.looked[0] == basis:
            return request.looked[1]
        size = self.config.page_size
        count, found = (known - 1) // size, 0
        extend_keys(request.keys, request.root, request.tokens, count, size)
        while found < count and request.keys[found] in published:
            found += 1
        request.looked = (basis, found)
        return found

    def served_tokens(self) -> dict[str, int]:
        """Tokens computed by tenant, those of rows that run included."""
        served = self.tenants.served.copy()
        for seat in self.running():
            tenant = seat.request.tenant
            served[tenant] = served.get(tenant, 0) + self.columns.cells.planned[seat.slot] - seat.start
        return served

    def flies(self, seat: Seat) -> bool:
        """Whether a step in flight computes something for `seat`."""
        cells = self.columns.cells
        return bool(self.in_flight) and cells.planned[seat.slot] > cells.computed[seat.slot]

    @property
    def wake_at(self) -> int | None:
        """Absolute µs of the next deadline; none expires in a stopped engine."""
        keys, closing_at = self.deadlines.keys, self.closing_at
        if not keys and not closing_at or self.gate is STOPPED:
            return None
        if not keys:
            return closing_at
        due = keys[0][0]
        return min(due, closing_at) if closing_at else due

    def widen(self, slots: int) -> None:
        """Make room for so many slots; those that are there stay."""
        more = range(len(self.by_slot), slots)
        if more:
            self.columns.widen(slots)
            self.by_slot += [None] * len(more)
            self.free_slots = [*reversed(more), *self.free_slots]

    def listen(self) -> None:
        """From now on effects tell what enters and leaves the prefix cache."""
        self.pool.journal = self.pool.journal or []

    def check(self, thorough: bool = True) -> None:
        """Raise `InvariantViolation` unless every invariant of a single state holds; not `thorough`: the cheap ones."""
        check.check(self, thorough)

    def digest(self) -> str:
        """A digest of the whole state, 32 hex digits; equal states have equal digests."""
        return fingerprint.digest(self)

    def __reduce__(self) -> str:
        raise TypeError("a state is not pickled: fsm/snapshot.py writes it, and `copy` copies it")

    def __copy__(self) -> State:
        return self.copy()

    def copy(self) -> State:
        """An independent state that behaves the same."""
        return copying.copy(self)

    def stats(self) -> Mapping[str, int | str | bool]:
        """Gauges and counters, functions of this state alone."""
        pool = self.pool
        return {
            "gate": self.gate.value,
            "asleep": " ".join(self.asleep),
            "version": self.version,
            "executor_present": self.executor_present,
            "running": self.row_count,
            "waiting": len(self.waiting),
            "stopping": len(self.stopping),
            "live": len(self.live),
            "in_flight": len(self.in_flight),
            "num_pages": len(pool),
            "pages_free": len(pool.free),
            "pages_cached": len(pool.cached),
            "pages_held": pool.held,
            "queued_tokens": self.queued_tokens,
            **self.counts,
        }


COUNTERS = (
    "steps", "preemptions", "prompt_tokens", "generation_tokens", "prefix_queries", "prefix_hits", "ignored", "refused",
    "finished_stop", "finished_length", "finished_abort", "finished_error", "finished_deadline", "failed_steps",
)  # fmt: skip
