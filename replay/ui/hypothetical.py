"""What would have come of it: a world that is like another up to a record, with one event left out or put in there.

From there on today's planner decides. What came from outside comes when it came; decisions fall, and results come in,
where they did in the log, and where the log's engine had nothing to do, a step takes the log's median time. Answers are
the log's own, token by token, since they do not depend on the batch; what goes on beyond them gets made-up tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from leftfold.events import (
    Admit,
    ControlDone,
    Event,
    ExecutorLost,
    ForwardDone,
    Started,
    Tick,
)
from leftfold.events.plan import as_list
from leftfold.fsm import State, decide
from leftfold.fsm.state import InFlight
from leftfold.replay.errors import ReplayError
from leftfold.replay.worlds import World
from leftfold.replay.worlds.lives import Key

MADE_UP = 1 << 20
"""Tokens from here on are made up: no stop id is among them."""
PACE = 10_000
"""µs that a step takes where the log has none to go by."""
BEYOND = 20_000
"""So many records at most are made after the log's last one."""


class BadEdit(ReplayError):
    """An edit that cannot be made; the message says why."""


class Edit:
    """Leave out record `seq` (`event` None), or put `event` in after it.

    `horizon`: so many records of the log after it are gone through, 0 for all of them.
    """

    __slots__ = ("event", "horizon", "seq")

    def __init__(self, seq: int, event: Event | None = None, horizon: int = 0) -> None:
        self.seq = seq
        self.event = event
        self.horizon = horizon

    @property
    def text(self) -> str:
        """What it is, for a reader."""
        if self.event is None:
            return f"without record {self.seq}"
        rid = getattr(self.event, "rid", None)
        return f"{type(self.event).__name__}{f' {rid}' if rid else ''} after record {self.seq}"


class Hypothesis:
    """Makes a world out of `base` and an edit. `run` yields after every record that it made, so that it can be left.

    `made_up`: tokens that the log does not have.
    """

    def __init__(self, base: World, edit: Edit) -> None:
        base.check(edit.seq)
        if edit.event is None and edit.seq == base.first:
            raise BadEdit(f"record {edit.seq} is the first: without it there is nothing to fold on")
        if edit.event is not None and isinstance(edit.event, (Tick, ForwardDone, Started)):
            raise BadEdit(f"a {type(edit.event).__name__} cannot be put in: what the engine does itself is made anew")
        self.base = base
        self.edit = edit
        self.kept = edit.seq - 1 if edit.event is None else edit.seq
        self.made_up = 0
        self.world = self._beginning()
        self._upto = base.last if not edit.horizon else min(base.last, edit.seq + edit.horizon)
        self._answers: dict[Key, dict[int, int]] = {}
        took = base.overview.column("took")
        self._pace = int(np.median(took[took > 0])) if (took > 0).any() else PACE
        self._t = 0

    def _beginning(self) -> World:
        """The base up to the edit, records and overview shared as far as they go."""
        fold = self.base.fold_at(self.kept)
        assert fold.state is not None  # at least the first record is kept
        world = World.begun(fold, self.base.first, quiet=True)
        world.tape = self.base.tape.until(self.kept)
        world.overview = self.base.overview.until(self.kept, fold.state)
        world.expected = self.base.last
        world.parent = self.base
        return world

    @property
    def _state(self) -> State:
        state = self.world.end.state
        assert state is not None
        return state

    def run(self) -> Iterator[None]:
        """Make the world; `world.done` when nothing more comes. Raises what folding raises."""
        yield from self._listen()
        self._t = self.world.end.t
        if self.edit.event is not None:
            self._take(replace(self.edit.event, t=self._t))
            yield
        recorded = self.base.fold_at(self.kept).state
        busy = 0 if recorded is None else len(recorded.in_flight)
        before: Event | None = None
        for seq, event in self.base.tape.between(self.kept + 1, self._upto):
            if before is not None and not busy and event.t - self._t > self._pace:
                yield from self._on_our_own(event.t)
            self._t = max(self._t, event.t)
            busy = _busy(busy, event)
            if seq != self.edit.seq or self.edit.event is not None:
                self._follow(event)
            before = event
            yield
        if self._upto == self.base.last and not busy:
            yield from self._on_our_own(None)
        self.world.done = True

    def _listen(self) -> Iterator[None]:
        """What the log answers from here on, by position."""
        fold = self.base.fold_at(self.kept)
        for seq, event in self.base.tape.between(self.kept + 1, self._upto):
            for out in fold.take(seq, event).outputs:
                known = self._answers.setdefault((out.rid, out.epoch, out.choice), {})
                known.update((out.position + at, int(token)) for at, token in enumerate(out.tokens))
            yield

    def _follow(self, event: Event) -> None:
        """A record of the log: as it is where it came from outside, or the engine's own doing at that place."""
        if isinstance(event, Tick):
            self._decide()
        elif isinstance(event, ForwardDone):
            self._land(event)
        elif isinstance(event, ControlDone):
            op = self._state.controls[0].op if self._state.controls else None
            if op is not None:
                self._take(replace(event, t=self._t, op=op))
        else:
            self._take(replace(event, t=self._t))

    def _take(self, event: Event) -> None:
        self.world.take(event)

    def _decide(self) -> bool:
        plan = decide(self._state, self._t)
        if plan is None:
            return False
        self._take(Tick(t=self._t, plan=plan))
        return True

    def _land(self, like: ForwardDone | None = None) -> None:
        """The oldest step in flight ends, as well as `like`."""
        if not self._state.in_flight:
            return
        flight = self._state.in_flight[0]
        if like is not None and like.error is not None:
            error: Mapping[str, Any] = {"text": str(_text(like.error)), "retry": True}
            self._take(ForwardDone(t=self._t, step=flight.step, error=error, digest=flight.digest))
        else:
            tokens = [self._token(key, position) for key, position in sampled(flight)]
            self._take(ForwardDone(t=self._t, step=flight.step, tokens=tokens, digest=flight.digest))

    def _token(self, key: Key, position: int) -> int:
        token = self._answers.get(key, {}).get(position)
        if token is None:
            self.made_up += 1
            return MADE_UP + position
        return token

    def _on_our_own(self, until: int | None) -> Iterator[None]:
        """The log's engine has nothing to do up to `until` (None: ever after), but there may be something here."""
        begun = self.world.last
        while self.world.last - begun < BEYOND:
            if self._state.in_flight:
                at = self._t + self._pace
                if until is not None and at >= until:
                    return
                self._t = at
                self._land()
            elif not self._decide():
                wake = self._state.wake_at
                if wake is None or wake <= self._t or (until is not None and wake >= until):
                    return
                self._t = wake
            yield


def _busy(busy: int, event: Event) -> int:
    """Steps that the log's engine has in flight after `event`."""
    if isinstance(event, (Started, ExecutorLost)) or (isinstance(event, ForwardDone) and event.error is not None):
        return 0
    if isinstance(event, ForwardDone):
        return max(0, busy - 1)
    return busy + int(isinstance(event, Tick) and event.plan is not None and event.plan.step is not None)


def sampled(flight: InFlight) -> Iterator[tuple[Key, int]]:
    """Who gets a token of a step's result, and at which position, in the result's order."""
    rows = flight.rows
    for seat, end in zip(rows.decode.seats, as_list(rows.ends), strict=True):
        yield seat.request.key, end
    for chunk in rows.chunks:
        if chunk.samples:
            yield chunk.seat.request.key, chunk.start + chunk.length


def _text(error: Any) -> Any:
    return error.get("text", "") if isinstance(error, Mapping) else error


def admit_of(raw: Mapping[str, Any], base: World, t: int) -> Admit:
    """A request to put in: `rid`, and `like` (the id of one whose prompt and parameters it has) or `prompt_tokens`.

    Raises `BadEdit`.
    """
    from leftfold.events import SamplingParams

    rid = raw.get("rid") or "what-if"
    most = raw.get("max_tokens")
    if not isinstance(rid, str) or not (most is None or (isinstance(most, int) and 0 < most < 1 << 20)):
        raise BadEdit("rid is a text, max_tokens a whole number of at least 1")
    if raw.get("like"):
        life = next((life for life in base.overview.lives.all if life.key[0] == raw["like"]), None)
        if life is None:
            raise BadEdit(f"like: there is no request {str(raw['like'])[:80]!r}")
        event = base.tape.event(life.seq)
        if not isinstance(event, Admit):
            raise BadEdit("like: that request came before the log's first record")
        params = event.params if most is None else replace(event.params, max_tokens=most)
        return replace(event, t=t, rid=rid, epoch=0, params=params)
    count = raw.get("prompt_tokens", 64)
    if not isinstance(count, int) or not 0 < count < 1 << 20:
        raise BadEdit("prompt_tokens is a whole number of at least 1")
    vocabulary = base.config.get("vocab_size") or 32_000
    prompt = np.arange(count, dtype=np.int32) % min(vocabulary, 32_000)
    return Admit(t=t, rid=rid, prompt=prompt, params=SamplingParams(max_tokens=most or 64))


__all__ = ["BadEdit", "Edit", "Hypothesis", "admit_of", "sampled"]
