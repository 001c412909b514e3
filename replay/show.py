"""Look into a log: the engine's state after a record, or one request's life."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from leftfold.events import Abort, Admit, Event, ExecutorLost, ForwardDone, Plan, Record, Started, Tick
from leftfold.fsm import Effects, Output, State
from leftfold.replay.fold import Fold


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
    """The engine's state as plain data: figures, then every live request."""
    state = folded.state
    assert state is not None
    live = [_request(state, request) for request in state.live.values()]
    return {"seq": folded.seq, "t": folded.t, "incarnation": state.incarnation, **state.stats(), "requests": live}


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


def describe_snapshot(found: dict[str, Any]) -> str:
    """A snapshot for a reader."""
    lines = [f"after seq {found['seq']}, t = {found['t'] / 1e6:.6f} s"]
    lines += [f"  {name:<18} {value}" for name, value in found.items() if name not in ("seq", "t", "requests")]
    if not found["requests"]:
        return "\n".join([*lines, "no live requests"])
    lines.append(f"{len(found['requests'])} live requests:")
    for row in found["requests"]:
        lines.append(
            f"  {row['rid']}  {row['phase']}  prompt {row['prompt_tokens']}, output {row['output_tokens']}, "
            f"slot {row['slot']}, {len(row['pages'])} pages, {row['preemptions']} preemptions"
        )
    return "\n".join(lines)


def life(records: Iterable[Record], rid: str, at: int | None = None) -> list[Moment]:
    """Everything that happened to the requests called `rid`, up to and including sequence number `at`."""
    watcher = _Watcher(rid)
    folded = Fold()
    moments: list[Moment] = []
    for record in records:
        if at is not None and record.seq > at:
            break
        effects = folded.take(record.seq, record.event)
        moments += [Moment(record.seq, record.event.t, *seen) for seen in watcher.watch(record.event, effects)]
    return moments


_Seen = tuple[str, dict[str, Any]]


class _Watcher:
    """Follows one rid through the records; `slots`: where it runs, by choice."""

    def __init__(self, rid: str) -> None:
        self.rid = rid
        self.admitted = False
        self.slots: dict[int, int] = {}

    def watch(self, event: Event, effects: Effects) -> Iterator[_Seen]:
        yield from self._cause(event, effects)
        for output in effects.outputs:
            if output.rid == self.rid:
                yield from self._told(output)

    def _cause(self, event: Event, effects: Effects) -> Iterator[_Seen]:
        match event:
            case Admit() if event.rid == self.rid:
                self.admitted = True
                yield "admit", {"prompt_tokens": len(event.prompt), "max_tokens": event.params.max_tokens}
            case Abort() if event.rid == self.rid or (event.rid is None and self.admitted):
                yield "abort", {"reason": event.reason or "-"}
            case Tick(plan=Plan() as plan):
                yield from self._planned(plan, effects)
            case ForwardDone() if event.error is not None and self.slots:
                yield "failed", {"step": event.step, "error": event.error.get("text", "")}
            case ExecutorLost() if self.slots:
                self.slots.clear()
                yield "lost", {"error": event.error}
            case Started() if self.slots:
                self.slots.clear()
                yield "restarted", {"incarnation": event.incarnation}
            case _:
                pass

    def _planned(self, plan: Plan, effects: Effects) -> Iterator[_Seen]:
        for end in plan.ends:
            if end.rid == self.rid:
                yield "end", {"reason": end.reason}
        for choice, slot in list(self.slots.items()):
            if slot in plan.preempt:
                del self.slots[choice]
                yield "preempt", {"step": plan.step, "slot": slot}
        for join in plan.join:
            if join.rid == self.rid:
                self.slots[join.choice] = join.slot
                cached = {"cached": join.start} if join.start else {}
                yield "join", {"step": plan.step, "slot": join.slot, **cached, "pages": list(join.pages[0])}
        if self.slots and effects.plan is not None:
            chunked = {chunk.slot for chunk in plan.chunks}
            for row in effects.plan.rows:
                if row.rid == self.rid:
                    what = "chunk" if row.slot in chunked else "decode"
                    yield what, {"step": plan.step, "start": row.start, "length": row.length, "samples": row.samples}

    def _told(self, output: Output) -> Iterator[_Seen]:
        if len(output.tokens):
            yield "tokens", {"position": output.position, "tokens": [int(token) for token in output.tokens]}
        if output.finish_reason is not None:
            self.slots.pop(output.choice, None)
            error = {} if output.error is None else {"error": output.error["text"]}
            usage = {} if output.usage is None else output.usage._asdict()
            yield "finish", {"reason": output.finish_reason.value, **usage, **error}


__all__ = ["Moment", "describe_snapshot", "life", "snapshot"]
