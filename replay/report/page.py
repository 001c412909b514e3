"""The report as one HTML page: nothing is loaded, nothing runs, and whatever a log says is text."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

from leftfold.replay.report.figures import Report
from leftfold.replay.report.svg import Curve, distribution, life, over_time, short
from leftfold.replay.simulating.figures import spread


def render(report: Report) -> str:
    """The page. Its policy forbids everything but its own style, whose hash it names."""
    style = (files("leftfold.replay.report") / "report.css").read_text()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    parts = [
        "<!doctype html>", '<html lang="en">', "<head>", '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{_text(report.name)} · Leftfold report</title>", f"<style>{style}</style>", "</head>", "<body>",
        _head(report), _tiles(report), _plots(report), _slowest(report), "</body>", "</html>",
    ]  # fmt: skip
    return "\n".join(part for part in parts if part) + "\n"


def shown(text: str, most: int = 120) -> str:
    """Text of a log as it may be shown: control characters as signs, the rest as it is, not too much of it."""
    made = "".join(chr(0x2400 + ord(char)) if ord(char) < 32 else "\ufffd" if _steers(char) else char for char in text)
    return made if len(made) <= most else made[: most - 1] + "…"


def _steers(char: str) -> bool:
    """Whether a character turns the direction of what is around it, or is none."""
    ranges = (("\x7f", "\x9f"), ("\u200b", "\u200f"), ("\u202a", "\u202e"), ("\u2066", "\u2069"), ("\ud800", "\udfff"))
    return any(low <= char <= high for low, high in ranges)


def _text(text: Any, most: int = 120) -> str:
    return escape(shown(str(text), most))


def _head(report: Report) -> str:
    totals = report.totals
    limits = (
        f"{totals['num_pages']} pages of {totals['page_size']} tokens, {totals['max_running']} rows, "
        f"{totals['max_batch_tokens']} tokens a step, policy {totals['policy']}"
    )
    return (
        f"<header><h1>{_text(report.name)}</h1><p>{_text(totals['model'] or 'no model named')} · "
        f"{totals['seconds']:.1f} s · {totals['events']:,} records · {totals['steps']:,} steps</p>"
        f"<p>{_text(limits, 400)}</p></header>"
    )


def _tiles(report: Report) -> str:
    totals = report.totals
    ended = ", ".join(f"{count} {reason}" for reason, count in totals["ended"].items())
    tiles: list[tuple[str, str, str]] = [
        ("Requests", f"{totals['requests']:,}", ended),
        ("Output", f"{short(totals['output_tokens_per_second'])} tok/s", f"{totals['output_tokens']:,} tokens"),
    ]
    for name in ("ttft", "tpot", "e2e"):
        found = spread(report.times[name])
        if found["p50"] is None:
            tiles.append((f"{name.upper()} p50", "–", "no answered request"))
        else:
            rest = " · ".join(f"{part} {short(found[part] or 0)}" for part in ("p90", "p99"))
            tiles.append((f"{name.upper()} p50", f"{short(found['p50'])} ms", rest))
    tiles += [
        ("Preemptions", f"{totals['preemptions']:,}", _per_request(totals["preemptions"], totals["requests"])),
        ("Prefix cache", f"{100 * totals['cache_hit_share']:.1f} %", "of prompt tokens found"),
    ]
    made = [
        f'<div class="tile"><span>{_text(name)}</span><b>{_text(value)}</b><small>{_text(more)}</small></div>'
        for name, value, more in tiles
    ]
    return f'<section class="tiles">{"".join(made)}</section>'


def _per_request(count: int, requests: int) -> str:
    return f"{count / requests:.2f} per request" if requests else ""


def _plots(report: Report) -> str:
    series, edges = report.series, report.edges
    if not series:
        return ""
    pages = float(report.totals["num_pages"])
    free = [max(0.0, pages - held - cached) for held, cached in zip(series["held"], series["cached"], strict=True)]
    share = [100 * hit / asked if asked else 0.0 for hit, asked in zip(series["hits"], series["queries"], strict=True)]
    over = [
        ("Requests", "in line and running", "",
         [Curve("running", "decode", series["running"]), Curve("waiting", "waiting", series["waiting"], False)]),
        ("KV pages", "held by requests, kept by the prefix cache, free", "",
         [Curve("held", "prefill", series["held"]), Curve("cached", "cached", series["cached"]),
          Curve("free", "free", free)]),
        ("Batch", "input tokens of a step, mean", "",
         [Curve("prefill", "prefill", series["batch_prefill"]),
          Curve("decode", "decode", [a - b for a, b in zip(series["batch"], series["batch_prefill"], strict=True)])]),
        ("Throughput", "tokens computed a second", "",
         [Curve("prefill", "prefill", series["prefill"]), Curve("decode", "decode", series["decode"])]),
        ("Preemptions", "requests that gave their pages back", "", [Curve("preemptions", "preempted",
                                                                         series["preemptions"])]),
        ("Prefix cache", "share of looked-up prompt tokens that were found, %", " %",
         [Curve("found", "cached", share)]),
    ]  # fmt: skip
    figures = [_figure(name, text, over_time(name, edges, curves, unit), curves) for name, text, unit, curves in over]
    spans = [
        ("Time to first token", "ttft", "waiting"), ("Time per output token", "tpot", "decode"),
        ("Whole answer", "e2e", "prefill"),
    ]  # fmt: skip
    figures += [
        _figure(name, f"answered requests by {key.upper()}", distribution(name, report.times[key], style), ())
        for name, key, style in spans
    ]
    figures.append(_figure("Steps", "from plan to result", distribution("Steps", report.steps, "other"), ()))
    return f'<section class="plots">{"".join(figures)}</section>'


def _figure(name: str, text: str, svg: str, curves: Sequence[Curve]) -> str:
    keys = "".join(f'<li class="{curve.style}">{_text(curve.label)}</li>' for curve in curves)
    legend = f"<ul>{keys}</ul>" if len(curves) > 1 else ""
    return f"<figure><figcaption><b>{_text(name)}</b> <span>{_text(text)}</span>{legend}</figcaption>{svg}</figure>"


def _slowest(report: Report) -> str:
    if not report.slowest:
        return ""
    longest = max(one["e2e_ms"] for one in report.slowest)
    rows = [_slow(one, longest) for one in report.slowest]
    kinds = "".join(f'<li class="{kind}">{kind}</li>' for kind in ("waiting", "prefill", "decode", "preempted"))
    return (
        f'<section class="slow"><h2>Slowest requests</h2><ul class="keys">{kinds}</ul>{"".join(rows)}</section>'
    )


def _slow(one: dict[str, Any], longest: float) -> str:
    which = "".join(f" {name} {one[name]}" for name in ("epoch", "choice") if one[name])
    figures = [
        ("E2E", one["e2e_ms"]), ("TTFT", one["ttft_ms"]), ("TPOT", one["tpot_ms"]), ("waited", one["waiting_ms"]),
        ("preempted", one["preempted_ms"] or None),
    ]  # fmt: skip
    told = "".join(f"<span>{name} <b>{short(value)} ms</b></span>" for name, value in figures if value is not None)
    sizes = (
        f"prompt {one['prompt_tokens']:,} ({one['cached_tokens']:,} cached) → {one['output_tokens']:,} tokens, "
        f"arrived at {one['arrived_s']:.2f} s, record {one['seq']:,}"
    )
    because = "".join(f"<li>{_text(text, 600)}</li>" for text in one["because"] or ["Nothing held it back."])
    return (
        f'<article><h3><bdi>{_text(one["rid"])}</bdi>{_text(which)} <small>{_text(sizes)}</small></h3>'
        f'<p class="figures">{told}</p>{life(one["spans"], longest)}<ul class="because">{because}</ul></article>'
    )


__all__ = ["render", "shown"]
