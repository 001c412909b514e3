"""A whole engine in miniature: state, oracle, clients and operator, driven by commands and checked after every event.

A command is a public method of `World` with plain arguments. Whatever is not possible when it comes (a result of a
step that nobody started) does nothing, so any part of a list of commands is a list of commands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from leftfold.events import (
    Abort,
    Admit,
    Control,
    ControlDone,
    ExecutionPlan,
    ExecutorLost,
    ForwardDone,
    Pause,
    SamplingParams,
    Shutdown,
    Started,
)
from leftfold.executor.oracle import expected_tokens
from leftfold.fsm import Config, FinishReason, Gate, State, decide
from leftfold.fsm.state import KEPT_FINISHED
from leftfold.replay.fuzzing.clients import Client
from leftfold.replay.fuzzing.core import Core
from leftfold.replay.fuzzing.desk import SHUT, STRICTER
from leftfold.replay.fuzzing.device import Device
from leftfold.replay.fuzzing.errors import Violation
from leftfold.replay.fuzzing.looks import check_rest, client_in, refusal_code
from leftfold.replay.fuzzing.oddities import STRAYS, control_event, odd_admit, spoil_plan
from leftfold.replay.fuzzing.refold import refold
from leftfold.replay.fuzzing.results import overs, spoil
from leftfold.replay.fuzzing.trials import must_refuse

Command = tuple[str, Mapping[str, Any]]

LONE_FAILURES = 3


class World(Core):
    """Requests, control calls and faults, on the core."""

    def __init__(
        self, *, vocab: int = 50, rigour: int = 1, checks: int = 1, routers: bool = True, **config: Any
    ) -> None:
        super().__init__(vocab=vocab, rigour=rigour, checks=checks, routers=routers, **config)
        self.incarnation = 0
        self.serial = 0
        self.calls = 0
        self._originals: list[tuple[State, str]] = []
        self._findable: Mapping[bytes, int] = {}  # what a start must leave

    def perform(self, command: Command) -> None:
        """Carry out one command. Raises `Violation`, or whatever the reducer raises."""
        name, arguments = command
        getattr(self, name)(**arguments)

    # Requests

    def admit(
        self,
        rid: str,
        prompt: Sequence[int],
        max_tokens: int = 4,
        *,
        epoch: int = 0,
        n: int = 1,
        stop: Sequence[int] = (),
        min_tokens: int = 0,
        priority: int = 0,
        tenant: str = "",
        deadline: int = 0,
        queue_deadline: int = 0,
        cache: str = "use",
        salt: str = "",
    ) -> None:
        """A request arrives; it is refused exactly if it can never run, or now may not."""
        params = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=tuple(stop), n=n)
        event = Admit(
            t=self.t, rid=rid, epoch=epoch, prompt=list(prompt), params=params, priority=priority, tenant=tenant,
            deadline=deadline, queue_deadline=queue_deadline, cache=cache, cache_salt=salt,
        )  # fmt: skip
        if self.audience.of(rid, epoch):
            self._unheard(event)
            return
        code = refusal_code(self.state, self.config, prompt, max_tokens, n)
        if code is not None:
            self._refused(event, code)
            return
        config = self.config
        limit = min(len(prompt) + max_tokens, config.max_model_len, config.num_pages * config.page_size + 1)
        tokens = expected_tokens(prompt, limit - len(prompt), self.vocab, self.desk.version)
        if self.router is not None:
            self.router.salts.add(salt)
        for choice in range(n):
            client = Client((rid, epoch, choice), self.serial, prompt, tokens, params, limit)
            client.deadline_at = self.t + deadline if deadline else 0
            client.queue_deadline_at = self.t + queue_deadline if queue_deadline else 0
            client.priority, client.tenant, client.salt, client.cache = priority, tenant, salt, cache
            self.audience.add(client)
            self.serial += 1
        self._fold(event)
        if self.shares is not None:
            self.shares.arrived(self.state, tenant, n)

    def odd_admit(self, kind: str, rid: str = "odd", epoch: int = 0) -> None:
        """A request that is refused whatever the configuration, unless it repeats one that lives."""
        event = odd_admit(kind, self.t, self.config, rid, epoch)
        if self.audience.of(rid, epoch):
            self._unheard(event)
        else:
            self._refused(event, "closing" if self.state.gate in SHUT else "invalid")

    def _refused(self, event: Admit, code: str) -> None:
        """One terminal output a choice, an error of this code; what runs and waits is untouched."""
        before = self._costly(lambda: (self.state.pool.refs.copy(), list(self.state.live), self.state.queued_tokens))
        lives = event.rid in self.state.by_rid and self.state.requests[event.rid]
        effects = self.take(event)
        outputs = list(effects.outputs)
        choices = event.params.n if 0 < event.params.n <= 128 else 1
        if sorted(output.choice for output in outputs) != list(range(choices)):
            raise Violation("refusal", f"an Admit that cannot be taken got {outputs}, expected {choices} errors")
        for output in outputs:
            if output.finish_reason is not FinishReason.ERROR or output.tokens:
                raise Violation("refusal", f"an Admit that cannot be taken got {output}")
            if output.error is None or output.error["code"] != code:
                raise Violation("refusal", f"refused with {output.error}, expected code {code}")
            self.ended[event.rid, event.epoch, output.choice] = output
        if lives and self.state.requests[event.rid] is not lives and len(self.state.finished) < KEPT_FINISHED:
            raise Violation("refusal", f"a refused Admit hides the newest request {event.rid!r}, of which some live")
        if before and before != (self.state.pool.refs, list(self.state.live), self.state.queued_tokens):
            raise Violation("refusal", "a refused Admit changed what lives")

    def abort(
        self,
        rid: str,
        epoch: int | None = None,
        reason: str = "gone",
        keep: int | None = None,
        choice: int | None = None,
    ) -> None:
        """A client leaves, or a stop string was found."""
        newest = max([key[1] for key in self.clients if key[0] == rid], default=0)
        named = newest if epoch is None else epoch
        event = Abort(t=self.t, rid=rid, epoch=epoch, choice=choice, reason=reason, keep=keep)
        clients = self.audience.of(rid, named, choice)
        if not clients:
            self._unheard(event)
            return
        for client in clients:
            told = FinishReason.STOP if reason == "stop_string" else FinishReason.ABORT
            self.audience.must_end(client, told, keep)
        self._fold(event)

    def abort_all(self) -> None:
        """Everything that lives ends."""
        self._all_must_end()
        self._fold(Abort(t=self.t, reason="all"))

    def _all_must_end(self) -> None:
        for client in self.clients.values():
            self.audience.must_end(client, FinishReason.ABORT)

    # What may go wrong with steps

    def spoiled_plan(self, kind: str) -> None:
        """A plan with one thing wrong is refused, and nothing has changed: deciding leaves no trace, either."""
        good = decide(self.state, self.t)
        self.state.check()
        if good is None or good.step is None:
            return
        must_refuse(self.state, self.t, kind, spoil_plan(kind, good, self.state), self._costly_now())

    def fail(self, retry: bool = True, rows: Sequence[int] = (), apart: bool = False) -> None:
        """The oldest step in flight fails, having written rubbish where its rows write, and voids the later ones.

        `apart`: its rows run one by one from now on, until they are past it.
        """
        self._report_voided()
        if not self.flights:
            return
        plan = self.flights[0]
        result = self.device.fail(plan)
        if result.error is None or result.error["text"] != "planted":
            raise Violation("executor", f"step {plan.step}: {result.error}")
        for end in self._ends(result):
            self._control_done(end)
        clients = [client_in(self.state, self.clients, row.slot) for row in plan.rows]
        alive = [client for client in clients if client is not None]
        blamed = [clients[row] for row in rows if row < len(clients)] or ([] if retry else clients)
        for client in alive:
            client.failures += len(alive) == 1
            if client in blamed or client.failures >= LONE_FAILURES:
                self.audience.must_end(client, FinishReason.ERROR)
        later = list(self.flights)[1:]
        self.flights.clear()
        self.desk.failed([op.op for flight in later for op in flight.plan.ops if isinstance(op, Control)])
        error = {"text": "planted", "retry": retry, "rows": list(rows), **({"apart": True} if apart else {})}
        if apart:
            self._set_apart(plan, blamed)
        self._fold(ForwardDone(t=self.t, step=plan.step, error=error, digest=result.digest))
        for flight in later:
            self._void(flight)

    def _set_apart(self, plan: ExecutionPlan, blamed: Sequence[Client | None]) -> None:
        """Whoever goes on runs alone until it is past this step."""
        for row in plan.rows:
            client = client_in(self.state, self.clients, row.slot)
            if client is not None and client not in blamed and client.failures < LONE_FAILURES:
                self.apart[client] = row.start + row.length

    def _void(self, plan: ExecutionPlan) -> None:
        """The executor applies the deltas of a voided step and computes nothing."""
        result = self.device.execute(plan)
        if result.error is None or len(result.tokens) or not result.error["retry"]:
            raise Violation("executor", f"step {plan.step} came after a failed one and gave {result}")
        self._voided += self._ends(result)
        self._voided.append(ForwardDone(t=self.t, step=plan.step, error=result.error, digest=result.digest))

    def spoiled(self, kind: str) -> None:
        """A result that is not of the plan in flight: the executor counts as lost."""
        self._report_voided()
        if not self.flights:
            return
        ends: list[ControlDone] = []
        plan = self.flights.popleft()
        over = overs(self.state, self.clients, plan)
        if kind == "order" and self.flights:
            ends += self._ends(self._execute(plan))
            plan, kind = self.flights[0], "right"
        self.flights.clear()
        result = self._execute(plan)
        self.desk.lost()
        effects = self._fold(spoil(kind, self.t, plan, result.tokens.tolist(), over))
        if len(effects.outputs) or self.state.executor_present:
            raise Violation("attested", f"a result with a wrong {kind} was taken")
        self._lost([*ends, *self._ends(result)])

    def stray_done(self, behind: int = 1) -> None:
        """A result arrives of a step that is not in flight: late, twice, or never planned."""
        number = self.state.next_step - 1 - behind
        if all(number != plan.step for plan in self.flights):
            self._unheard(ForwardDone(t=self.t, step=number, tokens=[1], digest="0" * 32))

    # The engine around it

    def stray(self, kind: str) -> None:
        """An operation ends that nobody started."""
        self._unheard(STRAYS[kind](self.t))

    def stray_control(self, behind: int = 1, error: str | None = None) -> None:
        """An operation ends that is over, or that no plan has started yet."""
        op = self.state.next_op - 1 - behind
        if not self.desk.queue or self.desk.queue[0].op != op:
            self._unheard(ControlDone(t=self.t, op=op, error=error))

    def control(self, kind: str, **fields: Any) -> str:
        """A control call; its name, under which the answer will be found in `desk.answered`."""
        call = f"call {self.calls}"
        self.calls += 1
        event = control_event(kind, self.t, call, fields)
        if isinstance(event, Pause) and event.mode == STRICTER[-1] and self.desk.gate not in SHUT:
            self._all_must_end()
        self.desk.post(event, self.serial)
        self._fold(event)
        self.check_effects()
        return call

    def shutdown(self, deadline: int = 0) -> str:
        """Admissions close; a second call is answered at once."""
        return self.control(Shutdown.__name__, deadline=deadline)

    def lose(self) -> None:
        """The executor is gone, and with it what was in flight."""
        ends = self._run_out()
        self.desk.lost()
        self._fold(ExecutorLost(t=self.t, error="planted"))
        self._lost(ends)

    def _run_out(self) -> list[ControlDone]:
        """What is in flight may still write into memory; nobody hears of it (but of operations, too late)."""
        self._voided.clear()
        ends: list[ControlDone] = []
        while self.flights:
            ends += self._ends(self._execute(self.flights.popleft()))
        return ends

    def start(self, kept: Sequence[str] = (), **changes: Any) -> None:
        """An executor is ready, perhaps one of other limits."""
        ends = self._run_out()
        if self.desk.may_have_taken:
            kept = [what for what in kept if what != "device"]
        self.incarnation += 1
        raw = {**self.config.as_dict(), **changes}
        config = Config.from_dict(raw)
        if config != self.config:
            self.device = Device(config.num_pages, config.page_size, self.vocab)
            self._shrink_limits(config)
        version = self.desk.version
        same_weights = "weights" in kept or version == ""
        self._keep("device" in kept and same_weights and config == self.config)
        self.desk.started(config, "weights" in kept)
        self.device.restart("device" in kept, self.desk.version)
        if self.desk.version != version:
            self._say_anew(self.desk.version)
        self._fold(Started(t=self.t, incarnation=self.incarnation, config=raw, kept=tuple(kept)))
        self._kept()
        self._lost(ends)
        self.check_effects()

    def _keep(self, whole: bool) -> None:
        """What can be found is to be found after the start, if the executor says so, and nothing else."""
        self._findable = self.state.pool.published.copy() if whole else {}
        if not whole:
            self.pages.lose()

    def _flushed(self) -> None:
        """A flush that waited behind a call that the start ends takes effect with the start."""
        super()._flushed()
        self._findable = {}

    def _kept(self) -> None:
        found = self.state.pool.published
        if found != self._findable:
            raise Violation("kept", f"{found} can be found after a start, expected {self._findable}")

    def _shrink_limits(self, config: Config) -> None:
        for client in self.clients.values():
            client.limit = min(client.limit, config.max_model_len, config.num_pages * config.page_size + 1)
            if client.known >= client.limit:
                self.audience.must_end(client, FinishReason.LENGTH if client.heard else FinishReason.ERROR)

    def copy(self) -> None:
        """Go on with a copy; the original must stay as it is."""
        digest, twin = self.state.digest(), self.state.copy()
        if twin.digest() != digest:
            raise Violation("copy", "a copy's digest differs")
        twin.check()
        self._originals.append((self.state, digest))
        self.state = twin

    # The end

    def land(self) -> None:
        """Everything in flight ends well."""
        while self.flights:
            self.done()
        self._report_voided()
        self.late_ends()

    def steps_to_end(self) -> int:
        """In how many steps everything must be over once nothing fails and nobody new comes.

        Whoever ranks first of all computes at least one position a step and is not preempted: rows are at most as many
        as the budget has tokens, and victims rank last. So it is over after as many steps as it may have positions,
        and the next one ranks first: the sum of all limits. Before it runs, it may have to wait for the slot or the
        pages of somebody who runs and ranks behind, who ends within its own limit: the sum once more. Each control
        call needs steps of its own behind its barrier, and the pipeline fills and drains around it.
        """
        depth, calls = self.config.pipeline_depth + 1, len(self.desk.queue) + len(self.desk.pauses)
        return 2 * sum([client.limit for client in self.clients.values()]) + 4 * depth * (4 + calls)

    def finish(self, replay: bool = True) -> None:
        """Faults stop: everything must end within `steps_to_end`, be given back, and the log must fold to the same."""
        self.land()
        bound = left = self.steps_to_end()
        while self.clients or self.desk.queue or self.state.gate is not Gate.RUNNING or self.desk.asleep:
            left -= 1
            if left < 0:
                waits = [*self.clients], [*self.desk.queue], self.state.gate
                raise Violation("no-progress", f"after {bound} steps without a fault {waits} are not over")
            self._let_go()
            self.steps()
        self.land()
        self.check_effects()
        check_rest(self.state)
        if len(self.desk.answered) != self.desk.posted:
            raise Violation("ack", f"{self.desk.posted} calls were made, {len(self.desk.answered)} answered")
        if self.shares is not None:
            self.shares.compare(self.state)
        for original, digest in self._originals:
            if original.digest() != digest:
                raise Violation("copy", "an original changed with its copy")
        if replay:
            refold(self.first_config, self.log, self.state.digest())

    def _let_go(self) -> None:
        """Start, wake and resume what would stand still."""
        desk = self.desk
        if not desk.present or desk.gate is Gate.STOPPED:
            self.start()
        elif not desk.queue and desk.asleep:
            self.control("Wake")
        elif not desk.queue and desk.gate in (Gate.PAUSED, Gate.DRAINING) and not self.flights:
            self.control("Resume")
