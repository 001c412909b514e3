"""Logs for tests of replay: a few requests driven by hand through `decide` and `step`, with made-up tokens."""

from __future__ import annotations

from collections import deque
from typing import Any

from leftfold.events import (
    Abort,
    Admit,
    ControlDone,
    Event,
    EventLog,
    ExecutorLost,
    ForwardDone,
    SamplingParams,
    Started,
    Tick,
)
from leftfold.fsm import Config, State, decide, step

CONFIG = Config(num_pages=8, page_size=4, max_running=3, max_batch_tokens=8, max_model_len=32)


class Recorder:
    """Folds what it logs; results are made up from the step and the row."""

    def __init__(self, log: EventLog, config: Config = CONFIG, model: str = "made-up") -> None:
        self.log = log
        self.state = State(config)
        self.config = config
        self.model = model
        self.t = 0
        self.starts = 0
        self.flights: deque[Any] = deque()
        self.start()

    def take(self, kind: type[Event], **fields: Any) -> Any:
        self.t += 10
        event = kind(t=self.t, **fields)
        self.log.append(event)
        return step(self.state, event)

    def start(self) -> None:
        self.starts += 1
        self.flights.clear()
        self.take(Started, incarnation=self.starts, config=self.config.as_dict(), model=self.model)

    def admit(self, rid: str, prompt: list[int], max_tokens: int = 6) -> None:
        self.take(Admit, rid=rid, prompt=prompt, params=SamplingParams(max_tokens=max_tokens))

    def tick(self) -> Any:
        """Decide; the plan that is in flight now, None if there is nothing to compute."""
        plan = decide(self.state, self.t + 10)
        if plan is None:
            return None
        planned = self.take(Tick, plan=plan).plan
        if planned is not None:
            self.flights.append(planned)
        return planned

    def done(self) -> None:
        """The oldest step in flight ends well."""
        plan = self.flights.popleft()
        tokens = [(plan.step * 7 + row.slot) % 50 for row in plan.rows if row.samples]
        self.take(ForwardDone, step=plan.step, tokens=tokens, digest=plan.digest)

    def operate(self, kind: type[Event], **fields: Any) -> None:
        """A control call, and the operation that it needs, from its plan to its end."""
        self.take(kind, **fields)
        plan = self.tick()
        self.done()
        self.take(ControlDone, op=plan.ops[0].op)

    def fail(self) -> None:
        """The oldest step in flight fails, and with it the later ones."""
        plan = self.flights.popleft()
        self.flights.clear()
        self.take(ForwardDone, step=plan.step, digest=plan.digest, error={"text": "planted", "retry": True})

    def run(self, steps: int = 1000) -> int:
        """Plan as far ahead as may be and end the oldest step, until nothing is left to do; `steps` times at most."""
        for done in range(steps):
            while len(self.flights) <= self.config.pipeline_depth and self.tick() is not None:
                pass
            if not self.flights:
                return done
            self.done()
        return steps


def record(log: EventLog, config: Config = CONFIG) -> State:
    """A log with some of everything: shared prefixes, preemption, an abort, a failed step, a loss, a restart."""
    made = Recorder(log, config)
    made.admit("a", list(range(1, 11)), max_tokens=10)
    made.admit("b", [*range(1, 9), 20, 21], max_tokens=10)
    made.run(3)
    made.admit("c", [30, 31, 32, 33, 34, 35, 36], max_tokens=12)
    made.run(6)
    made.tick()
    made.fail()
    made.take(Abort, rid="b", reason="gone")
    made.run(2)
    made.take(ExecutorLost, error="planted")
    made.start()
    made.run(2)
    made.start()
    made.admit("d", [], max_tokens=1)
    made.run()
    return made.state
