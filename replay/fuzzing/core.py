"""The middle of a miniature engine: events are folded, clients, operator and routers hear, steps fly and land."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import orjson

from leftfold.events import (
    Call,
    ControlDone,
    Event,
    ExecutionPlan,
    ForwardDone,
    Plan,
    Tick,
    UpdateWeights,
    decode,
    encode,
    same,
)
from leftfold.events.plan import as_list
from leftfold.executor.base import Result
from leftfold.executor.oracle import expected_tokens
from leftfold.fsm import Config, Effects, Gate, State, apply, decide, few, step
from leftfold.fsm.check import Checker
from leftfold.fsm.gate import RUNNING, STOPPED
from leftfold.replay.fuzzing.audience import Audience
from leftfold.replay.fuzzing.clients import Client
from leftfold.replay.fuzzing.desk import Desk
from leftfold.replay.fuzzing.device import Device
from leftfold.replay.fuzzing.errors import Violation
from leftfold.replay.fuzzing.looks import check_digest, check_plan, check_room, client_in, decide_aloud
from leftfold.replay.fuzzing.provenance import Provenance
from leftfold.replay.fuzzing.results import formed, overs
from leftfold.replay.fuzzing.router import Router
from leftfold.replay.fuzzing.trials import drop_more, tamper
from leftfold.replay.fuzzing.turns import FOR_EVER, Shares, Turns

TAMPERED = 8
"""Of plans in which requests join or give way, one in so many is tampered with first."""


class Core:
    """`vocab`: the oracle's tokens are below it; `rigour`: every how many steps the costly looks are taken;
    `checks`: every how many events the state is checked; `routers`: somebody listens to KV events.

    `state`, `log`, `clients` (live ones) and `ended` (the newest terminal output) may be looked at between commands.
    """

    def __init__(
        self, *, vocab: int = 50, rigour: int = 1, checks: int = 1, routers: bool = True, **config: Any
    ) -> None:
        self.first_config = Config(**config)
        few.FEW = (0, 2, 32)[self.first_config.num_pages % 3]  # rows one by one or by column: it changes nothing
        self.vocab = vocab
        self.rigour = rigour
        self.checks = checks
        self.checker = Checker()
        self.state = State(self.first_config)
        self.device = Device(self.first_config.num_pages, self.first_config.page_size, vocab)
        self.t = 0
        self.log: list[Event] = []
        self.audience = Audience()
        self.clients = self.audience.live
        self.ended = self.audience.ended
        self.desk = Desk(self.first_config)
        self.router = Router() if routers else None
        if routers:
            self.state.listen()
        self.flights: deque[ExecutionPlan] = deque()
        self._voided: list[ForwardDone | ControlDone] = []  # ends of what an earlier step's failure has voided
        self._late: list[ControlDone] = []  # ends of operations that are told later than their step's
        self.verbs: list[str] = []  # calls that took effect
        self.steps_done = 0
        self.pages = Provenance()
        self.turns = Turns()
        self.shares = Shares() if self.first_config.policy == "fair" else None
        self.apart: dict[Client, int] = {}  # who runs alone, and up to where

    @property
    def config(self) -> Config:
        """The limits in force, by the operator's account."""
        return self.desk.config

    @property
    def flight(self) -> ExecutionPlan | None:
        """The oldest step in flight."""
        return self.flights[0] if self.flights else None

    # Folding and hearing

    def take(self, event: Event, plan: Plan | None = None) -> Effects:
        """Log and apply one event and check the state: everything that happens, happens here."""
        state, log, checks = self.state, self.log, self.checks
        log.append(event)
        effects = apply(state, event, plan)
        if len(log) % checks == 0:
            self.checker.check(state, 2 * len(log) % self.rigour < 2 * checks)
        return effects

    def _fold(self, event: Event, plan: Plan | None = None) -> Effects:
        """Take one event and let everybody hear. Raises what is wrong."""
        desk, audience, router = self.desk, self.audience, self.router
        rows = self._rows() if desk.queue else ()
        effects = self.take(event, plan)
        state = self.state
        audience.hear(effects, desk.version)
        if effects.plan is not None:
            self._launch(effects.plan)
        if desk.queue or desk.gate is not RUNNING:
            desk.settle(len(self.flights), self.clients)
            if desk.changes:
                self._reconfigured(rows)
        if router is not None and effects.kv_events:  # what is stored comes before the end of its generation
            router.hear(effects.kv_events, state)
        if effects.acks or desk.due or state.gate is not desk.gate:
            desk.check(effects.acks, state.gate)
            if desk.flushed:
                self._flushed()
        if router is not None:
            if self._costly_now():
                router.compare(state)
            router.before = state.generation
        wake_at = effects.wake_at
        if (audience.hurried or wake_at is not None or desk.closing_at) and wake_at != self._due():
            raise Violation("wake-at", f"{wake_at}, but the next deadline is {self._due()}")
        return effects

    def _rows(self) -> list[Client]:
        """Who runs."""
        found = [client_in(self.state, self.clients, slot) for slot in range(len(self.state.by_slot))]
        return [client for client in found if client is not None]

    def _reconfigured(self, before: Sequence[Client]) -> None:
        """Of the rows there were `before` other limits, the best ranked stay, as many as there may be."""
        changes, self.desk.changes = self.desk.changes, 0
        rows = self._rows()
        if changes == 1:
            lost = [client for client in before if client not in rows and client.key in self.clients]
            self.turns.look_at_rows(self.config, rows, lost)

    def _flushed(self) -> None:
        """Nothing that was cached may be found any more."""
        self.desk.flushed = False
        self.pages.outdate()
        if self.state.pool.published:
            raise Violation("flush", f"{len(self.state.pool.published)} pages can be found after a flush")
        if self.router is not None:
            self.router.outdate(self.state.generation)

    def _due(self) -> int | None:
        """When the next deadline expires, by the clients' own accounts."""
        if self.state.gate is STOPPED:
            return None
        due, closing_at = self.audience.due(), self.desk.closing_at
        return min(due, closing_at) if due and closing_at else due or closing_at or None

    def _unheard(self, event: Event) -> None:
        """An event that must have no effect but be counted."""
        ignored = self.state.counts.get("ignored", 0)
        digest = self._costly(self._digest_but_counts)
        effects = self._fold(event)
        if len(effects.outputs) or effects.acks or effects.plan is not None:
            raise Violation("no-op", f"{event} had effects: {effects}")
        if self.state.counts.get("ignored", 0) != ignored + 1:
            raise Violation("no-op", f"{event} was not counted as ignored")
        if digest and digest != self._digest_but_counts():
            raise Violation("no-op", f"{event} changed the state")

    def _costly_now(self) -> bool:
        return len(self.log) % self.rigour == 0

    def _costly(self, look: Callable[[], Any]) -> Any:
        return look() if self._costly_now() else None

    def _digest_but_counts(self) -> str:
        counts, self.state.counts = self.state.counts, {}
        try:
            return self.state.digest()
        finally:
            self.state.counts = counts

    # Steps

    def wait(self, us: int) -> None:
        """Time passes."""
        self.t += us

    def steps(self, count: int = 1) -> None:
        """Plan and execute so many steps, as many at once as may be in flight; fewer if there is nothing to do."""
        flights, desk = self.flights, self.desk
        for _ in range(count):
            before = len(flights)
            self.tick()
            if not flights:
                return
            if len(flights) == before or before == desk.config.pipeline_depth:
                self.done()

    def tick(self) -> None:
        """Decide, and apply what was decided."""
        self.t = t = self.t + 1
        state, desk, closely = self.state, self.desk, self._costly_now()
        if self.audience.hurried and state.gate is not STOPPED:
            self.audience.expect_deadlines(t)
        plan = decide(state, t)
        if closely or (state.at_edge and len(state.at_edge) > state.pool.usable):
            decide_aloud(state, t, plan)
        if plan is None:
            self._idle()
            return
        if plan.join or plan.preempt:
            line = [client for key, client in self.clients.items() if state.live[key].seat is None]
            line = [client for client in line if desk.may_run(client)]
            self.turns.look(state, self.config.policy, plan, self.clients, line)
            self._joining(plan)
            if len(self.log) % TAMPERED == 0:
                tamper(state, t, plan, len(self.log) // TAMPERED, closely)
        if closely:
            drop_more(state, t, plan)
        for slots, pages in plan.grow:
            self._growing(as_list(slots), as_list(pages))
        if plan.ops or desk.closing_at:
            desk.tick(plan, t, len(self.flights))
        if plan.ops and desk.takes_rows() and not len(state.running()) <= len(plan.preempt) + len(plan.ends):
            raise Violation("control", f"{plan} takes the K/V of rows that keep their pages")
        event = Tick(t=t, plan=plan)
        if plan.preempt or plan.ends or plan.ops:
            self._read_back(event)
        self._fold(event, plan)

    def _read_back(self, event: Event) -> None:
        """What is seldom said is looked at at once: as a record it says the same."""
        read = decode(orjson.loads(encode(event)))
        if not same(read, event):
            raise Violation("replay", f"{event} is read back as {read}")

    def _joining(self, plan: Plan) -> None:
        for join in plan.join:
            client = self.clients[join.rid, join.epoch, join.choice]
            if not self.desk.may_run(client):
                raise Violation("gate", f"{client.key} joins although the drain is not for it")
            client.queue_deadline_at = 0
            self.pages.join(join, client, self.config.page_size, self.config.prefix_cache)

    def _growing(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        for slot, page in zip(slots, pages, strict=True):
            seat = self.state.by_slot[slot]
            assert seat is not None
            self.pages.grant([page], self.clients[seat.request.key], len(seat.pages))

    def _idle(self) -> None:
        """Nothing was decided: there was nothing to do, and the empty `Tick` changes nothing."""
        desk, flights = self.desk, len(self.flights)
        due = self._due()
        if due is not None and due <= self.t:
            raise Violation("not-ended", f"a Tick at {self.t} did nothing although {due} is over")
        if not flights and self.clients and desk.passes() and any(map(desk.may_run, self.clients.values())):
            raise Violation("stuck", f"nothing is planned for {list(self.clients)}")
        if desk.ready(flights):
            raise Violation("stuck", f"nothing is planned for {desk.queue[0]}")
        before = self._costly(self.state.digest)
        if before:
            effects = step(self.state, Tick(t=self.t))
            if self.state.digest() != before or len(effects.outputs) or effects.acks:
                raise Violation("empty-tick", f"an empty Tick at {self.t} changed the state")

    def _launch(self, plan: ExecutionPlan) -> None:
        flights, desk = self.flights, self.desk
        if len(flights) > desk.config.pipeline_depth:
            raise Violation("in-flight", f"step {plan.step} was planned while {len(flights)} are in flight")
        if (desk.gate is not RUNNING or desk.queue or not desk.present or desk.asleep) and not desk.passes():
            if len(plan.rows):
                raise Violation("gate", f"step {plan.step} has rows behind gate {desk.gate}, {desk.queue} waits")
        if self.apart and len(plan.rows) > 1:
            self._run_apart(plan)
        for join in plan.plan.join[-1:]:
            check_room(self.state, self.config, self.clients[join.rid, join.epoch, join.choice])
        flights.append(plan)
        self.steps_done = count = self.steps_done + 1
        if count % self.rigour == 0:
            check_plan(self.state, self.config, self.clients, plan)
            check_digest(plan)

    def _run_apart(self, plan: ExecutionPlan) -> None:
        for row in plan.rows:
            client = client_in(self.state, self.clients, row.slot)
            if client in self.apart:
                raise Violation("apart", f"step {plan.step} has {len(plan.rows)} rows, one of them of {row.rid!r}")

    def done(self, late: bool = False, refuse: bool = False, form: str = "") -> None:
        """The oldest step in flight ends well; what was voided before it is reported first.

        `late`: ends of the operations that it started are told some time after; `refuse`: those fail; `form`: of the
        result (one of `FORMS`, usually as most executors give it).
        """
        if self._voided:
            self._report_voided()
        flights = self.flights
        if not flights:
            return
        plan = flights[0]
        self.device.refuses = refuse
        result = self._execute(plan)
        self.device.refuses = False
        if result.controls:
            ends = self._ends(result)
            self._late += ends if late else []
            for end in () if late else ends:
                self._control_done(end)
        flights.popleft()
        if self.shares is not None:
            self.shares.done(self.state, self.clients, plan)
        if self.apart:
            self._get_past(plan)
        if form:
            over = overs(self.state, self.clients, plan)
            self._fold(formed(form, self.t, plan, result.tokens.tolist(), over))
        else:
            self._fold(ForwardDone(t=self.t, step=plan.step, tokens=result.tokens, digest=result.digest))

    def _get_past(self, plan: ExecutionPlan) -> None:
        for row in plan.rows:
            client = client_in(self.state, self.clients, row.slot)
            if client is not None and self.apart.get(client, FOR_EVER) <= row.start + row.length:
                del self.apart[client]

    def _execute(self, plan: ExecutionPlan) -> Result:
        result = self.device.execute(plan)
        if result.error is not None:
            raise Violation("executor", f"step {plan.step}: {result.error['text']}")
        return result

    def _report_voided(self) -> None:
        if self._voided:
            voided, self._voided = self._voided, []
            for event in voided:
                self._unheard(replace(event, t=self.t))

    # Operations

    def late_ends(self) -> None:
        """Ends of operations that were held back are told."""
        late, self._late = self._late, []
        for event in late:
            self._control_done(replace(event, t=self.t))

    def _ends(self, result: Result) -> list[ControlDone]:
        return [ControlDone(t=self.t, op=op, info=info, error=error) for op, info, error in result.controls]

    def _control_done(self, event: ControlDone) -> None:
        """An operation ends: what it changes is changed, and its call is answered with this event."""
        effect = self.desk.done(event.op, event.error is None)
        if isinstance(effect, UpdateWeights):
            self._say_anew(effect.version)
        elif isinstance(effect, Call):
            self.verbs.append(effect.verb)
        if not self.desk.due:
            self._unheard(event)
        else:
            self._fold(event)

    def _say_anew(self, version: str) -> None:
        """Other weights say other tokens from here on."""
        for client in self.clients.values():
            heard = list(client.tokens[: client.heard])
            context = [*client.prompt, *heard]
            client.tokens = heard + expected_tokens(context, max(0, client.limit - len(context)), self.vocab, version)

    def _lost(self, tell: Sequence[ControlDone] = ()) -> None:
        """After a loss: ends of operations that were under way come too late for anybody."""
        late, self._late = [*self._late, *tell], []
        for event in late:
            self._unheard(replace(event, t=self.t))

    def check_effects(self) -> None:
        """What was answered has happened."""
        state, desk = self.state, self.desk
        if state.config != desk.config or sorted(state.asleep) != desk.asleep or state.version != desk.version:
            raise Violation(
                "effect", f"{state.config}, {state.asleep}, {state.version!r}; expected {desk.config}, "
                f"{desk.asleep}, {desk.version!r}"
            )  # fmt: skip
        if state.gate in (Gate.DRAINING, Gate.PAUSED) and state.drain_mode != desk.mode:
            raise Violation("effect", f"the engine drains by {state.drain_mode!r}, expected {desk.mode!r}")
