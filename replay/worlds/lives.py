"""The lives of requests as spans between record numbers, followed at the edges alone: no row is looked at per step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from leftfold.events import Admit, Event, ForwardDone, Tick
from leftfold.fsm import Effects, FinishReason, Output, Phase, State, Usage
from leftfold.fsm.effects import Outputs, TokenBatch

Key = tuple[str, int, int]

WAITING, PREFILL, DECODE, PREEMPTED, OTHER = range(5)
KINDS = ("waiting", "prefill", "decode", "preempted", "other")
"""What a span is."""

_KIND = {
    Phase.WAITING: WAITING, Phase.PREFILLING: PREFILL, Phase.DECODING: DECODE, Phase.PREEMPTED: PREEMPTED,
}  # fmt: skip
_IN_LINE = (WAITING, PREEMPTED)
_RUNS = (PREFILL, DECODE)


@dataclass(slots=True)
class Span:
    """From record `seq` on, until the next span or the end, a life is of this kind, in this slot (-1: none)."""

    kind: int
    seq: int
    slot: int = -1


@dataclass(slots=True)
class Life:
    """One choice of a request. Times in µs, numbers of records; -1: not yet. `number`: counts lives."""

    number: int
    key: Key
    seq: int
    t: int
    prompt: int
    most: int
    spans: list[Span] = field(default_factory=list)
    first_seq: int = -1
    first_t: int = -1
    end_seq: int = -1
    end_t: int = -1
    reason: str = ""
    tokens: int = 0
    cached: int = -1
    preempted: list[int] = field(default_factory=list)

    def until(self, seq: int) -> Life:
        """As it was after record `seq`."""
        twin = Life(self.number, self.key, self.seq, self.t, self.prompt, self.most)
        twin.spans = [Span(span.kind, span.seq, span.slot) for span in self.spans if span.seq <= seq]
        twin.preempted = [at for at in self.preempted if at <= seq]
        if any(span.kind in _RUNS for span in twin.spans):
            twin.cached = self.cached
        if 0 <= self.first_seq <= seq:
            twin.first_seq, twin.first_t = self.first_seq, self.first_t
        if 0 <= self.end_seq <= seq:
            twin.end_seq, twin.end_t, twin.reason, twin.tokens = self.end_seq, self.end_t, self.reason, self.tokens
        return twin

    def label(self) -> str:
        """The request's id, with epoch and choice where they say something."""
        rid, epoch, choice = self.key
        return rid + (f" epoch {epoch}" if epoch else "") + (f" #{choice}" if choice else "")


class Lives:
    """All lives, in the order they began; `living`: those without an end, `slots`: who runs where."""

    def __init__(self) -> None:
        self.all: list[Life] = []
        self.living: dict[Key, Life] = {}
        self.slots: dict[int, Key] = {}
        self._counts = [0] * len(KINDS)

    def begin(self, state: State, seq: int, t: int) -> None:
        """What lives already when the first record comes: in a log whose beginning was removed."""
        for request in state.live.values():
            self._born(request.key, seq, t, request.prompt_len, request.params.max_tokens)
        self._settle(self.living.copy(), seq, state)

    def until(self, seq: int, state: State) -> Lives:
        """As they were after record `seq`, when `state` was."""
        twin = Lives()
        twin.all = [life.until(seq) for life in self.all if life.seq <= seq]
        twin.living = {life.key: life for life in twin.all if life.end_seq < 0}
        twin.slots = {seat.slot: seat.request.key for seat in state.running()}
        for life in twin.living.values():
            twin._counts[life.spans[-1].kind] += 1
        return twin

    def take(self, seq: int, event: Event, effects: Effects, state: State) -> None:
        """Follow one record and what it led to; `state` is as it was after."""
        kind = type(event)
        touched: dict[Key, None] = {}
        if kind is Tick:
            plan = event.plan if effects.plan is None else effects.plan.plan  # type: ignore[union-attr]
            if plan is not None:
                for slot in plan.preempt:
                    self._preempted(slot, seq, touched)
                for join in plan.join:
                    touched[join.rid, join.epoch, join.choice] = None
        elif kind is Admit:
            self._admitted(seq, event, effects, state, touched)  # type: ignore[arg-type]
        elif kind is not ForwardDone:
            touched = dict.fromkeys(self.living)
        self._hear(seq, event.t, effects.outputs, touched)
        if touched:
            self._settle(touched, seq, state)
        running = self._counts[PREFILL] + self._counts[DECODE]
        waiting = self._counts[WAITING] + self._counts[PREEMPTED]
        if running != state.row_count or waiting != len(state.waiting):
            self._settle(self.living.copy(), seq, state)

    def _preempted(self, slot: int, seq: int, touched: dict[Key, None]) -> None:
        key = self.slots[slot]
        touched[key] = None
        self.living[key].preempted.append(seq)

    def _admitted(self, seq: int, event: Admit, effects: Effects, state: State, touched: dict[Key, None]) -> None:
        params = event.params
        prompt = len(event.prompt) if hasattr(event.prompt, "__len__") else 0
        keys = [request.key for request in state.by_rid.get(event.rid, ()) if request.epoch == event.epoch]
        keys += [(out.rid, out.epoch, out.choice) for out in effects.outputs if out.rid == event.rid]
        for key in dict.fromkeys(keys):
            if key not in self.living:
                self._born(key, seq, event.t, prompt, params.max_tokens)
                touched[key] = None

    def _born(self, key: Key, seq: int, t: int, prompt: int, most: int) -> None:
        life = Life(len(self.all), key, seq, t, prompt, most if isinstance(most, int) else 0)
        life.spans.append(Span(WAITING, seq))
        self.all.append(life)
        self.living[key] = life
        self._counts[WAITING] += 1

    def _hear(self, seq: int, t: int, outputs: Iterable[Output] | Outputs, touched: dict[Key, None]) -> None:
        """First tokens come one by one, later ones in batches, of which ends alone matter."""
        for part in outputs.parts if isinstance(outputs, Outputs) else outputs:
            if isinstance(part, TokenBatch):
                for index, (reason, usage) in part.ended.items():
                    self._end(part.seats[index].request.key, seq, t, reason, usage)
                continue
            key = (part.rid, part.epoch, part.choice)
            life = self.living[key]
            touched[key] = None
            if len(part.tokens) and life.first_seq < 0:
                life.first_seq, life.first_t = seq, t
            if part.finish_reason is not None:
                assert part.usage is not None
                self._end(key, seq, t, part.finish_reason, part.usage)

    def _end(self, key: Key, seq: int, t: int, reason: FinishReason, usage: Usage) -> None:
        life = self.living.pop(key)
        last = life.spans[-1]
        self._counts[last.kind] -= 1
        if self.slots.get(last.slot) == key:
            del self.slots[last.slot]
        life.end_seq, life.end_t, life.reason = seq, t, reason.value
        life.tokens, life.cached = usage.completion_tokens, usage.cached_tokens

    def _settle(self, keys: Iterable[Key], seq: int, state: State) -> None:
        """Begin a new span for each that is of another kind, or in another slot, than before."""
        for key in keys:
            life, request = self.living.get(key), state.live.get(key)
            if life is None or request is None:
                continue
            assert request.phase is not None
            kind = _KIND.get(request.phase, OTHER)
            slot = -1 if request.seat is None else request.seat.slot
            if life.cached < 0 and request.cached >= 0:
                life.cached = request.cached
            last = life.spans[-1]
            if (last.kind, last.slot) == (kind, slot):
                continue
            if self.slots.get(last.slot) == key:
                del self.slots[last.slot]
            if slot >= 0:
                self.slots[slot] = key
            self._counts[last.kind] -= 1
            self._counts[kind] += 1
            if last.seq == seq:
                last.kind, last.slot = kind, slot
            else:
                life.spans.append(Span(kind, seq, slot))


__all__ = ["DECODE", "KINDS", "Key", "Life", "Lives", "OTHER", "PREEMPTED", "PREFILL", "Span", "WAITING"]
