"""The simulation's loop: arrivals and step results in the order of virtual time, the real reducer in between."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any

from leftfold.events import Abort, Admit, Event, ForwardDone, Started, Tick
from leftfold.executor.base import Result
from leftfold.executor.cost import CostModel, Work
from leftfold.executor.sim import SimExecutor, Speech, Tape
from leftfold.fsm import LAWS, Config, State, apply, decide, step
from leftfold.replay.errors import ReplayError
from leftfold.replay.simulating.figures import Meter
from leftfold.replay.simulating.jobs import Job
from leftfold.replay.simulating.router import Router, round_robin

Keep = Callable[[Event], Any]


class Stalled(ReplayError):
    """Requests live, but nothing will ever happen: a fault of the reducer."""


class Replica:
    """One engine on virtual time. `keep`: where its events go (a log's `append`), if anywhere."""

    def __init__(
        self,
        config: Config,
        cost: CostModel,
        meter: Meter,
        tape: Tape | None,
        keep: Keep | None,
        observe: Callable[[int, Work], None] | None = None,
    ) -> None:
        self.state = State(config)
        self.executor = SimExecutor(
            config.num_pages, config.page_size, cost, speech=Speech.MADE_UP, tape=tape, attest=False
        )
        self.meter = meter
        self.keep = keep
        self.observe = observe
        self.flights: deque[tuple[int, Result]] = deque()
        self.wake_at: int | None = None
        self.steps = 0
        self._free_at = 0
        self.take(Started(t=0, incarnation=1, config=config.as_dict(), model="simulated", laws=LAWS))

    def take(self, event: Event) -> None:
        """Log and fold what is no decision."""
        if self.keep is not None:
            self.keep(event)
        effects = step(self.state, event)
        self.wake_at = effects.wake_at
        self.meter.hear(event.t, effects.outputs)

    @property
    def next_at(self) -> int | None:
        """When something happens here by itself."""
        at = self.flights[0][0] if self.flights else None
        if self.wake_at is None:
            return at
        return self.wake_at if at is None else min(at, self.wake_at)

    def land(self, t: int) -> None:
        """Results that are in by now."""
        while self.flights and self.flights[0][0] <= t:
            result = self.flights.popleft()[1]
            self.take(ForwardDone(t=t, step=result.step, tokens=result.tokens, digest=result.digest))

    def plan(self, t: int) -> None:
        """Decide until there is nothing to decide; what is planned begins when the executor is free."""
        while (plan := decide(self.state, t)) is not None:
            tick = Tick(t=t, plan=plan)
            if self.keep is not None:
                self.keep(tick)
            effects = apply(self.state, tick, plan)
            self.wake_at = effects.wake_at
            if effects.outputs.parts:  # type: ignore[union-attr]
                self.meter.hear(t, effects.outputs)
            if effects.plan is not None:
                self._launch(effects.plan, t)

    def _launch(self, plan: Any, t: int) -> None:
        result = self.executor.execute(plan)
        if result.error is not None:
            raise Stalled(f"step {result.step} failed on the simulator: {result.error['text']}")
        self._free_at = max(self._free_at, t) + self.executor.took
        self.flights.append((self._free_at, result))
        if self.observe is not None:
            self.observe(self._free_at, self.executor.work)
        self.steps += 1


@dataclass(slots=True)
class Run:
    """What a simulation did: its replicas, what its clients saw, the virtual µs it took."""

    replicas: list[Replica]
    meter: Meter
    t: int
    routed: list[int] = field(default_factory=list)


def simulate(
    jobs: Iterable[Job],
    config: Config,
    cost: CostModel,
    *,
    replicas: int = 1,
    router: Router = round_robin,
    tape: Tape | None = None,
    keep: Sequence[Keep] = (),
    observe: Callable[[int, Work], None] | None = None,
) -> Run:
    """Run all `jobs` to their end. Raises `Stalled`.

    `keep`: one for each replica, where its events go. `observe(t, work)`: hears of each step when it is planned, in
    order: when it will end, and what it computes.
    """
    meter = Meter()
    made = [
        Replica(config, cost, meter, tape, keep[index] if keep else None, observe) for index in range(replicas)
    ]
    return _Loop(made, meter, router, list(jobs)).run()


class _Loop:
    def __init__(self, replicas: list[Replica], meter: Meter, router: Router, jobs: list[Job]) -> None:
        self.replicas = replicas
        self.meter = meter
        self.router = router
        self.jobs: list[tuple[int, int, Job]] = [(one.t, at, one) for at, one in enumerate(jobs) if one.after is None]
        self.count = len(jobs)
        heapify(self.jobs)
        self.followers: dict[str, list[Job]] = {}
        for one in jobs:
            if one.after is not None:
                self.followers.setdefault(one.after, []).append(one)
        self.aborts: list[tuple[int, int, int, str]] = []
        self.routed = [0] * len(replicas)
        self.t = 0

    def run(self) -> Run:
        replicas = self.replicas
        while (t := self._next()) is not None:
            self.t = t
            for replica in replicas:
                replica.land(t)
            self._arrive(t)
            for replica in replicas:
                replica.plan(t)
            if self.meter.ended:
                self._follow(t)
        stuck = [rid for replica in replicas for rid, _, _ in replica.state.live]
        if stuck:
            raise Stalled(f"{len(stuck)} requests live, {stuck[0]!r} first, but nothing will happen any more")
        return Run(replicas, self.meter, self.t, self.routed)

    def _next(self) -> int | None:
        times = [at for replica in self.replicas if (at := replica.next_at) is not None]
        if self.jobs:
            times.append(self.jobs[0][0])
        if self.aborts:
            times.append(self.aborts[0][0])
        return max(self.t, min(times)) if times else None

    def _arrive(self, t: int) -> None:
        while self.aborts and self.aborts[0][0] <= t:
            _, _, index, rid = heappop(self.aborts)
            self.replicas[index].take(Abort(t=t, rid=rid, reason="client"))
        while self.jobs and self.jobs[0][0] <= t:
            _, number, job = heappop(self.jobs)
            event: Admit = job.admit(t)
            index = 0
            if len(self.replicas) > 1:
                index = self.router(event, [replica.state for replica in self.replicas], sum(self.routed))
            self.routed[index] += 1
            self.meter.came(event)
            self.replicas[index].take(event)
            if job.abort_after is not None:
                heappush(self.aborts, (t + job.abort_after, number, index, job.rid))

    def _follow(self, t: int) -> None:
        """Requests that come after one that has ended."""
        for rid in self.meter.take_ended():
            for job in self.followers.pop(rid, ()):
                self.count += 1
                heappush(self.jobs, (t + job.t, self.count, job))


__all__ = ["Replica", "Run", "Stalled", "simulate"]
