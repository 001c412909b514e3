"""What the page shows of a world, as plain data: strip, lanes, one moment, its pages, a comparison, a search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from leftfold.events import EVENTS, Admit, ForwardDone, Plan, Tick
from leftfold.events.codec import TAGS
from leftfold.fsm import State
from leftfold.replay.show import snapshot
from leftfold.replay.worlds import KINDS, Life, Moment, World
from leftfold.replay.worlds.overview import CODES, Column

NAMES = tuple(TAGS[kind] for kind in EVENTS)
TICK, DONE, ADMIT = CODES[Tick], CODES[ForwardDone], CODES[Admit]
QUIET = (TICK, DONE, ADMIT)
"""What happens all the time."""
MOST_LANES = 600
MOST_CODES = 4000
"""Types of records are told where no more than so many lie between the first and the last."""
MOST_ROWS = 400
MOST_FOUND = 60
CUT = 64
"""A list longer than this is cut, and says how long it is."""
FREE, CACHED = -1, -2


def meta(world: World) -> dict[str, Any]:
    """What is known of the whole."""
    t = world.overview.t
    return {
        "first": world.first, "last": world.last, "expected": world.expected, "done": world.done, "error": world.error,
        "model": world.model, "config": world.config, "requests": len(world.overview.lives.all),
        "begin": t[0] if len(t) else 0, "end": t[-1] if len(t) else 0, "events": NAMES, "kinds": KINDS,
    }  # fmt: skip


def strip(world: World, width: int) -> dict[str, Any]:
    """The whole log in `width` buckets of records: the largest of each figure, and where things happened."""
    view = world.overview
    count = len(view)
    if not count:
        return {"first": world.first, "last": world.last, "buckets": 0}
    width = max(1, min(width, count, 4000))
    starts = np.arange(width) * count // width
    found = {name: np.maximum.reduceat(view.column(name)[:count], starts).tolist()
             for name in ("waiting", "running", "held", "cached", "tokens")}  # fmt: skip
    preempted = np.diff(view.column("preemptions")[:count], prepend=0)
    codes = np.array(view.code[:count])
    loud = ~np.isin(codes, QUIET)
    return {
        "first": world.first, "last": world.first + count - 1, "buckets": width, **found,
        "preempted": np.add.reduceat(preempted, starts).tolist(),
        "loud": np.add.reduceat(loud.astype(np.int64), starts).tolist(),
        "t": [int(view.t[at]) for at in starts.tolist()] + [int(view.t[count - 1])],
    }  # fmt: skip


def lanes(world: World, first: int, last: int) -> dict[str, Any]:
    """The lives that records `first` … `last` saw, spans as [kind, from, slot]; and the records' types, if not many."""
    first, last = max(first, world.first), min(last, world.last)
    lives = [life for life in list(world.overview.lives.all)
             if life.seq <= last and (life.end_seq < 0 or life.end_seq >= first)]  # fmt: skip
    found: dict[str, Any] = {
        "first": first, "last": last, "count": len(lives), "lanes": [_lane(life, first, last) for life in
                                                                    lives[-MOST_LANES:]],
    }  # fmt: skip
    if last - first <= MOST_CODES:
        at = first - world.first
        found["codes"] = list(world.overview.code[at : at + last - first + 1])
        found["t"] = list(world.overview.t[at : at + last - first + 1])
    return found


def _lane(life: Life, first: int, last: int) -> dict[str, Any]:
    spans = [span for span in list(life.spans) if span.seq <= last]
    begin = max((at for at, span in enumerate(spans) if span.seq <= first), default=0)
    return {
        **name_of(life), "number": life.number, "seq": life.seq, "end": life.end_seq, "reason": life.reason,
        "first": life.first_seq, "spans": [[span.kind, span.seq, span.slot] for span in spans[begin:]],
        "preempted": [at for at in life.preempted if first <= at <= last],
    }  # fmt: skip


def name_of(life: Life) -> dict[str, Any]:
    """How a life is addressed and called."""
    rid, epoch, choice = life.key
    return {"rid": rid, "epoch": epoch, "choice": choice, "label": life.label()}


def about(world: World, life: Life) -> dict[str, Any]:
    """A life's figures, times in ms from its arrival."""
    def since(t: int) -> float | None:
        return None if t < 0 else (t - life.t) / 1e3

    first, end = since(life.first_t), since(life.end_t)
    tpot = (end - first) / (life.tokens - 1) if end is not None and first is not None and life.tokens > 1 else None
    t = world.overview.t
    spans = []
    ends = [*(span.seq for span in life.spans[1:]), life.end_seq if life.end_seq >= 0 else world.last]
    for span, later in zip(life.spans, ends, strict=True):
        spans.append([KINDS[span.kind], since(t[span.seq - world.first]), since(t[later - world.first]), span.seq])
    return {
        **name_of(life), "number": life.number, "seq": life.seq, "t": life.t, "prompt": life.prompt, "most": life.most,
        "tokens": life.tokens, "cached": max(0, life.cached), "reason": life.reason, "end": life.end_seq,
        "first": life.first_seq, "ttft_ms": first, "tpot_ms": tpot, "e2e_ms": end, "preempted": life.preempted,
        "spans": spans,
    }  # fmt: skip


def cut(value: Any, most: int = CUT) -> Any:
    """Plain data with its long lists cut."""
    if isinstance(value, Mapping):
        return {name: cut(part, most) for name, part in value.items()}
    if isinstance(value, list):
        kept = [cut(part, most) for part in value[:most]]
        return kept if len(value) <= most else [*kept, f"… {len(value)} in all"]
    if isinstance(value, str) and len(value) > 2000:
        return value[:2000] + f"… {len(value)} characters"
    return value


def moment(world: World, found: Moment) -> dict[str, Any]:
    """A record, what it led to, the plan in force, and the state after it."""
    state = found.state
    told = snapshot(found.fold)
    rows = told.pop("requests")
    outputs = [
        {"rid": out.rid, "epoch": out.epoch, "choice": out.choice, "position": out.position,
         "tokens": [int(token) for token in out.tokens][:CUT],
         "reason": None if out.finish_reason is None else out.finish_reason.value,
         "error": None if out.error is None else out.error.get("text")}
        for out in list(found.effects.outputs)[:MOST_ROWS]
    ]  # fmt: skip
    decided = found.seq if isinstance(found.event, Tick) else _decided(world, found.seq)
    return {
        "seq": found.seq, "t": found.event.t, "type": TAGS[type(found.event)],
        "record": cut(world.tape.raw(found.seq)), "outputs": outputs,
        "acks": [[ack.call, ack.ok, str(ack.info)[:400]] for ack in found.effects.acks],
        "plan": None if decided is None else {"seq": decided, **_plan(world, found, decided)},
        "reasons": [reason._asdict() for reason in found.reasons[:MOST_ROWS]],
        "figures": told, "live": [{**row, "pages": len(row["pages"])} for row in rows[:MOST_ROWS]],
        "live_count": len(rows), "waiting": [request.rid for request in state.waiting][:MOST_ROWS],
        "flights": [{"step": flight.step, "rows": flight.expected} for flight in state.in_flight],
        "pages": pages(state), "config": state.config.as_dict(), "numbers": _numbers(world, found),
    }  # fmt: skip


def _numbers(world: World, found: Moment) -> list[list[Any]]:
    """The lives that a moment names, as [rid, epoch, choice, number]."""
    state = found.state
    wanted = {*state.live, *(seat.request.key for seat in (*state.running(), *state.stopping))}
    wanted |= {(out.rid, out.epoch, out.choice) for out in found.effects.outputs}
    numbers = []
    for life in reversed(world.overview.lives.all):
        if not wanted:
            break
        if life.seq <= found.seq and life.key in wanted:
            wanted.remove(life.key)
            numbers.append([*life.key, life.number])
    return numbers


def _decided(world: World, seq: int) -> int | None:
    """The last `Tick` at or before a record."""
    at = seq - world.first
    code = world.overview.code
    while at >= 0 and code[at] != TICK:
        at -= 1
    return None if at < 0 else world.first + at


def _plan(world: World, found: Moment, seq: int) -> dict[str, Any]:
    """The plan that the `Tick` at `seq` recorded; with its rows, where it is what the moment led to or what flies."""
    event = world.tape.event(seq)
    assert isinstance(event, Tick)
    plan = event.plan if event.plan is not None else Plan()
    flights = [flight for flight in found.state.in_flight if flight.step == plan.step]
    rows: list[dict[str, Any]] | None = None
    if flights:
        step = flights[0].rows
        chunked = {chunk.seat.slot for chunk in step.chunks}
        rows = [
            {"rid": row.rid, "choice": row.choice, "slot": row.slot, "start": row.start, "length": row.length,
             "samples": row.samples, "chunk": row.slot in chunked}
            for row in step.rows()[:MOST_ROWS]
        ]  # fmt: skip
    raw = world.tape.raw(seq).get("plan") or {}
    return {"step": plan.step, "t": event.t, "rows": rows, "raw": cut(raw, 200), "flying": bool(flights)}


def pages(state: State) -> dict[str, Any]:
    """Who holds each page, as runs [owner, count]: an index into `owners`, -1 free, -2 cached; `shared`: page, how many
    hold it, and which of the owners.

    `owners` are [rid, epoch, choice]; a shared page is its first holder's.
    """
    owner = _owners(state)
    owners = list(owner[1])
    column = owner[0]
    edges = np.flatnonzero(np.diff(column)) + 1
    begins = np.concatenate(([0], edges))
    counts = np.diff(np.concatenate((begins, [len(column)])))
    runs = np.stack((column[begins], counts), axis=1).reshape(-1) if len(column) else np.empty(0, np.int64)
    pool = state.pool
    holders: dict[int, list[int]] = {page: [] for page, refs in enumerate(pool.refs) if refs > 1}
    if holders:
        for at, seat in enumerate((*state.running(), *state.stopping)):
            for page in holders.keys() & set(seat.pages):
                holders[page].append(at)
    shared = [[page, pool.refs[page], by] for page, by in holders.items()]
    findable = [page for page, key in enumerate(pool.keys) if key is not None and pool.refs[page]]
    return {"count": len(pool), "runs": runs.tolist(), "owners": owners, "shared": shared, "findable": findable}


def _owners(state: State) -> tuple[Column, list[tuple[str, int, int]]]:
    pool = state.pool
    column = np.full(len(pool), FREE, np.int64)
    if pool.cached:
        column[list(pool.cached)] = CACHED
    seats = [*state.running(), *state.stopping]
    for at in range(len(seats) - 1, -1, -1):
        column[seats[at].pages] = at
    return column, [seat.request.key for seat in seats]


def compare(a: Moment, b: Moment) -> dict[str, Any]:
    """Two moments: figures, limits, requests and pages that differ."""
    told = [snapshot(one.fold) for one in (a, b)]
    rows = [{(row["rid"], row["epoch"], row["choice"]): row for row in one.pop("requests")} for one in told]
    for one in told:
        one.pop("controls")
    figures = [[name, told[0].get(name), told[1].get(name)] for name in {**told[0], **told[1]}
               if told[0].get(name) != told[1].get(name) and name not in ("seq", "t")]  # fmt: skip
    requests: list[dict[str, Any]] = []
    for key in {**rows[0], **rows[1]}:
        x, y = rows[0].get(key), rows[1].get(key)
        if x is None or y is None or any(x[name] != y[name] for name in _TOLD):
            a_side, b_side = [None if row is None else {**row, "pages": len(row["pages"])} for row in (x, y)]
            requests.append({"rid": key[0], "epoch": key[1], "choice": key[2], "a": a_side, "b": b_side})
    configs = [one.state.config.as_dict() for one in (a, b)]
    limits = [[name, configs[0][name], configs[1].get(name)] for name in configs[0]
              if configs[0][name] != configs[1].get(name)]  # fmt: skip
    return {
        "a": {"seq": a.seq, "t": a.event.t}, "b": {"seq": b.seq, "t": b.event.t}, "figures": figures + limits,
        "requests": requests[:MOST_ROWS], "request_count": len(requests), "pages": _turned(a.state, b.state),
        "same": a.state.digest() == b.state.digest(),
    }  # fmt: skip


_TOLD = ("phase", "slot", "output_tokens", "preemptions", "pages")


def _turned(a: State, b: State) -> list[int]:
    """Pages with another owner."""
    (one, first), (other, second) = _owners(a), _owners(b)
    if len(one) != len(other):
        return []
    names = [{-1: None, -2: "cached", **dict(enumerate(keys))} for keys in (first, second)]
    return [page for page, (x, y) in enumerate(zip(one.tolist(), other.tolist(), strict=True))
            if names[0][x] != names[1][y]]  # fmt: skip


def search(world: World, text: str) -> dict[str, Any]:
    """Requests whose id has `text` in it, the newest last; and how many there are."""
    wanted = text.casefold()
    found = [life for life in list(world.overview.lives.all) if wanted in life.key[0].casefold()]
    return {"count": len(found), "found": [about(world, life) for life in found[:MOST_FOUND]]}


def differences(base: World, world: World, kept: int) -> dict[str, Any]:
    """What a hypothetical world did otherwise to requests, for those that lived after record `kept`."""
    known = {(life.key, life.seq if life.seq <= kept else -1): life for life in base.overview.lives.all}
    rows: list[dict[str, Any]] = []
    for life in list(world.overview.lives.all):
        if 0 <= life.end_seq <= kept:
            continue
        twin = known.pop((life.key, life.seq if life.seq <= kept else -1), None)
        before, after = None if twin is None else _served(twin), _served(life)
        if before != after:
            rows.append({**name_of(life), "number": life.number, "before": before, "after": after})
    rows.sort(key=_weight, reverse=True)
    return {"count": len(rows), "rows": rows[:MOST_ROWS], "answered": _means(base, world, kept)}


def _served(life: Life) -> dict[str, Any]:
    return {
        "ttft_ms": None if life.first_t < 0 else (life.first_t - life.t) / 1e3,
        "e2e_ms": None if life.end_t < 0 else (life.end_t - life.t) / 1e3,
        "tokens": life.tokens, "preemptions": len(life.preempted), "reason": life.reason,
    }  # fmt: skip


def _weight(row: Mapping[str, Any]) -> float:
    if row["before"] is None or row["after"] is None:
        return float("inf")
    return max(float(abs((row["after"][name] or 0) - (row["before"][name] or 0))) for name in ("ttft_ms", "e2e_ms"))


def _means(base: World, world: World, kept: int) -> list[list[Any]]:
    """Means over the requests that were answered in both, after record `kept`."""
    sides = [{(life.key, life.t): life for life in one.overview.lives.all
              if life.end_seq > kept and life.reason in ("stop", "length")} for one in (base, world)]  # fmt: skip
    both = sides[0].keys() & sides[1].keys()
    rows: list[list[Any]] = [["answered requests", len(sides[0]), len(sides[1])]]
    for name, text in (("ttft_ms", "mean TTFT, ms"), ("e2e_ms", "mean E2E, ms")):
        rows.append([text, *(_mean([_served(side[key])[name] for key in both]) for side in sides)])
    return rows


def _mean(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return round(sum(there) / len(there), 3) if there else None


def dumps(found: Any) -> bytes:
    """As JSON."""
    return orjson.dumps(found, default=str, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)


__all__ = [
    "about", "compare", "cut", "differences", "dumps", "lanes", "meta", "moment", "name_of", "pages", "search", "strip",
]  # fmt: skip
