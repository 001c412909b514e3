"""A whole engine in miniature: state, oracle and clients, driven by commands and checked after every event.

A command is a public method of `World` with plain arguments. Whatever is not possible when it comes (a result of a
step that nobody started) does nothing, so any part of a list of commands is a list of commands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from leftfold.events import (
    Abort,
    Admit,
    Event,
    ExecutionPlan,
    ExecutorLost,
    ForwardDone,
    Plan,
    SamplingParams,
    Shutdown,
    Started,
    Tick,
)
from leftfold.executor.base import Result
from leftfold.executor.oracle import expected_tokens
from leftfold.fsm import Config, Effects, FinishReason, Gate, PlanRefused, State, apply, decide, step
from leftfold.replay.fuzzing.audience import Audience
from leftfold.replay.fuzzing.clients import Client
from leftfold.replay.fuzzing.device import Device
from leftfold.replay.fuzzing.errors import Violation
from leftfold.replay.fuzzing.looks import check_plan, check_rest, client_in, refusal_code
from leftfold.replay.fuzzing.oddities import CONTROLS, STRAYS, odd_admit, spoil, spoil_plan
from leftfold.replay.fuzzing.refold import refold

Command = tuple[str, Mapping[str, Any]]

LONE_FAILURES = 3


class World:
    """`vocab`: the oracle's tokens are below it; `rigour`: every how many steps the costly looks are taken.

    `state`, `log`, `clients` (live ones) and `ended` (the newest terminal output) may be looked at between commands.
    """

    def __init__(self, *, vocab: int = 50, rigour: int = 1, **config: Any) -> None:
        self.config = Config(**config)
        self.first_config = self.config
        self.vocab = vocab
        self.rigour = rigour
        self.state = State(self.config)
        self.device = Device(self.config.num_pages, self.config.page_size, vocab)
        self.t = 0
        self.log: list[Event] = []
        self.audience = Audience()
        self.clients = self.audience.live
        self.ended = self.audience.ended
        self.flights: deque[ExecutionPlan] = deque()
        self._voided: list[ForwardDone] = []  # results of steps that an earlier one's failure has voided
        self.steps_done = 0
        self.incarnation = 0
        self.closing_at = 0
        self.call: str | None = None
        self.calls = 0
        self._originals: list[tuple[State, str]] = []

    @property
    def flight(self) -> ExecutionPlan | None:
        """The oldest step in flight."""
        return self.flights[0] if self.flights else None

    # Folding and hearing

    def perform(self, command: Command) -> None:
        """Carry out one command. Raises `Violation`, or whatever the reducer raises."""
        name, arguments = command
        getattr(self, name)(**arguments)

    def take(self, event: Event, plan: Plan | None = None) -> Effects:
        """Log and apply one event and check the state: everything that happens, happens here."""
        self.log.append(event)
        effects = apply(self.state, event, plan)
        self.state.check()
        return effects

    def _fold(self, event: Event, plan: Plan | None = None) -> Effects:
        """Take one event and let the clients hear. Raises what is wrong."""
        effects = self.take(event, plan)
        self.audience.hear(effects)
        for ack in effects.acks:
            if ack.call != self.call:
                raise Violation("ack", f"{ack} answers no open call (open: {self.call})")
            self.call = None
        if (self.audience.hurried or effects.wake_at is not None or self.closing_at) and effects.wake_at != self._due():
            raise Violation("wake-at", f"{effects.wake_at}, but the next deadline is {self._due()}")
        return effects

    def _due(self) -> int | None:
        """When the next deadline expires, by the clients' own accounts."""
        if self.state.gate is Gate.STOPPED:
            return None
        due = self.audience.due()
        return min(due, self.closing_at) if due and self.closing_at else due or self.closing_at or None

    # Requests

    def admit(
        self,
        rid: str,
        prompt: Sequence[int],
        max_tokens: int = 4,
        *,
        epoch: int = 0,
        stop: Sequence[int] = (),
        min_tokens: int = 0,
        priority: int = 0,
        deadline: int = 0,
        queue_deadline: int = 0,
        cache: str = "use",
        salt: str = "",
    ) -> None:
        """A request arrives; it is refused exactly if it can never run, or now may not."""
        params = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=tuple(stop))
        event = Admit(
            t=self.t, rid=rid, epoch=epoch, prompt=list(prompt), params=params, priority=priority, deadline=deadline,
            queue_deadline=queue_deadline, cache=cache, cache_salt=salt,
        )  # fmt: skip
        key = (rid, epoch)
        if key in self.clients:
            self._unheard(event)
            return
        code = refusal_code(self.state, self.config, prompt, max_tokens)
        if code is not None:
            self._refused(event, code)
            return
        config = self.config
        limit = min(len(prompt) + max_tokens, config.max_model_len, config.num_pages * config.page_size + 1)
        tokens = expected_tokens(prompt, limit - len(prompt), self.vocab)
        client = Client(key, prompt, tokens, params, limit)
        client.deadline_at = self.t + deadline if deadline else 0
        client.queue_deadline_at = self.t + queue_deadline if queue_deadline else 0
        self.audience.add(client)
        self._fold(event)

    def odd_admit(self, kind: str) -> None:
        """A request that is refused whatever the configuration."""
        code = "closing" if self.state.gate in (Gate.CLOSING, Gate.STOPPED) else "invalid"
        self._refused(odd_admit(kind, self.t, self.config), code)

    def _refused(self, event: Admit, code: str) -> None:
        """Exactly one terminal output, an error of this code; what runs and waits is untouched."""
        before = self._costly(lambda: (self.state.pool.refs.copy(), list(self.state.live), self.state.queued_tokens))
        effects = self.take(event)
        outputs = list(effects.outputs)
        if len(outputs) != 1 or outputs[0].finish_reason is not FinishReason.ERROR or outputs[0].tokens:
            raise Violation("refusal", f"an Admit that cannot be taken got {outputs}, expected one error")
        if outputs[0].error is None or outputs[0].error["code"] != code:
            raise Violation("refusal", f"refused with {outputs[0].error}, expected code {code}")
        self.ended[event.rid, event.epoch] = outputs[0]
        if before and before != (self.state.pool.refs, list(self.state.live), self.state.queued_tokens):
            raise Violation("refusal", "a refused Admit changed what lives")

    def abort(self, rid: str, epoch: int | None = None, reason: str = "gone", keep: int | None = None) -> None:
        """A client leaves, or a stop string was found."""
        newest = self.state.requests.get(rid)
        named = epoch if epoch is not None else newest.epoch if newest is not None else 0
        client = self.clients.get((rid, named))
        event = Abort(t=self.t, rid=rid, epoch=epoch, reason=reason, keep=keep)
        if client is None:
            self._unheard(event)
            return
        told = FinishReason.STOP if reason == "stop_string" else FinishReason.ABORT
        self.audience.must_end(client, told, keep)
        self._fold(event)

    def abort_all(self) -> None:
        """Everything that lives ends."""
        for client in self.clients.values():
            self.audience.must_end(client, FinishReason.ABORT)
        self._fold(Abort(t=self.t, reason="all"))

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

    def _costly(self, look: Callable[[], Any]) -> Any:
        return look() if len(self.log) % self.rigour == 0 else None

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
        for _ in range(count):
            before = len(self.flights)
            self.tick()
            if not self.flights:
                return
            if len(self.flights) == before or before == self.config.pipeline_depth:
                self.done()

    def tick(self) -> None:
        """Decide, and apply what was decided."""
        self.t += 1
        if self.audience.hurried and self.state.gate is not Gate.STOPPED:
            self.audience.expect_deadlines(self.t)
        plan = decide(self.state, self.t)
        if plan is None:
            self._idle()
            return
        for join in plan.join:
            self.clients[join.rid, join.epoch].queue_deadline_at = 0
        effects = self._fold(Tick(t=self.t, plan=plan), plan)
        if self.closing_at and self.state.gate is Gate.STOPPED:
            self.closing_at = 0
        if effects.plan is not None:
            self._launch(effects.plan)

    def _idle(self) -> None:
        """Nothing was decided: there was nothing to do, and the empty `Tick` changes nothing."""
        state = self.state
        due = self._due()
        if due is not None and due <= self.t:
            raise Violation("not-ended", f"a Tick at {self.t} did nothing although {due} is over")
        open_gate = state.gate in (Gate.RUNNING, Gate.CLOSING)
        if self.clients and open_gate and state.executor_present and self.flight is None:
            raise Violation("stuck", f"nothing is planned for {list(self.clients)}")
        before = self._costly(state.digest)
        if before:
            effects = step(state, Tick(t=self.t))
            if state.digest() != before or len(effects.outputs) or effects.acks:
                raise Violation("empty-tick", f"an empty Tick at {self.t} changed the state")

    def spoiled_plan(self, kind: str) -> None:
        """A plan with one thing wrong is refused, and nothing has changed."""
        good = decide(self.state, self.t)
        if good is None or good.step is None:
            return
        wrong = spoil_plan(kind, good, self.config)
        before = self._costly(self.state.digest)
        try:
            apply(self.state, Tick(t=self.t, plan=wrong), wrong)
        except PlanRefused:
            self.state.check()
        else:
            raise Violation("taken", f"a plan with a wrong {kind} was taken: {wrong}")
        if before and before != self.state.digest():
            raise Violation("refused", f"a refused plan (wrong {kind}) changed the state")

    def _launch(self, plan: ExecutionPlan) -> None:
        if len(self.flights) > self.config.pipeline_depth:
            raise Violation("in-flight", f"step {plan.step} was planned while {len(self.flights)} are in flight")
        self.flights.append(plan)
        self.steps_done += 1
        if self.steps_done % self.rigour == 0:
            check_plan(self.state, self.config, self.clients, plan)

    def done(self) -> None:
        """The oldest step in flight ends well; what was voided before it is reported first."""
        self._report_voided()
        if not self.flights:
            return
        plan = self.flights.popleft()
        result = self._execute(plan)
        self._fold(ForwardDone(t=self.t, step=plan.step, tokens=result.tokens, digest=result.digest))

    def _execute(self, plan: ExecutionPlan) -> Result:
        result = self.device.execute(plan)
        if result.error is not None:
            raise Violation("executor", f"step {plan.step}: {result.error['text']}")
        return result

    def fail(self, retry: bool = True, rows: Sequence[int] = ()) -> None:
        """The oldest step in flight fails, having written rubbish where its rows write, and voids the later ones."""
        self._report_voided()
        if not self.flights:
            return
        plan = self.flights.popleft()
        result = self.device.fail(plan)
        if result.error is None or result.error["text"] != "planted":
            raise Violation("executor", f"step {plan.step}: {result.error}")
        clients = [client_in(self.state, self.clients, row.slot) for row in plan.rows]
        alive = [client for client in clients if client is not None]
        blamed = [clients[row] for row in rows if row < len(clients)] or ([] if retry else clients)
        for client in alive:
            client.failures += len(alive) == 1
            if client in blamed or client.failures >= LONE_FAILURES:
                self.audience.must_end(client, FinishReason.ERROR)
        error = {"text": "planted", "retry": retry, "rows": list(rows)}
        self._fold(ForwardDone(t=self.t, step=plan.step, error=error, digest=result.digest))
        while self.flights:
            self._void(self.flights.popleft())

    def _void(self, plan: ExecutionPlan) -> None:
        """The executor applies the deltas of a voided step and computes nothing."""
        result = self.device.execute(plan)
        if result.error is None or len(result.tokens) or not result.error["retry"]:
            raise Violation("executor", f"step {plan.step} came after a failed one and gave {result}")
        self._voided.append(ForwardDone(t=self.t, step=plan.step, error=result.error, digest=result.digest))

    def _report_voided(self) -> None:
        if self._voided:
            voided, self._voided = self._voided, []
            for event in voided:
                self._unheard(replace(event, t=self.t))

    def spoiled(self, kind: str) -> None:
        """A result that is not of the plan in flight: the executor counts as lost."""
        self._report_voided()
        if not self.flights:
            return
        plan = self.flights.popleft()
        if kind == "order" and self.flights:
            self._execute(plan)
            plan, kind = self.flights[0], "none"
        self.flights.clear()
        effects = self._fold(spoil(kind, self.t, plan, self._execute(plan).tokens.tolist()))
        if len(effects.outputs) or self.state.executor_present:
            raise Violation("attested", f"a result with a wrong {kind} was taken")

    def stray_done(self, behind: int = 1) -> None:
        """A result arrives of a step that is not in flight: late, twice, or never planned."""
        number = self.state.next_step - 1 - behind
        if all(number != plan.step for plan in self.flights):
            self._unheard(ForwardDone(t=self.t, step=number, tokens=[1], digest="0" * 32))

    # The engine around it

    def stray(self, kind: str) -> None:
        """An operation ends that nobody started."""
        self._unheard(STRAYS[kind](self.t))

    def control(self, kind: str) -> None:
        """A control call that is not carried out is answered at once."""
        open_call, self.call = self.call, f"call {self.calls}"
        self.calls += 1
        self._fold(CONTROLS[kind](self.t, self.call))
        if self.call is not None:
            raise Violation("ack", f"{kind} was not answered")
        self.call = open_call

    def lose(self) -> None:
        """The executor is gone, and with it what was in flight."""
        self._run_out()
        self._fold(ExecutorLost(t=self.t, error="planted"))

    def _run_out(self) -> None:
        """What is in flight may still write into memory; nobody hears of it."""
        self._voided.clear()
        while self.flights:
            self._execute(self.flights.popleft())

    def start(self, kept: Sequence[str] = (), **changes: Any) -> None:
        """An executor is ready, perhaps one of other limits."""
        self._run_out()
        self.incarnation += 1
        raw = {**self.config.as_dict(), **changes}
        config = Config.from_dict(raw)
        if config != self.config:
            self.device = Device(config.num_pages, config.page_size, self.vocab)
            self._shrink_limits(config)
        self.config = config
        self.device.restart(keep="device" in kept)
        self.closing_at = 0
        self._fold(Started(t=self.t, incarnation=self.incarnation, config=raw, kept=tuple(kept)))

    def _shrink_limits(self, config: Config) -> None:
        for client in self.clients.values():
            client.limit = min(client.limit, config.max_model_len, config.num_pages * config.page_size + 1)
            if client.known >= client.limit:
                self.audience.must_end(client, FinishReason.LENGTH if client.heard else FinishReason.ERROR)

    def shutdown(self, deadline: int = 0) -> None:
        """Admissions close; a second call is answered at once."""
        if self.state.gate in (Gate.CLOSING, Gate.STOPPED):
            self.control("Shutdown")
            return
        self.call = f"call {self.calls}"
        self.calls += 1
        self.closing_at = self.t + deadline if deadline and (self.clients or self.flights) else 0
        self._fold(Shutdown(t=self.t, call=self.call, deadline=deadline))

    def copy(self) -> None:
        """Go on with a copy; the original must stay as it is."""
        digest, twin = self.state.digest(), self.state.copy()
        if twin.digest() != digest:
            raise Violation("copy", "a copy's digest differs")
        twin.check()
        self._originals.append((self.state, digest))
        self.state = twin

    def _settle(self) -> None:
        """Everything in flight ends well."""
        while self.flights:
            self.done()
        self._report_voided()

    def finish(self, replay: bool = True) -> None:
        """Faults stop; everything must end, everything must be given back, and the log must fold to the same."""
        self._settle()
        if not self.state.executor_present or self.state.gate is Gate.STOPPED:
            self.start()
        bound = 8 + sum(2 * client.limit for client in self.clients.values()) * (1 + len(self.clients))
        while self.clients:
            bound -= 1
            if self.state.gate is Gate.STOPPED:
                self.start()
            if bound < 0:
                raise Violation("no-progress", f"{list(self.clients)} do not finish")
            self.steps()
        self._settle()
        check_rest(self.state, self.config)
        if self.call is not None:
            raise Violation("ack", f"{self.call} was never answered")
        for original, digest in self._originals:
            if original.digest() != digest:
                raise Violation("copy", "an original changed with its copy")
        if replay:
            refold(self.first_config, self.log, self.state.digest())
