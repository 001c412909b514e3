"""What the report shows, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from leftfold.replay.simulating.figures import spread
from leftfold.replay.worlds import KINDS, Life, World
from leftfold.replay.worlds.overview import Column

BUCKETS = 200
"""Points of a plot over time."""
SLOWEST = 10
"""So many slow requests are told of."""
WELL = ("stop", "length")
"""Ends of requests that were answered as they should be."""


@dataclass(slots=True)
class Report:
    """`totals`: of the whole log. `series`: one value per bucket of time, by name; `edges`: seconds, one more.

    `times`: milliseconds of all answered requests, by name; `steps`: of all steps. `slowest`: as `as_dict` has them.
    """

    name: str
    totals: dict[str, Any]
    edges: list[float]
    series: dict[str, list[float]]
    times: dict[str, list[float]]
    steps: list[float]
    slowest: list[dict[str, Any]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Everything but the plots' points."""
        spreads = {f"{name}_ms": spread(values) for name, values in self.times.items()}
        return {"log": self.name, **self.totals, **spreads, "slowest": self.slowest}


def build(world: World, name: str, slowest: int = SLOWEST) -> Report:
    """The report of a world that is read to its end."""
    lives = world.overview.lives.all
    answered = [life for life in lives if life.reason in WELL and life.first_t >= 0]
    times = {
        "ttft": [(life.first_t - life.t) / 1e3 for life in answered],
        "tpot": [(life.end_t - life.first_t) / 1e3 / (life.tokens - 1) for life in answered if life.tokens > 1],
        "e2e": [(life.end_t - life.t) / 1e3 for life in answered],
    }
    edges, series = _series(world)
    late = sorted(answered, key=lambda life: (life.t - life.end_t, life.number))[:slowest]
    took = world.overview.column("took")
    steps = (took[took > 0] / 1e3).tolist()
    return Report(name, _totals(world, lives), edges, series, times, steps, [_told(world, life) for life in late])


def _totals(world: World, lives: list[Life]) -> dict[str, Any]:
    t, figures = world.overview.times(), world.overview
    seconds = float(t[-1] - t[0]) / 1e6 if len(t) else 0.0
    ended: dict[str, int] = {}
    for life in lives:
        ended[life.reason or "live"] = ended.get(life.reason or "live", 0) + 1
    output = sum(life.tokens for life in lives)
    steps = figures.column("took")
    last = {name: int(figures.column(name)[-1]) if len(t) else 0 for name in ("preemptions", "queries", "hits")}
    return {
        "model": world.model,
        "events": len(t),
        "seconds": round(seconds, 6),
        "requests": len(lives),
        "ended": dict(sorted(ended.items())),
        "steps": int(np.count_nonzero(steps)),
        "prompt_tokens": sum(life.prompt for life in lives),
        "output_tokens": output,
        "output_tokens_per_second": round(output / seconds, 3) if seconds else 0.0,
        "preemptions": last["preemptions"],
        "cache_hit_share": round(last["hits"] / last["queries"], 6) if last["queries"] else 0.0,
        "num_pages": world.config.get("num_pages", 0),
        "page_size": world.config.get("page_size", 0),
        "max_running": world.config.get("max_running", 0),
        "max_batch_tokens": world.config.get("max_batch_tokens", 0),
        "policy": world.config.get("policy", ""),
    }


def _series(world: World) -> tuple[list[float], dict[str, list[float]]]:
    """Levels (of requests the largest of a bucket, of pages the last), rates (a second) and counts, over time."""
    view = world.overview
    t = view.times()
    if not len(t):
        return [0.0, 1.0], {}
    begin, end = int(t[0]), max(int(t[-1]), int(t[0]) + 1)
    edges = np.linspace(begin, end, BUCKETS + 1)
    bucket = np.clip(np.searchsorted(edges, t, "right") - 1, 0, BUCKETS - 1)
    width = (end - begin) / BUCKETS / 1e6
    series = {name: _level(view.column(name), bucket, True) for name in ("waiting", "running")}
    series |= {name: _level(view.column(name), bucket, False) for name in ("held", "cached")}
    tokens, prefill = view.column("tokens"), view.column("prefill")
    series["prefill"] = _sum(prefill, bucket) / width
    series["decode"] = _sum(tokens - prefill, bucket) / width
    planned = tokens > 0
    steps = np.bincount(bucket[planned], minlength=BUCKETS)
    for name, values in (("batch", tokens), ("batch_prefill", prefill)):
        series[name] = _sum(values, bucket) / np.maximum(steps, 1)
    for name in ("preemptions", "queries", "hits"):
        series[name] = _sum(np.diff(view.column(name), prepend=0), bucket)
    return ((edges - begin) / 1e6).tolist(), {name: values.tolist() for name, values in series.items()}


def _sum(values: Column, bucket: Column) -> Any:
    return np.bincount(bucket, weights=values, minlength=BUCKETS)


def _level(values: Column, bucket: Column, largest: bool) -> Any:
    """The largest, or the last, value of each bucket; where nothing happened, the one before goes on."""
    last = np.full(BUCKETS, -1)
    last[bucket] = np.arange(len(values))
    found = values[np.maximum.accumulate(last)].astype(np.float64)
    if largest:
        np.maximum.at(found, bucket, values.astype(np.float64))
    return found


def _told(world: World, life: Life) -> dict[str, Any]:
    """A request with its spans (kind, ms from its arrival) and why it took so long."""
    view = world.overview
    at = [(view.t[span.seq - view.first] - life.t) / 1e3 for span in life.spans] + [(life.end_t - life.t) / 1e3]
    spans = [(KINDS[span.kind], begin, end) for span, begin, end in zip(life.spans, at, at[1:], strict=False)]
    lost = dict.fromkeys(KINDS, 0.0)
    for kind, begin, end in spans:
        lost[kind] += end - begin
    explanation = world.explain(life)
    return {
        "rid": life.key[0], "epoch": life.key[1], "choice": life.key[2], "seq": life.seq, "arrived_s": life.t / 1e6,
        "prompt_tokens": life.prompt, "cached_tokens": max(0, life.cached), "output_tokens": life.tokens,
        "reason": life.reason, "ttft_ms": (life.first_t - life.t) / 1e3, "e2e_ms": (life.end_t - life.t) / 1e3,
        "tpot_ms": (life.end_t - life.first_t) / 1e3 / (life.tokens - 1) if life.tokens > 1 else None,
        "waiting_ms": lost["waiting"], "preempted_ms": lost["preempted"], "preemptions": len(life.preempted),
        "spans": spans, "because": explanation.sentences(),
    }  # fmt: skip


__all__ = ["BUCKETS", "Report", "build"]
