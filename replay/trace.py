"""A log as a Chrome trace (JSON object format), which opens in the Perfetto UI and in chrome://tracing.

Processes: the engine (steps, arrivals and ends), its slots (who computes what, a slice for each chunk and for each run
of decode steps), and counters (pages, requests, rows, log).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import orjson

from leftfold.events import Abort, Admit, Event, ExecutorLost, ForwardDone, Record, Started, Tick, encode
from leftfold.fsm import Effects, State
from leftfold.replay.walking import walk

ENGINE, SLOTS, COUNTERS = 1, 2, 3
STEPS, REQUESTS, CONTROL = 1, 2, 3
FRAME = len('"crc":"00000000",\n')
"""Bytes of a record's line beside the record itself."""


def trace_events(records: Iterable[Record]) -> Iterator[dict[str, Any]]:
    """The events of the trace. `ts` and `dur` are in µs since the first `Started`."""
    yield from _names()
    tracer = _Tracer()
    for (seq, event), effects, state in walk(records):
        yield from tracer.take(seq, event, effects, state)
    yield from tracer.rest()


def write_trace(records: Iterable[Record], file: BinaryIO) -> int:
    """Write the trace, an event a line; how many there are."""
    count = 0
    file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
    for event in trace_events(records):
        file.write((b",\n" if count else b"") + orjson.dumps(event, default=str))
        count += 1
    file.write(b"\n]}\n")
    return count


def _names() -> Iterator[dict[str, Any]]:
    for pid, name in ((ENGINE, "engine"), (SLOTS, "rows by slot"), (COUNTERS, "figures")):
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    for tid, name in ((STEPS, "steps"), (REQUESTS, "requests"), (CONTROL, "control")):
        yield {"ph": "M", "name": "thread_name", "pid": ENGINE, "tid": tid, "args": {"name": name}}


def _step(step: int, span: dict[str, int], args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "X", "name": f"step {step}", "pid": ENGINE, "tid": STEPS, **span, "args": args}


def _goes_on(slice_: dict[str, Any], rid: str, start: int) -> bool:
    return bool(slice_["name"] == rid and slice_["args"]["start"] + slice_["args"]["steps"] == start)


class _Tracer:
    """`flying`: steps without a result: when each was planned, and its rows. `open`: the decode slice of each slot."""

    def __init__(self) -> None:
        self.flying: dict[int, tuple[int, list[Any], dict[str, Any]]] = {}
        self.open: dict[int, dict[str, Any]] = {}
        self.named: set[int] = set()
        self.landed = 0
        self.bytes = 0
        self.figures: dict[str, dict[str, int]] = {}
        self.t = 0

    def take(self, seq: int, event: Event, effects: Effects, state: State) -> Iterator[dict[str, Any]]:
        self.t = event.t
        self.bytes += len(encode(event, seq)) + FRAME
        if isinstance(event, Tick):
            yield from self._planned(event, effects)
        elif isinstance(event, ForwardDone):
            yield from self._done(seq, event)
        elif isinstance(event, (Admit, Abort)):
            yield self._instant(REQUESTS, f"{type(event).__name__} {event.rid}", {"seq": seq})
        else:
            yield self._instant(CONTROL, type(event).__name__, {"seq": seq})
        if isinstance(event, (Started, ExecutorLost)):
            yield from self._void()
        for part in effects.outputs:
            if part.finish_reason is not None:
                args = {"seq": seq, "reason": part.finish_reason.value}
                yield self._instant(REQUESTS, f"end {part.rid}", args)
        yield from self._counters(state)

    def _instant(self, tid: int, name: str, args: dict[str, Any]) -> dict[str, Any]:
        return {"ph": "i", "s": "t", "name": name, "pid": ENGINE, "tid": tid, "ts": self.t, "args": args}

    def _planned(self, event: Tick, effects: Effects) -> Iterator[dict[str, Any]]:
        plan = effects.plan
        if plan is None:
            return
        for slot in plan.preempt:
            yield from self._close(slot)
            yield self._instant(REQUESTS, f"preempted (slot {slot})", {"step": plan.step})
        chunked = {chunk.slot for chunk in plan.chunks}
        rows = [(row.slot, row.rid, row.start, row.length, row.slot in chunked) for row in plan.rows]
        args = {
            "decode rows": sum(not chunk for *_, chunk in rows), "chunks": sum(chunk for *_, chunk in rows),
            "tokens": sum(length for _, _, _, length, _ in rows), "joined": len(plan.join),
            "preempted": len(plan.preempt), "evicted": sum(len(evict.pages) for evict in plan.evict),
        }  # fmt: skip
        self.flying[plan.step] = (event.t, rows, args)

    def _done(self, seq: int, event: ForwardDone) -> Iterator[dict[str, Any]]:
        planned, rows, args = self.flying.pop(event.step, (self.t, [], {}))
        begin = max(planned, self.landed)
        self.landed = self.t
        span = {"ts": begin, "dur": max(0, self.t - begin)}
        if event.error is not None:
            args = {**args, "error": str(event.error)}
            for step in [step for step in self.flying if step > event.step]:
                del self.flying[step]
        yield _step(event.step, span, {**args, "seq": seq})
        computing = {slot for slot, *_ in rows}
        for slot in [slot for slot in self.open if slot not in computing]:
            yield from self._close(slot)
        for slot, rid, start, length, chunk in rows:
            yield from self._row(slot, rid, start, length, chunk, begin)

    def _row(self, slot: int, rid: str, start: int, length: int, chunk: bool, begin: int) -> Iterator[dict[str, Any]]:
        if slot not in self.named:
            self.named.add(slot)
            yield {"ph": "M", "name": "thread_name", "pid": SLOTS, "tid": slot, "args": {"name": f"slot {slot}"}}
        held = self.open.get(slot)
        if not chunk and held is not None and _goes_on(held, rid, start):
            held["dur"] = self.t - held["ts"]
            held["args"]["steps"] += 1
            return
        yield from self._close(slot)
        made = {"ph": "X", "pid": SLOTS, "tid": slot, "ts": begin, "dur": self.t - begin, "name": rid}
        if chunk:
            yield {**made, "cat": "prefill", "args": {"start": start, "length": length}}
        else:
            self.open[slot] = {**made, "cat": "decode", "args": {"start": start, "steps": 1}}

    def _close(self, slot: int) -> Iterator[dict[str, Any]]:
        if slot in self.open:
            yield self.open.pop(slot)

    def _void(self) -> Iterator[dict[str, Any]]:
        self.flying.clear()
        for slot in list(self.open):
            yield from self._close(slot)

    def _counters(self, state: State) -> Iterator[dict[str, Any]]:
        pool = state.pool
        now = {
            "pages": {"held": pool.held, "cached": len(pool.cached), "free": len(pool.free)},
            "requests": {"waiting": len(state.waiting), "stopping": len(state.stopping)},
            "rows": {"decoding": state.row_count - len(state.prefilling), "prefilling": len(state.prefilling)},
            "steps in flight": {"steps": len(state.in_flight)},
            "log": {"bytes": self.bytes},
        }
        for name, values in now.items():
            if self.figures.get(name) != values:
                yield {"ph": "C", "name": name, "pid": COUNTERS, "tid": 0, "ts": self.t, "args": values}
        self.figures = now

    def rest(self) -> Iterator[dict[str, Any]]:
        """Slices that are still open where the log ends, steps without a result included."""
        for step, (planned, _, args) in self.flying.items():
            begin = max(planned, self.landed)
            span = {"ts": begin, "dur": max(0, self.t - begin)}
            yield _step(step, span, {**args, "open": True})
        yield from self._void()


__all__ = ["trace_events", "write_trace"]
