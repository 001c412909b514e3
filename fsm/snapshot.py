"""States as plain data and back: what a snapshot file holds, so that a restart need not fold the whole log.

`encode` gives dictionaries, lists, text, numbers and integer arrays, which JSON can hold; `decode` takes what comes of
that. The state that comes back has the same digest and the same future. Requests and seats are listed once and named by
their place in the list; what follows from other parts is left out and derived again.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from leftfold.events.codec import decode as decode_event
from leftfold.events.codec import decode_params, plain, plain_params
from leftfold.events.types import SamplingParams
from leftfold.fsm.columns import ONE
from leftfold.fsm.errors import SnapshotInvalid
from leftfold.fsm.gate import Gate
from leftfold.fsm.lifecycle import FINISHED, Phase
from leftfold.fsm.limits import Config
from leftfold.fsm.pages import PagePool
from leftfold.fsm.request import NO_TOKENS, Request, Seat
from leftfold.fsm.rows import ChunkRow, RowSet, StepRows
from leftfold.fsm.state import ControlCall, InFlight, State

FORMAT = 1
"""Of what `encode` gives. A state that has more to say gets a new number, and `decode` keeps reading the old one."""

_SCALARS = (
    "drain_mode", "gate_seq", "frozen", "version", "executor_present", "incarnation", "generation", "next_step",
    "next_arrival", "next_order", "next_op", "chain", "voids", "closing_at",
)  # fmt: skip
_LISTS = ("pause_calls", "asleep", "free_slots", "at_edge", "left", "closing_calls")
_MAPS = ("memo", "counts")
_COLUMNS = ("computed", "planned", "limit", "runway", "base", "alarm", "last")
_OF_REQUEST = (
    "rid", "epoch", "choice", "arrival", "prompt_len", "priority", "tenant", "limit", "deadline_at",
    "queue_deadline_at", "reads_cache", "publishes", "salt", "want", "cached", "preemptions", "failures",
)  # fmt: skip
_HELD = itemgetter("request", "slot", "order", "pages", "start")
_OF_SEAT = ("slot", "order", "start", "target", "last", "publishes", "edge", "final")


def encode(state: State) -> dict[str, Any]:
    """The state as plain data; reads only. Arrays and lists are the state's own: encode a copy, or write it at once."""
    return _Encoder(state).state()


def decode(raw: Mapping[str, Any]) -> State:
    """The state that `encode` was given, after JSON or not. Raises `SnapshotInvalid` for what it never gives."""
    try:
        if not 1 <= raw["format"] <= FORMAT:
            raise SnapshotInvalid(f"a state of format {raw['format']}; this version reads up to {FORMAT}")
        return _Decoder(raw).state()
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, MemoryError) as error:
        raise SnapshotInvalid(f"not a state of this version: {type(error).__name__}: {error}") from error


def _hex(key: bytes | None) -> str | None:
    return None if key is None else key.hex()


def _key(text: str | None) -> bytes | None:
    return None if text is None else bytes.fromhex(text)


class _Encoder:
    """Numbers each request and seat when it is first met."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._requests: dict[Request, int] = {}
        self._seats: dict[Seat, int] = {}

    def request(self, request: Request | None) -> int | None:
        if request is None:
            return None
        if request not in self._requests:
            self._requests[request] = len(self._requests)
            self.request(request.leader)
            self.seat(request.seat)
        return self._requests[request]

    def requests(self, several: Sequence[Request]) -> list[int | None]:
        return [self.request(request) for request in several]

    def seat(self, seat: Seat | None) -> int | None:
        if seat is None:
            return None
        if seat not in self._seats:
            self._seats[seat] = len(self._seats)
            self.request(seat.request)
        return self._seats[seat]

    def seats(self, several: Sequence[Seat | None]) -> list[int | None]:
        return [self.seat(seat) for seat in several]

    def state(self) -> dict[str, Any]:
        state = self._state
        over = {one: at for at, one in enumerate(state.finished)}
        found: dict[str, Any] = {
            "format": FORMAT,
            "config": state.config.as_dict(),
            "gate": state.gate.value,
            "root": state.root.hex(),
            **{name: getattr(state, name) for name in (*_SCALARS, *_LISTS, *_MAPS)},
            "controls": [[plain(control.event), control.barrier, control.op] for control in state.controls],
            "finished": [[*one.key, one.arrival, one.prompt_len] for one in over],
            "newest_finished": [over[one] for one in state.requests.values() if one in over],
            "live": self.requests([*state.live.values()]),
            "newest": self.requests([one for one in state.requests.values() if one not in over]),
            "waiting": self.requests([*state.waiting.by_arrival()]),
            "overtakers": state.waiting.overtakers,
            "served": [*state.tenants.served.items()],
            "working": [*state.tenants.live.items()],
            "deadlines": [[[*key], self.request(request)] for key, request in state.deadlines.items()],
            "by_slot": [[slot, self.seat(seat)] for slot, seat in enumerate(state.by_slot) if seat is not None],
            "decoding": self.seats([seat for seat in state.running() if seat.slot not in state.prefilling]),
            "resting": [*state.resting],
            "prefilling": [[slot, self.seat(seat)] for slot, seat in state.prefilling.items()],
            "stopping": self.seats(state.stopping),
            "suspects": [[*key, end] for key, end in state.suspects.items()],
            "in_flight": [self.in_flight(step) for step in state.in_flight],
            "columns": self.columns(),
            "pool": _pool(state.pool),
        }
        found["seats"] = [self.seat_fields(seat) for seat in self._seats]  # all are met by now
        found["requests"] = [self.request_fields(request) for request in self._requests]
        return found

    def request_fields(self, request: Request) -> dict[str, Any]:
        return {
            **{name: getattr(request, name) for name in _OF_REQUEST},
            "phase": request.phase.name if request.phase else None,
            "params": plain_params(request.params),
            "tokens": request.tokens,
            "rank": request.rank,
            "wishes": request.wishes,
            "seen": request.seen,
            "root": request.root.hex(),
            "keys": [key.hex() for key in request.keys],
            "leader": self.request(request.leader),
            "seat": self.seat(request.seat),
        }

    def seat_fields(self, seat: Seat) -> dict[str, Any]:
        fields = {name: getattr(seat, name) for name in _OF_SEAT}
        return {**fields, "pages": seat.pages, "parent": _hex(seat.parent), "request": self.request(seat.request)}

    def in_flight(self, step: InFlight) -> dict[str, Any]:
        rows = step.rows
        chunks = [[self.seat(row.seat), row.start, row.length, row.samples, row.tokens] for row in rows.chunks]
        return {
            "step": step.step, "digest": step.digest, "ops": [*step.ops], "ended": step.ended,
            "decode": self.seats(rows.decode.seats), "starts": rows.starts, "inputs": rows.inputs, "chunks": chunks,
        }  # fmt: skip

    def columns(self) -> dict[str, Any]:
        columns = self._state.columns
        watched = columns.watch.nonzero()[0].tolist()
        return {
            **{name: getattr(columns, name) for name in _COLUMNS},
            "watched": watched, "watchers": [columns.watchers[token] for token in watched],
            "watch": len(columns.watch),
        }  # fmt: skip


def _pool(pool: PagePool) -> dict[str, Any]:
    """Free pages, too, keep what was last written to them: a digest sees it once they are granted."""
    full = np.flatnonzero(pool.tokens.any(axis=1))
    keyed = [page for page in range(len(pool)) if pool.keys[page] is not None]
    return {
        "refs": pool.refs, "free": [*pool.free], "cached": [*pool.cached], "full": full,
        "tokens": pool.tokens[full].reshape(-1), "keyed": keyed, "keys": [_hex(pool.keys[page]) for page in keyed],
        "published_ever": pool.published_ever, "heard": pool.journal is not None,
    }  # fmt: skip


class _Decoder:
    """Makes all requests, then all seats, then fills them: they name each other."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._raw = raw
        self._requests = [_request(fields) for fields in raw["requests"]]
        self._seats = [
            Seat(self._requests[request], slot, order, [*pages], start)
            for request, slot, order, pages, start in map(_HELD, raw["seats"])
        ]

    def request(self, at: int | None) -> Request | None:
        return None if at is None else self._requests[at]

    def requests(self, several: Sequence[int]) -> list[Request]:
        return [self._requests[at] for at in several]

    def seats(self, several: Sequence[int]) -> list[Seat]:
        return [self._seats[at] for at in several]

    def rows(self, several: Sequence[int]) -> RowSet:
        return RowSet.of(self.seats(several))

    def state(self) -> State:
        raw = self._raw
        state = State(Config.from_dict(raw["config"]))
        for request, fields in zip(self._requests, raw["requests"], strict=True):
            self.fill_request(request, fields)
        for seat, fields in zip(self._seats, raw["seats"], strict=True):
            self.fill_seat(seat, fields)
        for name in _SCALARS:
            setattr(state, name, raw[name])
        for name in _LISTS:
            setattr(state, name, [*raw[name]])
        for name in _MAPS:
            setattr(state, name, {**raw[name]})
        state.gate = Gate(raw["gate"])
        state.root = bytes.fromhex(raw["root"])
        state.controls = deque([ControlCall(decode_event(call), barrier, op) for call, barrier, op in raw["controls"]])
        self.fill_requests(state)
        self.fill_rows(state)
        _fill_columns(state, raw["columns"])
        _fill_pool(state.pool, raw["pool"])
        return state

    def fill_requests(self, state: State) -> None:
        raw = self._raw
        for request in self.requests(raw["live"]):
            state.live[request.key] = request
            state.by_rid.setdefault(request.rid, []).append(request)
        state.finished = deque([_finished(fields) for fields in raw["finished"]])
        state.requests = {request.rid: request for request in self.requests(raw["newest"])}
        for at in raw["newest_finished"]:
            state.requests[state.finished[at].rid] = state.finished[at]
        for request in self.requests(raw["waiting"]):
            state.waiting.add(request)
        state.waiting.overtakers = [*raw["overtakers"]]
        state.tenants.served = dict(raw["served"])
        state.tenants.live = dict(raw["working"])
        for key, at in raw["deadlines"]:
            state.deadlines.add(tuple(key), self._requests[at])
        state.suspects = {(rid, epoch, choice): end for rid, epoch, choice, end in raw["suspects"]}

    def fill_rows(self, state: State) -> None:
        raw = self._raw
        state.widen(len(raw["columns"]["computed"]))
        state.free_slots = [*raw["free_slots"]]
        for slot, at in raw["by_slot"]:
            state.by_slot[slot] = self._seats[at]
        rows = {seat.slot: seat for seat in self.seats(raw["decoding"])}
        state.resting = {slot: rows[slot] for slot in raw["resting"]}
        state.decoding = RowSet.of([seat for slot, seat in rows.items() if slot not in state.resting])
        state.prefilling = {slot: self._seats[at] for slot, at in raw["prefilling"]}
        state.stopping = self.seats(raw["stopping"])
        state.in_flight = deque([self.in_flight(step, state.config.page_size) for step in raw["in_flight"]])

    def fill_request(self, request: Request, raw: Mapping[str, Any]) -> None:
        for name in _OF_REQUEST:
            setattr(request, name, raw[name])
        request.phase = None if raw["phase"] is None else Phase[raw["phase"]]
        request.rank = tuple(raw["rank"])
        find, publish = raw["wishes"]
        request.wishes = (find, publish)
        request.seen = None if raw["seen"] is None else (raw["seen"][0], raw["seen"][1])
        request.root = bytes.fromhex(raw["root"])
        request.keys = [bytes.fromhex(key) for key in raw["keys"]]
        request.leader = self.request(raw["leader"])
        request.seat = None if raw["seat"] is None else self._seats[raw["seat"]]

    def fill_seat(self, seat: Seat, raw: Mapping[str, Any]) -> None:
        for name in _OF_SEAT:
            setattr(seat, name, raw[name])
        seat.parent = _key(raw["parent"])

    def in_flight(self, raw: Mapping[str, Any], page_size: int) -> InFlight:
        chunks = [
            ChunkRow(self._seats[at], start, length, samples, np.asarray(tokens, np.int32))
            for at, start, length, samples, tokens in raw["chunks"]
        ]
        inputs = None if raw["inputs"] is None else np.asarray(raw["inputs"], np.int64)
        starts = np.asarray(raw["starts"], np.int64)
        rows = StepRows(self.rows(raw["decode"]), starts + ONE, inputs, chunks, page_size)
        return InFlight(raw["step"], raw["digest"], rows, [*raw["ops"]], [*raw["ended"]])


def _request(fields: Mapping[str, Any]) -> Request:
    """One that has its tokens and parameters."""
    tokens, params = np.asarray(fields["tokens"], np.int32), decode_params(fields["params"])
    return Request(fields["rid"], fields["epoch"], fields["choice"], fields["arrival"], tokens, params)


def _finished(fields: Sequence[Any]) -> Request:
    """One that is over: only what it was called can still be asked for."""
    rid, epoch, choice, arrival, prompt_len = fields
    request = Request(rid, epoch, choice, arrival, NO_TOKENS, SamplingParams())
    request.prompt_len = prompt_len
    request.phase = FINISHED
    return request


def _fill_columns(state: State, raw: Mapping[str, Any]) -> None:
    columns = state.columns
    columns.fill({name: np.array(raw[name], np.int64) for name in _COLUMNS})
    columns.watchers = dict(zip(raw["watched"], raw["watchers"], strict=True))
    columns.watch = np.zeros(raw["watch"], np.bool_)
    columns.watch[np.asarray(raw["watched"], np.int64)] = True


def _fill_pool(pool: PagePool, raw: Mapping[str, Any]) -> None:
    full = np.asarray(raw["full"], np.int64)
    pool.tokens[full] = np.asarray(raw["tokens"], np.int32).reshape(len(full), pool.page_size)
    pool.refs = [*raw["refs"]]
    pool.free = OrderedDict.fromkeys(raw["free"])
    pool.cached = OrderedDict.fromkeys(raw["cached"])
    for page, text in zip(raw["keyed"], raw["keys"], strict=True):
        key = bytes.fromhex(text)
        pool.keys[page] = key
        pool.published[key] = page
    pool.published_ever = raw["published_ever"]
    pool.journal = [] if raw["heard"] else None


__all__ = ["decode", "encode"]
