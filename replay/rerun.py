"""Run a log's inputs again, with whatever planner is here: what clients and operators did, and where steps fell.

A log is cut into items: events from outside, places where the engine decided, places where a step's result came. Any
sublist of them can be run: a decision that decides nothing and a result that nobody waits for are passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from leftfold.events import Admit, ControlDone, Event, ForwardDone, Plan, Record, SamplingParams, Started, Tick
from leftfold.fsm import Config, State, apply, decide, step
from leftfold.replay.checkout import Checkout
from leftfold.replay.compare import Divergence, plan_dict
from leftfold.replay.errors import NotStarted, ReplayError
from leftfold.replay.walking import walk

MADE_UP = 1 << 20
"""Results are tokens from here on, so that no stop id is among them: answers end where their length ends."""


class Item(NamedTuple):
    """`event`: what came from outside; a `Tick` or a `ForwardDone` stand for the place where one was."""

    t: int
    event: Event


class Found(NamedTuple):
    """What a run showed. `kind`: equal kinds are taken for the same; `item`: index of the item that showed it."""

    kind: str
    text: str
    item: int
    divergence: Divergence | None = None


@dataclass(slots=True)
class Outcome:
    """`events`: what was folded, plans and made-up results included; `found`: what it showed, if anything."""

    events: list[Event]
    found: Found | None


def items_of(records: Iterable[Record]) -> list[Item]:
    """The items of a log. Answers become as long as they were; clients' ids and times stay."""
    items: list[Item] = []
    lengths: dict[tuple[str, int], int] = {}
    places: dict[tuple[str, int], int] = {}
    for (_, event), effects, _ in walk(records):
        if isinstance(event, Admit) and (event.rid, event.epoch) not in places:
            places[event.rid, event.epoch] = len(items)
        items.append(Item(event.t, event))
        for output in effects.outputs:
            key = (output.rid, output.epoch)
            lengths[key] = lengths.get(key, 0) + (len(output.tokens) if not output.choice else 0)
            if output.finish_reason is not None and output.finish_reason.value == "stop" and key in places:
                _end_at(items, places[key], lengths[key])
    return items


def _end_at(items: list[Item], at: int, length: int) -> None:
    event = items[at].event
    assert isinstance(event, Admit)
    params = replace(event.params, max_tokens=max(1, length), stop_token_ids=(), min_tokens=0)
    items[at] = Item(items[at].t, replace(event, params=params))


class OutOfTime(ReplayError):
    """`go_on` said no before the item at index `at`."""

    def __init__(self, at: int) -> None:
        super().__init__(f"no time was left after {at} items")
        self.at = at


def rerun(items: Sequence[Item], other: Checkout | None = None, go_on: Callable[[], bool] = lambda: True) -> Outcome:
    """Run `items`, checking every invariant after each event; with `other`, comparing each decision with its own.

    Ends at the first thing found: kinds "divergence in FIELD", or the name of what was raised. `go_on` is asked before
    each item; raises `OutOfTime` where it says no.
    """
    return _Rerun(other).run(items, go_on)


class _Rerun:
    def __init__(self, other: Checkout | None) -> None:
        self.events: list[Event] = []
        self.other = other
        self.state: State | None = None
        self.t = 0
        self.wrong: Divergence | None = None

    def run(self, items: Sequence[Item], go_on: Callable[[], bool]) -> Outcome:
        for index, item in enumerate(items):
            if not go_on():
                raise OutOfTime(index)
            self.t = max(self.t, item.t)
            try:
                self._take(item.event)
            except NotStarted:
                raise
            except Exception as error:  # whatever a reducer raises is what is looked for
                return Outcome(self.events, Found(type(error).__name__, f"{type(error).__name__}: {error}", index))
            if self.wrong is not None:
                text = self.wrong.describe()
                return Outcome(self.events, Found(f"divergence in {self.wrong.field}", text, index, self.wrong))
        return Outcome(self.events, None)

    def _take(self, event: Event) -> None:
        state = self.state
        if isinstance(event, Started):
            if state is None:
                if event.config is None:
                    raise NotStarted("the first Started carries no config")
                self.state = State(Config.from_dict(event.config))
                if self.other is not None:
                    self.other.begin(dict(event.config))
            return self._fold(replace(event, t=self.t))
        if state is None:
            raise NotStarted(f"a {type(event).__name__} before any Started")
        if isinstance(event, Tick):
            return self._tick(state)
        if isinstance(event, ForwardDone):
            return self._done(state, event)
        if isinstance(event, ControlDone):
            op = state.controls[0].op if state.controls else None
            return None if op is None else self._fold(replace(event, t=self.t, op=op))
        return self._fold(replace(event, t=self.t))

    def _tick(self, state: State) -> None:
        self.events.append(Tick(t=self.t))  # what stands there when the decision itself fails
        plan = decide(state, self.t)
        if self.other is not None:
            self.wrong = self._compare(plan)
        if plan is None and self.wrong is None:
            self.events.pop()
            return
        tick = Tick(t=self.t, plan=plan if plan is not None else Plan())
        self.events[-1] = tick
        if self.wrong is None:
            apply(state, tick, plan)
            state.check()
            if self.other is not None:
                self.other.take(tick)

    def _compare(self, plan: Plan | None) -> Divergence | None:
        assert self.other is not None
        said = self.other.decide(self.t)
        ours = None if plan is None else plan_dict(plan)
        theirs = said.get("plan")
        seq = len(self.events)
        if "error" in said:
            return Divergence(seq, "plan", ours, said["error"], ours, None)
        if ours == theirs:
            return None
        if ours is None or theirs is None:
            return Divergence(seq, "plan", ours, theirs, ours, theirs)
        name = next(name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name))
        return Divergence(seq, name, ours.get(name), theirs.get(name), ours, theirs)

    def _done(self, state: State, event: ForwardDone) -> None:
        if not state.in_flight:
            return
        flight = state.in_flight[0]
        tokens = [] if event.error is not None else [MADE_UP + flight.step * 64 + at for at in range(flight.expected)]
        self._fold(ForwardDone(t=self.t, step=flight.step, tokens=tokens, error=event.error))

    def _fold(self, event: Event) -> None:
        assert self.state is not None
        self.events.append(event)
        step(self.state, event)
        self.state.check()
        if self.other is not None:
            self.other.take(event)


Predicate = Callable[[Sequence[Event]], Any]


def plain_params(params: SamplingParams) -> SamplingParams:
    """The parameters that decide anything, the rest at their defaults."""
    return SamplingParams(
        max_tokens=params.max_tokens, min_tokens=params.min_tokens, stop_token_ids=params.stop_token_ids, n=params.n
    )


__all__ = ["Found", "Item", "OutOfTime", "Outcome", "Predicate", "items_of", "plain_params", "rerun"]
