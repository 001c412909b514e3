"""A state machine as a drawing (SVG): a line down for every state, an arrow across for every edge, its triggers beside.

States stand side by side in layers: by the longest way to them from the start that never goes back. One edge a row
means that no two arrows cross and that no label lies on another, however dense the machine is.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

Edge = tuple[str, str, str]

COLUMN, ROW, HEAD, MARGIN = 108, 22, 64, 20
LETTER = 6.6  # how wide one is, about
STYLE = """text { font: 12px ui-sans-serif, system-ui, sans-serif; fill: #24292f }
.name { font-weight: 600; font-size: 11px; text-anchor: middle }
.box { fill: #eef4fb; stroke: #4a7ab5 }
.line { stroke: #c3cedb; stroke-dasharray: 3 3 }
.band { fill: #f6f8fa }
.edge { fill: none; stroke: #0b5cad; stroke-width: 1.4 }
.dot { fill: #0b5cad }"""
TIP = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    '<path class="dot" d="M0 0 L8 4 L0 8 z"/></marker></defs>'
)


def svg(edges: Sequence[Edge], title: str) -> str:
    """The whole document."""
    states = in_layers(edges)
    rows = sorted(edges, key=lambda edge: states.index(edge[0]))
    labels = MARGIN + COLUMN * len(states) + 12
    width = round(labels + max(len(triggers) for _, _, triggers in edges) * LETTER + MARGIN)
    height = HEAD + ROW * len(rows) + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(title)}">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        TIP,
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    parts += _bands(rows, states, width)
    parts += [_state(name, _across(states, name), height) for name in states]
    for number, (source, target, triggers) in enumerate(rows):
        y = HEAD + ROW * number + ROW // 2
        parts.append(_arrow(_across(states, source), _across(states, target), y))
        parts.append(f'<text x="{labels}" y="{y + 4}">{escape(triggers)}</text>')
    return "\n".join([*parts, "</svg>"])


def in_layers(edges: Sequence[Edge]) -> list[str]:
    """States by layer, the start ("") first; within a layer in the order of the edges."""
    names = sorted(dict.fromkeys(name for source, target, _ in edges for name in (source, target)), key=bool)
    onward = _onward(names, edges)
    layer = dict.fromkeys(names, 0)
    for _ in names:
        for source, target in onward:
            layer[target] = max(layer[target], layer[source] + 1)
    return sorted(names, key=lambda name: layer[name])


def _onward(names: Sequence[str], edges: Sequence[Edge]) -> list[tuple[str, str]]:
    """Edges but those that lead back to a state on the way to their own source, looked for depth first."""
    after: dict[str, list[str]] = {name: [] for name in names}
    for source, target, _ in edges:
        after[source].append(target)
    kept: list[tuple[str, str]] = []
    seen: dict[str, None] = {}

    def visit(name: str, way: tuple[str, ...]) -> None:
        seen[name] = None
        for target in after[name]:
            if target not in way:
                kept.append((name, target))
                if target not in seen:
                    visit(target, (*way, target))

    for name in names:
        if name not in seen:
            visit(name, (name,))
    return kept


def _across(states: Sequence[str], name: str) -> int:
    return MARGIN + COLUMN * states.index(name) + COLUMN // 2


def _bands(rows: Sequence[Edge], states: Sequence[str], width: int) -> list[str]:
    """Edges that leave the same state stand on one band."""
    return [
        f'<rect class="band" y="{HEAD + ROW * number}" width="{width}" height="{ROW}"/>'
        for number, (source, _, _) in enumerate(rows)
        if states.index(source) % 2 == 0
    ]


def _state(name: str, x: int, height: int) -> str:
    line = f'<line class="line" x1="{x}" y1="46" x2="{x}" y2="{height - MARGIN}"/>'
    if not name:
        return f'{line}<circle class="dot" cx="{x}" cy="33" r="7"/>'
    half = COLUMN // 2 - 5
    box = f'<rect class="box" x="{x - half}" y="20" width="{2 * half}" height="26" rx="6"/>'
    return f'{line}{box}<text class="name" x="{x}" y="37">{escape(name)}</text>'


def _arrow(start: int, end: int, y: int) -> str:
    """From a dot on one line to another line, or round to the same."""
    if start == end:
        path = f"M{start} {y - 4} C{start + 26} {y - 9} {start + 26} {y + 9} {start + 2} {y + 4}"
    else:
        path = f"M{start} {y} L{end - 2 if end > start else end + 2} {y}"
    return f'<circle class="dot" cx="{start}" cy="{y}" r="3"/><path class="edge" d="{path}" marker-end="url(#tip)"/>'
