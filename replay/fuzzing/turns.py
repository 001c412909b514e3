"""Whose turn is it: the order in which requests join and give way, by the clients' own accounts of the policies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from leftfold.events import ExecutionPlan, Plan
from leftfold.fsm import Config, State
from leftfold.fsm.prefix import extend_keys
from leftfold.replay.fuzzing.clients import Client, Key
from leftfold.replay.fuzzing.errors import Violation
from leftfold.replay.fuzzing.looks import client_in

FOR_EVER = 1 << 62
ALWAYS_PATIENT = 64
"""So often is a request overtaken by later ones at most; then it is its turn whatever the policy says."""

Place = tuple[int, ...]
PLACES: Mapping[str, Callable[[Client], Place]] = {
    "fcfs": lambda client: (client.serial,),
    "priority": lambda client: (-client.priority, client.serial),
    "sjf": lambda client: (client.limit, client.serial),
    "edf": lambda client: (client.deadline_at or FOR_EVER, client.serial),
}
"""Policies that rank: who has the smallest place is next, and gives way last."""


def cached_pages(state: State, client: Client) -> int:
    """Pages that the prefix cache has for a client in line, counted anew."""
    request, size = state.live[client.key], state.pool.page_size
    if not request.reads_cache:
        return 0
    count, keys = (client.known - 1) // size, [*request.keys]
    extend_keys(keys, request.root, request.tokens, count, size)
    return next((number for number, key in enumerate(keys[:count]) if key not in state.pool.published), count)


class Turns:
    """`joins`: how many joins there were; below `ALWAYS_PATIENT` nobody's patience can be at an end."""

    def __init__(self) -> None:
        self.joins = 0

    def look(
        self, state: State, policy: str, plan: Plan, clients: Mapping[Key, Client], line: Sequence[Client]
    ) -> None:
        """Before `plan` is applied; `line`: who waits and may run. Raises `Violation`."""
        over = {(end.rid, end.epoch, end.choice) for end in plan.ends}
        if plan.preempt and not plan.ops:
            self._look_at_victims(state, policy, plan, clients, [client for client in line if client.key not in over])
        if not plan.join:
            return
        self.joins += len(plan.join)
        if self.joins >= ALWAYS_PATIENT or state.suspects:
            return
        joined = [clients[join.rid, join.epoch, join.choice] for join in plan.join]
        keys = [client.key for client in joined]
        left = [client for client in line if client.key not in over and client.key not in keys and not client.key[2]]
        if left and policy in PLACES:
            place = PLACES[policy]
            last, best = max(joined, key=place), min(left, key=place)
            if place(last) > place(best):
                raise Violation("order", f"{last.key} joins before {best.key}, whose turn it is by {policy}")
        elif left and policy == "lpm":
            self._look_at_prefixes(state, joined[0], left)
        elif left and policy == "spf":
            self._look_at_prefills(state, joined, left)
        elif left and policy == "fair":
            self._look_at_shares(state, joined[0], left)

    def look_at_rows(self, config: Config, rows: Sequence[Client], lost: Sequence[Client]) -> None:
        """After other limits: `rows` run on, those that have `lost` their seat had worse places. Raises `Violation`."""
        place = PLACES.get(config.policy, PLACES["fcfs"])
        if not rows or not lost:
            return
        last, best = max(rows, key=place), min(lost, key=place)
        if place(last) > place(best) or len(rows) < config.rows:
            raise Violation("victim", f"{best.key} loses its seat by other limits, {last.key} stays ({len(rows)} rows)")

    def _look_at_victims(
        self, state: State, policy: str, plan: Plan, clients: Mapping[Key, Client], line: Sequence[Client]
    ) -> None:
        """Whoever has the best place of those that run stays, and nobody gives way in vain."""
        place = PLACES.get(policy, PLACES["fcfs"])
        rows = {seat.slot: clients[seat.request.key] for seat in state.running()}
        victims = [rows[slot] for slot in plan.preempt]
        best = min(rows.values(), key=place)
        if policy != "priority" and best in victims:
            raise Violation("victim", f"{best.key} gives way, which has the best place of all rows")
        if policy != "priority" or len(state.at_edge) > state.pool.usable:
            return
        worst = min(victim.priority for victim in victims)
        for victim in victims:
            if not any(client.priority > victim.priority for client in line):
                raise Violation("victim", f"{victim.key} gives way to nobody of a higher class")
        # Rows that a step in flight names give way after it: this plan leaves them out.
        leaving = [*plan.preempt, *(chunk.slot for chunk in plan.chunks if not chunk.length)]
        ending = [state.live[end.rid, end.epoch, end.choice].seat for end in plan.ends]
        leaving += [seat.slot for seat in ending if seat is not None]
        if not any(self._fits(state, client, leaving) for client in line if client.priority > worst):
            raise Violation("victim", f"{[victim.key for victim in victims]} give way to somebody who does not fit")
        if not state.in_flight and not state.prefilling and not plan.join:
            raise Violation("victim", f"{[victim.key for victim in victims]} give way, and nobody joins")

    def _fits(self, state: State, client: Client, leaving: Sequence[int]) -> bool:
        """Whether there are pages enough for what `client` knows, with those that only `leaving` (slots) hold."""
        pool = state.pool
        held = Counter(page for slot in leaving if (seat := state.by_slot[slot]) is not None for page in seat.pages)
        given = sum(count == pool.refs[page] for page, count in held.items())
        wanted = -(-client.known // pool.page_size)
        return wanted - cached_pages(state, client) <= pool.usable + given

    def _look_at_prefixes(self, state: State, first: Client, left: Iterable[Client]) -> None:
        found = {client.key: cached_pages(state, client) for client in (first, *left)}
        if found[first.key] < max(found.values()):
            raise Violation("order", f"{first.key} joins first, found in the cache are {found} pages")

    def _look_at_prefills(self, state: State, joined: Sequence[Client], left: Iterable[Client]) -> None:
        """Who has begun to answer goes on first, then whoever has least to compute, then whoever came first."""
        size = state.config.page_size

        def place(client: Client) -> Place:
            return (not client.heard, client.known - size * cached_pages(state, client), client.serial)

        places = [*map(place, joined)]
        if places != sorted(places) or places[-1] > min(map(place, left)):
            waits = [(client.key, place(client)) for client in left]
            keys = [client.key for client in joined]
            raise Violation("order", f"{keys} join, with places {places}; in line: {waits}")

    def _look_at_shares(self, state: State, first: Client, left: Iterable[Client]) -> None:
        served = state.served_tokens()
        shares = {client.key: served.get(client.tenant, 0) for client in (first, *left)}
        if shares[first.key] > min(shares.values()):
            raise Violation("order", f"{first.key} joins first, its tenant and others were served {shares} tokens")


class Shares:
    """What was computed for each tenant at least: the counters of a fair policy may be lifted, never lowered."""

    def __init__(self) -> None:
        self.computed: dict[str, int] = {}

    def forget(self) -> None:
        """Some of what was counted may never have been."""
        self.computed.clear()

    def done(self, state: State, clients: Mapping[Key, Client], plan: ExecutionPlan) -> None:
        """A step's result is about to be committed."""
        for row in plan.rows:
            client = client_in(state, clients, row.slot)
            if client is not None:
                self.computed[client.tenant] = self.computed.get(client.tenant, 0) + row.length

    def arrived(self, state: State, tenant: str, choices: int) -> None:
        """A request was admitted: a tenant that had none has not been served less than all others that have work."""
        served, live = state.tenants.served, state.tenants.live
        others = [served[other] for other in live if other != tenant]
        if live.get(tenant) == choices and others and served[tenant] < min(others):
            raise Violation("fair", f"{tenant!r} comes back with {served[tenant]}, others have {others}")

    def compare(self, state: State) -> None:
        """When nothing lives. Raises `Violation`."""
        served = state.tenants.served
        if any(served.get(tenant, 0) < count for tenant, count in self.computed.items()):
            raise Violation("fair", f"{self.computed} tokens were computed, counted are {served}")
