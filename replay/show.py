"""Look into a log: the engine's state after a record, or one request's life."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from leftfold.events import (
    Abort,
    Admit,
    Control,
    ControlDone,
    Event,
    ExecutorLost,
    ForwardDone,
    Plan,
    Record,
    Row,
    Started,
    Tick,
)
from leftfold.fsm import Effects, Output, State
from leftfold.fsm.admission import MAX_CHOICES
from leftfold.replay.fold import Fold
from leftfold.replay.holding import Holds
from leftfold.replay.snapshots import is_log, whole


def choices_of(event: Admit) -> int:
    """How many choices a request has: of one that asks for no possible number, one, which is refused."""
    asked = event.params.n
    return asked if type(asked) is int and 1 <= asked <= MAX_CHOICES else 1


@dataclass(frozen=True, slots=True)
class Moment:
    """One thing that happened to a request. `t` in µs since the first `Started`."""

    seq: int
    t: int
    what: str
    detail: dict[str, Any]

    def line(self) -> str:
        shown = " ".join(f"{name}={value}" for name, value in self.detail.items())
        return f"{self.seq:>8}  {self.t / 1e6:>12.6f} s  {self.what:<10} {shown}".rstrip()


def snapshot(folded: Fold) -> dict[str, Any]:
    """The engine's state as plain data: figures, control calls that wait (in order), every live request."""
    state = folded.state
    assert state is not None
    calls = [{"type": type(one.event).__name__, "call": one.event.call, "op": one.op} for one in state.controls]
    live = [_request(state, request) for request in state.live.values()]
    figures = {"seq": folded.seq, "t": folded.t, "incarnation": state.incarnation, **state.stats()}
    return {**figures, "controls": calls, "requests": live}


def _request(state: State, request: Any) -> dict[str, Any]:
    seat = request.seat
    return {
        "rid": request.rid,
        "epoch": request.epoch,
        "choice": request.choice,
        "phase": request.phase.name,
        "prompt_tokens": request.prompt_len,
        "output_tokens": state.known(request) - request.prompt_len,
        "slot": None if seat is None else seat.slot,
        "pages": [] if seat is None else list(seat.pages),
        "preemptions": request.preemptions,
    }


FINISHED = 5
"""So many requests that ended are named."""


def finished_lately(folded: Fold) -> list[str]:
    """Ids of the requests that ended last, the newest last."""
    assert folded.state is not None
    newest = dict.fromkeys(request.rid for request in reversed(folded.state.finished))
    return [*newest][:FINISHED][::-1]


def describe_snapshot(found: dict[str, Any]) -> str:
    """A snapshot for a reader."""
    lines = [f"after seq {found['seq']}, t = {found['t'] / 1e6:.6f} s"]
    apart = ("seq", "t", "controls", "requests", "finished")
    lines += [f"  {name:<18} {value}" for name, value in found.items() if name not in apart]
    for one in found["controls"]:
        stage = "waits" if one["op"] is None else f"is operation {one['op']}"
        lines.append(f"  {one['type']} {one['call']!r} {stage}")
    ended = found.get("finished")
    if ended:
        lines.append(f"ended lately (see --rid): {', '.join(ended)}")
    if not found["requests"]:
        return "\n".join([*lines, "no live requests"])
    count = len(found["requests"])
    lines.append(f"{count} live request{'s' if count > 1 else ''}:")
    for row in found["requests"]:
        which = "".join(f" {name} {row[name]}" for name in ("epoch", "choice") if row[name])
        lines.append(
            f"  {row['rid']}{which}  {row['phase']}  prompt {row['prompt_tokens']}, output {row['output_tokens']}, "
            f"slot {row['slot']}, {len(row['pages'])} pages, {row['preemptions']} preemptions"
        )
    return "\n".join(lines)


def life(records: Iterable[Record], rid: str, at: int | None = None, holds: Holds | None = None) -> list[Moment]:
    """Everything that happened to the requests called `rid`, up to and including sequence number `at`.

    Of a log whose beginning was removed: from its oldest snapshot on. `holds`: gets to see the records, too.
    """
    watcher = _Watcher(rid)
    folded, rest = whole(records) if is_log(records) else (Fold(), records)
    if folded.state is not None:
        watcher.begin(folded.state)
    if holds is not None:
        holds.begin(folded.state, folded.seq, folded.t)
    moments: list[Moment] = []
    for record in rest:
        if at is not None and record.seq > at:
            break
        effects = folded.take(record.seq, record.event)
        assert folded.state is not None
        seen = watcher.watch(folded.state, record.event, effects)
        moments += [Moment(record.seq, record.event.t, *one) for one in seen]
        if holds is not None:
            holds.take(record.seq, record.event, folded.state)
    if holds is not None:
        holds.finish(folded.seq, folded.t)
    return moments


_Seen = tuple[str, dict[str, Any]]
_Key = tuple[int, int]  # epoch, choice


class _Watcher:
    """Follows one rid through the records. By epoch and choice: `living`, those without a terminal output yet, and
    `slots`, where they run.
    """

    def __init__(self, rid: str) -> None:
        self.rid = rid
        self.living: list[_Key] = []
        self.slots: dict[_Key, int] = {}
        self.several = False  # whether some request had more than one choice: then every moment says which

    def begin(self, state: State) -> None:
        """Some of it may have happened before the first record that is seen."""
        for request in state.by_rid.get(self.rid, ()):
            self.living.append((request.epoch, request.choice))
            self.several = self.several or request.params.n != 1
            if request.seat is not None:
                self.slots[request.epoch, request.choice] = request.seat.slot

    def watch(self, state: State, event: Event, effects: Effects) -> Iterator[_Seen]:
        if isinstance(event, Admit) and event.rid == self.rid:
            yield self._admitted(state, event)
        elif self.living:
            yield from self._cause(event)
            if isinstance(event, Tick) and event.plan is not None:
                yield from self._planned(event.plan)
        if self.slots and effects.plan is not None:
            chunked = [chunk.slot for chunk in effects.plan.chunks]
            for row in effects.plan.rows:
                if row.slot in self.slots.values():
                    yield self._computed(effects.plan.step, row, "chunk" if row.slot in chunked else "decode")
        for output in effects.outputs:
            if output.rid == self.rid:
                yield from self._told(output)
        yield from self._put_back(state)

    def _who(self, epoch: int, choice: int) -> dict[str, Any]:
        return ({"epoch": epoch} if epoch else {}) | ({"choice": choice} if choice or self.several else {})

    def _admitted(self, state: State, event: Admit) -> _Seen:
        self.living = [key[1:] for key in state.live if key[0] == self.rid]
        choices = choices_of(event)
        self.several = self.several or choices != 1
        prompt = len(event.prompt) if hasattr(event.prompt, "__len__") else 0
        asked = {"choices": choices} if choices != 1 else {}
        epoch = {"epoch": event.epoch} if event.epoch else {}
        return "admit", {**epoch, "prompt_tokens": prompt, "max_tokens": event.params.max_tokens, **asked}

    def _cause(self, event: Event) -> Iterator[_Seen]:
        match event:
            case Abort(rid=None) | Abort(rid=self.rid):
                named = {name: value for name in ("epoch", "choice") if (value := getattr(event, name)) is not None}
                yield "abort", {**named, "reason": event.reason or "-"}
            case ForwardDone() if event.error is not None and self.slots:
                yield "failed", {"step": event.step, "error": _text(event.error)}
            case ExecutorLost():
                self.slots.clear()
                yield "lost", {"error": event.error}
            case Started():
                self.slots.clear()
                yield "restarted", {"incarnation": event.incarnation}
            case ControlDone():
                yield "op done", {"op": event.op} | ({} if event.error is None else {"error": event.error})
            case _ if hasattr(event, "call"):
                yield "control", {"type": type(event).__name__, "call": event.call, **_asked(event)}
            case _:
                pass

    def _planned(self, plan: Plan) -> Iterator[_Seen]:
        for op in plan.ops:
            if isinstance(op, Control):
                yield "op", {"step": plan.step, "op": op.op, "verb": op.verb}
        for end in plan.ends:
            if end.rid == self.rid:
                yield "end", {**self._who(end.epoch, end.choice), "reason": end.reason}
        for key, slot in list(self.slots.items()):
            if slot in plan.preempt:
                del self.slots[key]
                yield "preempt", {"step": plan.step, **self._who(*key), "slot": slot}
        for join in plan.join:
            if join.rid == self.rid:
                self.slots[join.epoch, join.choice] = join.slot
                cached = {"cached": join.start} if join.start else {}
                who = self._who(join.epoch, join.choice)
                yield "join", {"step": plan.step, **who, "slot": join.slot, **cached, "pages": list(join.pages[0])}

    def _computed(self, step: int, row: Row, what: str) -> _Seen:
        who = next(self._who(*key) for key, slot in self.slots.items() if slot == row.slot)
        return what, {"step": step, **who, "start": row.start, "length": row.length, "samples": row.samples}

    def _told(self, output: Output) -> Iterator[_Seen]:
        key = (output.epoch, output.choice)
        who = self._who(*key)
        if len(output.tokens):
            yield "tokens", {**who, "position": output.position, "tokens": [int(token) for token in output.tokens]}
        if output.finish_reason is not None:
            self.slots.pop(key, None)
            self.living = [other for other in self.living if other != key]
            error = {} if output.error is None else {"error": output.error["text"]}
            usage = {} if output.usage is None else output.usage._asdict()
            yield "finish", {**who, "reason": output.finish_reason.value, **usage, **error}

    def _put_back(self, state: State) -> Iterator[_Seen]:
        """Rows that are in line again although no plan says so (a limit was lowered, a result was not of its plan)."""
        for key, slot in list(self.slots.items()):
            request = state.live.get((self.rid, *key))
            if request is None or request.seat is None:
                del self.slots[key]
                yield "put back", {**self._who(*key), "slot": slot}


def _text(error: Any) -> Any:
    """What a failed step says; whatever the executor gave may stand in the log."""
    return error.get("text", "") if isinstance(error, dict) else error


def _asked(event: Event) -> dict[str, Any]:
    """What a control call asks for."""
    names = ("mode", "tags", "source", "version", "live", "set", "deadline", "verb", "session", "name")
    return {name: value for name in names if (value := getattr(event, name, None))}


__all__ = ["Moment", "choices_of", "describe_snapshot", "finished_lately", "life", "snapshot"]
