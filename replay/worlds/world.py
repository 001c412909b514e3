"""A folded log: its records, its overview, and the state after any record, folded on from the nearest copy."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from leftfold.events import Abort, Admit, Event, ForwardDone, Record, Tick
from leftfold.fsm import Effects, Reason, State, decide
from leftfold.replay.errors import ReplayError
from leftfold.replay.explain import Explanation, explain_from
from leftfold.replay.fold import Fold
from leftfold.replay.holding import held
from leftfold.replay.walking import opened
from leftfold.replay.worlds.lives import Life
from leftfold.replay.worlds.overview import CODES, Overview
from leftfold.replay.worlds.tape import Tape

MOST_COPIES = 256
"""Copies along the whole log; when there are more, every other one is dropped."""
STRIDE = 256
"""Records between copies, at first."""
RECENT = 24
"""Copies where somebody has looked lately."""
MOST_DECISIONS = 200
"""Decisions that an explanation makes anew: one may take milliseconds where many requests wait."""
MOST_CALLS = 8
"""So many calls before a request's arrival are looked at for the one that held it."""
BACK = (16, 128)
"""So many records before where somebody looks a copy is left, for steps back."""


_STEPS = tuple(CODES[kind] for kind in (Admit, Abort, Tick, ForwardDone))
"""Records that let no call begin to hold rows."""


class OutOfRange(ReplayError):
    """A record that is not there (yet)."""


@dataclass(slots=True)
class Moment:
    """Record `seq`, what it led to, and the fold after it (the caller's own).

    `reasons`: of a `Tick`, why requests did not run, as today's planner has it.
    """

    seq: int
    event: Event
    effects: Effects
    fold: Fold
    reasons: list[Reason] = field(default_factory=list)

    @property
    def state(self) -> State:
        assert self.fold.state is not None
        return self.fold.state


def copy_of(fold: Fold) -> Fold:
    """An independent copy."""
    state = None if fold.state is None else fold.state.copy()
    return Fold(fold.override, state, fold.seq, fold.t, fold.first, fold.last)


class World:
    """Grows while one thread reads or makes its records; any thread may look at what is there.

    `done`: nothing more comes; `error`: why not, where that was not the log's end; `expected`: how many records there
    will be, as far as that is known. `parent`: the world that it is equal to up to where its own fold began.
    """

    def __init__(self, fold: Fold, tape: Tape, overview: Overview) -> None:
        self.tape = tape
        self.overview = overview
        self.expected = 0
        self.done = False
        self.error = ""
        self.parent: World | None = None
        self._fold = fold
        self._stride = STRIDE
        self._copies: dict[int, Fold] = {fold.seq: copy_of(fold)}
        self._seqs = [fold.seq]
        self._recent: OrderedDict[int, Fold] = OrderedDict()
        self._lock = threading.RLock()

    @classmethod
    def begun(cls, fold: Fold, first: int = 1, *, quiet: bool = False) -> World:
        """A world whose first record will be `first`, on a fold of what went before; `quiet`: no life begins there."""
        world = cls(fold, Tape(first), Overview(first))
        if fold.state is not None and not quiet:
            world.overview.lives.begin(fold.state, first, fold.t)
        return world

    @classmethod
    def of(cls, records: Iterable[Record]) -> tuple[World, Iterator[Record]]:
        """A world without records yet, and those that it is to take. Raises what opening a log raises."""
        fold, rest = opened(records)
        return cls.begun(fold, fold.seq + 1), rest

    @classmethod
    def read(cls, records: Iterable[Record]) -> World:
        """All of `records` at once. Raises `LogError` and `ReplayError`."""
        world, rest = cls.of(records)
        for record in rest:
            world.take(record.event)
        world.done = True
        return world

    @property
    def first(self) -> int:
        return self.tape.first

    @property
    def last(self) -> int:
        """The newest record that can be looked at."""
        return self.overview.first + len(self.overview) - 1

    @property
    def model(self) -> str:
        return "" if self._fold.first is None else self._fold.first.model

    @property
    def config(self) -> dict[str, Any]:
        """The limits that are in force where the world ends."""
        return {} if self._fold.state is None else self._fold.state.config.as_dict()

    @property
    def end(self) -> Fold:
        """The fold where the world ends: look, and do not keep."""
        return self._fold

    def take(self, event: Event) -> Effects:
        """Fold one more record. Raises `ReplayError`; nothing is kept of the record then."""
        seq = self.tape.last + 1
        fold = self._fold
        effects = fold.take(seq, event)
        assert fold.state is not None
        self.tape.append(event)
        self.overview.take(seq, event, effects, fold.state)
        if seq >= self._seqs[-1] + self._stride:
            self._keep(fold)
        return effects

    def _keep(self, fold: Fold) -> None:
        with self._lock:
            self._copies[fold.seq] = copy_of(fold)
            self._seqs.append(fold.seq)
            if len(self._seqs) > MOST_COPIES:
                self._stride *= 2
                for seq in self._seqs[1::2]:
                    del self._copies[seq]
                self._seqs = self._seqs[::2]

    def check(self, seq: int) -> None:
        """Raises `OutOfRange` unless there is a record `seq`."""
        if not self.first <= seq <= self.last:
            more = "" if self.done else " so far"
            raise OutOfRange(f"there is no record {seq}; there are {self.first} to {self.last}{more}")

    def fold_at(self, seq: int) -> Fold:
        """The fold after record `seq` (`first - 1`: before the first), the caller's own. Raises `OutOfRange`."""
        if seq != self.first - 1:
            self.check(seq)
        if self.parent is not None and seq < self._seqs[0]:
            return self.parent.fold_at(seq)
        with self._lock:
            fold = copy_of(self._nearest(seq))
            for record in self.tape.between(fold.seq + 1, seq):
                if record.seq + BACK[0] in (seq, seq - BACK[1] + BACK[0]):
                    self._remember(fold)
                fold.take(record.seq, record.event)
            return fold

    def _nearest(self, seq: int) -> Fold:
        at = self._seqs[bisect_right(self._seqs, seq) - 1]
        near = max((known for known in self._recent if known <= seq), default=-1)
        if near >= at:
            self._recent.move_to_end(near)
            return self._recent[near]
        return self._copies[at]

    def _remember(self, fold: Fold) -> None:
        if fold.seq not in self._recent and fold.seq not in self._copies:
            self._recent[fold.seq] = copy_of(fold)
            if len(self._recent) > RECENT:
                self._recent.popitem(last=False)

    def moment(self, seq: int, *, reasons: bool = False) -> Moment:
        """Record `seq` and what it led to. Raises `OutOfRange`."""
        self.check(seq)
        with self._lock:
            fold = self.fold_at(seq - 1)
            event = self.tape.event(seq)
            found: list[Reason] = []
            if reasons and isinstance(event, Tick) and fold.state is not None:
                decide(fold.state, event.t, trace=found)
            effects = fold.take(seq, event)
            self._remember(fold)
        return Moment(seq, event, effects, fold, found)

    def _before_hold(self, life: Life) -> Fold | None:
        """The fold before what holds rows when a request comes began: so the call that began it is told of, too.

        None where that was too long ago, or a request of the same id came in between.
        """
        namesake = max((other.seq for other in self.overview.lives.all
                        if other.key[0] == life.key[0] and other.seq < life.seq), default=-1)  # fmt: skip
        codes = self.overview.code[: life.seq - self.first]
        calls = (self.first + at for at in reversed(range(len(codes))) if codes[at] not in _STEPS)
        for call in islice(calls, MOST_CALLS):
            fold = self.fold_at(call - 1) if call > namesake else None
            if fold is None or fold.state is None or not held(fold.state):
                return fold
        return None

    def explain(self, life: Life, at: int | None = None) -> Explanation:
        """Why a request waited or gave way from its arrival to record `at` (None: to its end). Raises `OutOfRange`.

        Of a long life only so many decisions are looked at, `MOST_DECISIONS` or a few more, evenly spread.
        """
        upto = min(at if at is not None else life.end_seq if life.end_seq >= 0 else self.last, self.last)
        fold = self.fold_at(life.seq - 1)
        if fold.state is not None and held(fold.state):
            fold = self._before_hold(life) or fold
        every = max(1, (upto - life.seq) // 2 // MOST_DECISIONS)
        found = explain_from(fold, self.tape.between(fold.seq + 1, upto), life.key[0], at, every=every)
        found.causes = [cause for cause in found.causes if cause.who == life.key]
        return found


__all__ = ["Moment", "OutOfRange", "World", "copy_of"]
