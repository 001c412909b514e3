"""Plots as SVG text: stacked areas and lines over time, bars of a distribution, the bar of a life.

Colours are classes that the page's style gives, so that plots follow light and dark. Every text is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 580, 200
LEFT, RIGHT, TOP, BOTTOM = 52, 8, 10, 26


class Curve(NamedTuple):
    """Values, one per bucket. `label`: for the legend; `style`: a colour of the page's; `area`: stacked, or a line."""

    label: str
    style: str
    values: Sequence[float]
    area: bool = True


def ticks(most: float, count: int = 4) -> list[float]:
    """Round numbers from 0 up to about `most`."""
    if most <= 0:
        return [0.0, 1.0]
    rough = most / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(nice * power for nice in (1, 2, 2.5, 5, 10) if nice * power >= rough * 0.999)
    return [step * at for at in range(math.ceil(most / step * 0.999) + 1)]


def short(value: float) -> str:
    """A number in a few characters."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _frame(xs: Sequence[tuple[float, str]], ys: Sequence[tuple[float, str]]) -> list[str]:
    parts = []
    for y, label in ys:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{escape(label)}</text>')
    for x, label in xs:
        parts.append(f'<text class="tick" x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(label)}</text>')
    return parts


def _svg(parts: Sequence[str], name: str, height: int = HEIGHT) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(name)}">' + "".join(parts) + "</svg>"
    )


def over_time(name: str, edges: Sequence[float], curves: Sequence[Curve], unit: str = "", most: float = 0.0) -> str:
    """Curves over seconds; areas are stacked in their order. `most`: the least that the scale reaches to."""
    count = len(edges) - 1
    stacked = [[0.0] * count]
    for curve in curves:
        if curve.area:
            stacked.append([below + value for below, value in zip(stacked[-1], curve.values, strict=True)])
    highest = max([most, *stacked[-1], *(max(curve.values, default=0) for curve in curves if not curve.area)])
    marks = ticks(highest)
    top = marks[-1]
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(at: float) -> float:
        return LEFT + wide * at / count

    def y(value: float) -> float:
        return TOP + high * (1 - value / top)

    span = edges[-1] or 1.0
    parts = _frame([(LEFT + wide * mark / span, f"{short(mark)} s") for mark in ticks(span, 6) if mark <= span * 1.001],
                   [(y(mark), short(mark)) for mark in marks])  # fmt: skip
    level = 0
    for curve in curves:
        if curve.area:
            below, above = stacked[level], stacked[level + 1]
            level += 1
            there = [f"{x(at):.1f},{y(above[at]):.1f} {x(at + 1):.1f},{y(above[at]):.1f}" for at in range(count)]
            back = [f"{x(at + 1):.1f},{y(below[at]):.1f} {x(at):.1f},{y(below[at]):.1f}" for at in range(count)]
            points = " ".join((*there, *reversed(back)))
            parts.append(f'<polygon class="area {curve.style}" points="{points}"/>')
        else:
            line = " ".join(f"{x(at + 0.5):.1f},{y(value):.1f}" for at, value in enumerate(curve.values))
            parts.append(f'<polyline class="line {curve.style}" points="{line}"/>')
    for at in range(count):
        said = ", ".join(f"{curve.label} {short(curve.values[at])}{unit}" for curve in curves)
        parts.append(
            f'<rect class="hit" x="{x(at):.1f}" y="{TOP}" width="{wide / count:.2f}" height="{high}">'
            f"<title>{edges[at]:.2f} s: {escape(said)}</title></rect>"
        )
    return _svg(parts, name)


def distribution(name: str, values: Sequence[float], style: str, bins: int = 40) -> str:
    """Bars of how many values (ms) lie where, on a logarithmic scale where they spread far, with percentiles."""
    ordered = sorted(values)
    if not ordered:
        return _svg([f'<text class="none" x="{WIDTH / 2}" y="{HEIGHT / 2}" text-anchor="middle">none</text>'], name)
    least, most = ordered[0], ordered[-1]
    logarithmic = most > 20 * max(ordered[len(ordered) // 2], 1e-3) or most > 50 * max(least, 1e-3)
    least = max(least, most / 1e4, 1e-3) if logarithmic else 0.0
    low, high = (math.log10(least), math.log10(most * 1.001)) if logarithmic else (0.0, (most or 1.0) * 1.001)
    high = max(high, low + 1e-6)

    def share(value: float) -> float:
        placed = math.log10(max(value, least)) if logarithmic else value
        return min(max((placed - low) / (high - low), 0.0), 1.0)

    counts = [0] * bins
    for value in ordered:
        counts[min(bins - 1, int(share(value) * bins))] += 1
    marks = ticks(max(counts))
    top, wide, tall = marks[-1], WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    if logarithmic:
        powers = range(math.floor(low), math.ceil(high) + 1)
        at_x = [mark for power in powers for mark in (10.0**power, 3 * 10.0**power) if low <= math.log10(mark) <= high]
    else:
        at_x = [mark for mark in ticks(high, 6) if mark <= high]
    parts = _frame([(LEFT + wide * share(mark), f"{short(mark)} ms") for mark in at_x],
                   [(TOP + tall * (1 - mark / top), short(mark)) for mark in marks])  # fmt: skip
    for at, count in enumerate(counts):
        tall_bar = tall * count / top
        left, right = (low + (high - low) * edge / bins for edge in (at, at + 1))
        said = f"{short(10**left if logarithmic else left)} to {short(10**right if logarithmic else right)} ms: {count}"
        parts.append(
            f'<rect class="bar {style}" x="{LEFT + wide * at / bins + 0.5:.1f}" y="{TOP + tall - tall_bar:.1f}" '
            f'width="{wide / bins - 1:.1f}" height="{tall_bar:.1f}"><title>{escape(said)}</title></rect>'
        )
    for at, percent in enumerate((50, 90, 99)):
        value = ordered[min(len(ordered) - 1, math.ceil(len(ordered) * percent / 100) - 1)]
        x = LEFT + wide * share(value)
        anchor, shift = ("end", -4) if share(value) > 0.85 else ("start", 4)
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{TOP + tall}"/>')
        parts.append(
            f'<text class="marked" x="{x + shift:.1f}" y="{TOP + 10 + 14 * at}" text-anchor="{anchor}">'
            f"p{percent} {short(value)}</text>"
        )
    return _svg(parts, name)


def life(spans: Sequence[Sequence[object]], whole: float, width: int = 1000, height: int = 14) -> str:
    """Spans (kind, begin, end) as a bar whose full width is `whole`."""
    parts = []
    for kind, begin, end in spans:
        left, right = (width * float(str(at)) / max(whole, 1e-9) for at in (begin, end))
        said = f"{kind} {float(str(end)) - float(str(begin)):.1f} ms"
        parts.append(
            f'<rect class="span {escape(str(kind))}" x="{left:.2f}" y="0" width="{max(right - left, 1.2):.2f}" '
            f'height="{height}"><title>{escape(said)}</title></rect>'
        )
    return f'<svg class="life" viewBox="0 0 {width} {height}" preserveAspectRatio="none">{"".join(parts)}</svg>'


__all__ = ["Curve", "distribution", "life", "over_time", "short", "ticks"]
