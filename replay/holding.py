"""What holds a request whatever would be decided: a pause, a drain, sleep, a call at its barrier, no executor.

Nothing is decided meanwhile, so no `Tick` tells of it: what does is the state between one record and the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from leftfold.events import ControlDone, Event, ExecutorLost, ForwardDone, Pause, Started, Tick
from leftfold.fsm import Gate, Phase, State
from leftfold.fsm.request import Request

Who = tuple[str, int, int]

PAUSED, DRAINING, ASLEEP, CALL, ABSENT, CLOSING, STOPPED, DOWN = HOLDS = (
    "paused", "draining", "asleep", "call", "absent", "closing", "stopped", "down",
)  # fmt: skip
"""Kinds of holds. Some may hold a request at the same time, such as sleep and a pause."""

_DOES: Mapping[Phase, str] = {
    Phase.WAITING: "waiting", Phase.PREFILLING: "in its prefill", Phase.DECODING: "decoding",
    Phase.PREEMPTED: "preempted",
}  # fmt: skip


@dataclass(slots=True)
class Hold:
    """A stretch in which one thing (`kind` of `HOLDS`, `text`) held one choice of a request. `begin`, `end`: in µs.

    `first_seq`, `last_seq`: of the records after which it was held, and not any more; `since`, `until`: the calls, with
    their records, that began and ended it (`until` is empty while it lasts); `phase`: what it was when it began;
    `came`: whether it was admitted into it.
    """

    who: Who
    kind: str
    text: str
    since: str
    phase: str
    first_seq: int
    begin: int
    last_seq: int
    end: int
    came: bool = False
    until: str = ""

    @property
    def why(self) -> str:
        """What held it, and from which record to which."""
        since = f"{self.since}, before it came," if self.came else self.since
        return f"{self.text}: from {since} to {self.until or f'seq {self.last_seq}, and on'}"

    def sentence(self) -> str:
        """The whole in one sentence."""
        seconds = f"{(self.end - self.begin) / 1e6:.3f} s"
        return f"From {self.begin / 1e6:.3f} s on it was held {seconds}, {self.phase}, while {self.why}."


class PutBack(NamedTuple):
    """A row that went back in line although nothing was short: `text` says for what."""

    who: Who
    seq: int
    t: int
    text: str


def held(state: State) -> bool:
    """Whether anything holds rows now."""
    return bool(_bars(state))


class Holds:
    """Follows the records of a log for the requests called `rid`.

    `all`: their holds, in the order they began; `t`: of the last record in µs; `put_back`: where one of them lost its
    row to something else than the planner's choice.
    """

    def __init__(self, rid: str) -> None:
        self.rid = rid
        self.all: list[Hold] = []
        self.put_back: list[PutBack] = []
        self._seated: set[Who] = set()
        self._open: dict[tuple[Who, str], Hold] = {}
        self._since: dict[str, str] = {}
        self._calls: dict[int, tuple[Event, int]] = {}  # control calls that wait, by identity: a name may come twice
        self._head: Event | None = None
        self._present = True
        self.t = 0

    def begin(self, state: State | None, seq: int, t: int) -> None:
        """What holds already where the first record comes after `seq`."""
        if state is None:
            return
        bars = _bars(state)
        self._since = dict.fromkeys(bars, f"before seq {seq + 1}")
        for key, request in self._held(bars, state).items():
            self._begun(key, bars[key[1]], request, seq, t, came=False)
        self._remember(state, t)

    def take(self, seq: int, event: Event, state: State) -> None:
        """One more record; `state` is as it was after."""
        if hasattr(event, "call"):
            waiting = {id(control.event) for control in state.controls}
            self._calls = {key: call for key, call in self._calls.items() if key in waiting or call[0] is self._head}
            self._calls[id(event)] = (event, seq)
        bars = _bars(state)
        if bars or self._since or self._open:
            self._change(bars, seq, event, state)
        if type(event) is Started and self._present:
            self._was_down(seq, event.t, state)
        if self._seated:
            self._look_back(seq, event, state)
        self._remember(state, event.t)

    def finish(self, seq: int, t: int) -> None:
        """The last record was `seq`, and what is looked at ends at `t`."""
        for hold in self._open.values():
            hold.last_seq, hold.end = seq, max(t, hold.begin)

    def _remember(self, state: State, t: int) -> None:
        self._head = state.controls[0].event if state.controls else None
        self._present = state.executor_present
        self.t = t
        self._seated = {request.key for request in state.by_rid.get(self.rid, ()) if request.seat is not None}

    def holds(self, who: Who) -> bool:
        """Whether something holds it now."""
        return any(key[0] == who for key in self._open)

    def _look_back(self, seq: int, event: Event, state: State) -> None:
        for request in state.by_rid.get(self.rid, ()):
            if request.seat is None and request.key in self._seated:
                text = self._cleared(seq, event, state)
                if text:
                    self.put_back.append(PutBack(request.key, seq, event.t, text))

    def _cleared(self, seq: int, event: Event, state: State) -> str:
        """What took a row away; empty where the planner chose to."""
        match event:
            case Tick():
                head = state.controls[0] if state.controls else None
                if event.plan is None or not event.plan.ops or head is None or not head.barrier:
                    return ""
                return f"{self._named(head.event)} takes what every row has computed with it"
            case ExecutorLost():
                return "the executor was lost, and what it had computed with it"
            case Started():
                return "the engine was started again, and what was computed before is gone"
            case ForwardDone():
                return f"the result of step {event.step} could not be used"
            case _:
                return f"the limits leave room for {state.config.rows} running, fewer than ran"

    def _change(self, bars: Mapping[str, str], seq: int, event: Event, state: State) -> None:
        before = self._since
        self._since = {text: before.get(text) or self._origin(kind, seq, event, state) for text, kind in bars.items()}
        held = self._held(bars, state)
        for key in [key for key in self._open if key not in held]:
            hold = self._open.pop(key)
            hold.last_seq, hold.end, hold.until = seq, event.t, self._ending(hold, seq, event, state)
            if hold.end == hold.begin:
                self.all.remove(hold)
        for key, request in held.items():
            if key not in self._open:
                text = key[1]
                came = getattr(event, "rid", None) == self.rid and self._since[text] == before.get(text)
                self._begun(key, bars[text], request, seq, event.t, came=came)

    def _held(self, bars: Mapping[str, str], state: State) -> dict[tuple[Who, str], Request]:
        """Who is held, and by what: by a call only where nothing else would hold it beside that."""
        found: dict[tuple[Who, str], Request] = {}
        for request in state.by_rid.get(self.rid, ()):
            texts = [text for text, kind in bars.items() if _applies(kind, request, state)]
            if len(texts) > 1:
                texts = [text for text in texts if bars[text] != CALL]
            found |= {(request.key, text): request for text in texts}
        return found

    def _begun(self, key: tuple[Who, str], kind: str, request: Request, seq: int, t: int, *, came: bool) -> None:
        who, text = key
        assert request.phase is not None
        phase = _DOES.get(request.phase, request.phase.name.lower())
        hold = Hold(who, kind, text, self._since[text], phase, seq, t, seq, t, came)
        self._open[key] = hold
        self.all.append(hold)

    def _was_down(self, seq: int, t: int, state: State) -> None:
        """An engine that begins anew was not there since the last record, whatever that was."""
        if t == self.t:
            return
        for request in state.by_rid.get(self.rid, ()):
            if not self.holds(request.key):
                phase = "running" if request.key in self._seated else "in line"
                since, until = f"seq {seq - 1}, the last record before,", f"the Started at seq {seq}"
                hold = Hold(request.key, DOWN, "no engine ran", since, phase, seq - 1, self.t, seq, t, until=until)
                self.all.append(hold)

    def _origin(self, kind: str, seq: int, event: Event, state: State) -> str:
        """What began this, with its record."""
        if kind in (PAUSED, DRAINING) and not isinstance(event, Pause):
            drain = next((since for text, since in self._since.items() if text == _DRAIN), None)
            return drain or f"seq {seq}"
        if isinstance(event, Pause):
            return f"the Pause ({event.mode}) at seq {seq}"
        if kind == CALL:
            return self._named(state.controls[0].event)
        if kind == ASLEEP and self._head is not None:
            return self._named(self._head)
        return f"the {type(event).__name__} at seq {seq}"

    def _named(self, call: Event) -> str:
        known = self._calls.get(id(call))
        return f"the {type(call).__name__}" + (f" at seq {known[1]}" if known else "")

    def _ending(self, hold: Hold, seq: int, event: Event, state: State) -> str:
        """What ended it, with its record."""
        if hold.who not in state.live:
            return f"its own end at seq {seq}"
        if isinstance(event, ControlDone) and self._head is not None:
            end = "the end" if event.error is None else "the failure"
            return f"seq {seq}, {end} of {self._named(self._head)}"
        if hold.kind == DRAINING and not hasattr(event, "call"):
            return f"seq {seq}, when all that came before had run"
        return f"the {type(event).__name__} at seq {seq}"


_DRAIN = "the engine was draining"


def _bars(state: State) -> dict[str, str]:
    """What holds rows now: text to kind."""
    found: dict[str, str] = {}
    if not state.executor_present:
        found["the executor was absent"] = ABSENT
    if state.asleep:
        found[f"{' and '.join(state.asleep)} slept"] = ASLEEP
    match state.gate:
        case Gate.RUNNING:
            pass
        case Gate.DRAINING if state.drain_mode == "wait":
            found[_DRAIN] = DRAINING
        case Gate.DRAINING | Gate.PAUSED:
            found["the engine was paused"] = PAUSED
        case Gate.CLOSING if state.frozen:
            found["the engine closed from a pause"] = CLOSING
        case Gate.STOPPED:
            found["the engine was stopped"] = STOPPED
    if state.controls and state.controls[0].barrier:
        found[f"a {type(state.controls[0].event).__name__} was carried out"] = CALL
    return found


def _applies(kind: str, request: Request, state: State) -> bool:
    """A row is held from the result of its last step on; a drain holds only what came after its pause."""
    if request.seat is not None and state.flies(request.seat):
        return False
    return kind != DRAINING or request.arrival >= state.gate_seq


def merged(holds: Iterable[Hold]) -> list[tuple[int, int]]:
    """The stretches in which anything held, in µs, in order and apart from each other."""
    found: list[tuple[int, int]] = []
    for hold in sorted(holds, key=lambda hold: hold.begin):
        if found and hold.begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], hold.end))
        elif hold.end > hold.begin:
            found.append((hold.begin, hold.end))
    return found


__all__ = ["HOLDS", "Hold", "Holds", "PutBack", "Who", "held", "merged"]
