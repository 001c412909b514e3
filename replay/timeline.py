"""One request's life on one screen: how long it waited, computed, was held, preempted, answered; and a bar of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from leftfold.events import Record
from leftfold.replay.holding import Hold, Holds, merged
from leftfold.replay.show import Moment, life

WIDTH = 72
MOST = 6
"""So many holds are told of one by one."""
LEGEND = {"waiting": ".", "prefill": "#", "decode": "=", "preempted": "x", "held": "-"}
"""`held`: by a pause, sleep or the like, whether it waited, ran or was preempted then."""

_NEXT = {
    "admit": "waiting", "join": "prefill", "chunk": "prefill", "preempt": "preempted", "lost": "preempted",
    "restarted": "preempted", "put back": "preempted",
}  # fmt: skip


@dataclass(slots=True)
class Span:
    """A stretch of one kind (`LEGEND`), from `begin` to `end` in µs."""

    kind: str
    begin: int
    end: int


@dataclass(slots=True)
class Timeline:
    """One choice's life. Times in µs; `first`, `ended`: None before; `holds`: what held it, maybe at once."""

    rid: str
    epoch: int
    choice: int
    arrived: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    chunks: int = 0
    steps: int = 0
    preemptions: list[int] = field(default_factory=list)
    first: int | None = None
    ended: int | None = None
    reason: str | None = None
    spans: list[Span] = field(default_factory=list)
    holds: list[Hold] = field(default_factory=list)

    def seconds(self, kind: str) -> float:
        """Time in spans of one kind."""
        return sum(span.end - span.begin for span in self.spans if span.kind == kind) / 1e6

    def as_dict(self) -> dict[str, Any]:
        """Everything, with times in ms from the arrival."""
        tpot = None
        if self.first is not None and self.ended is not None and self.output_tokens > 1:
            tpot = round((self.ended - self.first) / 1e3 / (self.output_tokens - 1), 3)
        return {
            "rid": self.rid, "epoch": self.epoch, "choice": self.choice, "arrived_s": self.arrived / 1e6,
            "prompt_tokens": self.prompt_tokens, "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens, "chunks": self.chunks, "steps": self.steps,
            "preempted_at_seq": self.preemptions, "reason": self.reason,
            "ttft_ms": None if self.first is None else (self.first - self.arrived) / 1e3, "tpot_ms": tpot,
            "e2e_ms": None if self.ended is None else (self.ended - self.arrived) / 1e3,
            "seconds": {kind: round(self.seconds(kind), 6) for kind in LEGEND},
            "held": [
                {"kind": hold.kind, "seconds": (hold.end - hold.begin) / 1e6, "first_seq": hold.first_seq,
                 "last_seq": hold.last_seq, "text": hold.why} for hold in self.holds
            ],
            "spans": [[span.kind, (span.begin - self.arrived) / 1e3, (span.end - self.arrived) / 1e3]
                      for span in self.spans],
        }  # fmt: skip

    def bar(self, width: int = WIDTH) -> str:
        """The life as so many characters; a short stretch is drawn over a long one, so that it is seen."""
        begin = self.arrived
        end = max((span.end for span in self.spans), default=begin)
        cells = [" "] * width
        for span in sorted(self.spans, key=lambda span: span.begin - span.end):
            low = (span.begin - begin) * width // max(1, end - begin)
            high = max(low + 1, (span.end - begin) * width // max(1, end - begin))
            for at in range(min(low, width - 1), min(high, width)):
                cells[at] = LEGEND[span.kind]
        return "".join(cells)

    def describe(self) -> str:
        """Some lines for a reader."""
        found = self.as_dict()
        which = "".join(f" {name} {found[name]}" for name in ("epoch", "choice") if found[name])
        known = [name for name in ("ttft", "tpot", "e2e") if found[f"{name}_ms"] is not None]
        times = [f"{name.upper()} {found[f'{name}_ms']:.1f} ms" for name in known]
        spent = [f"{LEGEND[kind]} {kind} {self.seconds(kind):.3f} s" for kind in LEGEND if self.seconds(kind)]
        lines = [
            f"{self.rid}{which}: arrived at {found['arrived_s']:.3f} s, "
            + (f"ended with {self.reason}" if self.reason else "still lives"),
            f"  prompt {self.prompt_tokens} tokens ({self.cached_tokens} from the prefix cache) in {self.chunks} "
            f"chunk{'' if self.chunks == 1 else 's'}, {self.output_tokens} tokens in {self.steps} steps",
            f"  {', '.join(times) or 'no token yet'}",
            f"  [{self.bar()}]",
            f"  {', '.join(spent)}",
        ]
        if self.preemptions:
            lines.append(f"  preempted {len(self.preemptions)} × at seq {', '.join(map(str, self.preemptions))}")
        lines += [f"  held {(hold.end - hold.begin) / 1e6:.3f} s while {hold.why}" for hold in self.holds[:MOST]]
        if len(self.holds) > MOST:
            lines.append(f"  and {len(self.holds) - MOST} times more")
        return "\n".join(lines)


def timelines(records: Iterable[Record], rid: str) -> list[Timeline]:
    """The lives of all choices of all requests of this id, in the order they came."""
    holds = Holds(rid)
    found = build(rid, life(records, rid, None, holds))
    for line in found:
        if line.ended is None:
            line.spans[-1].end = max(line.spans[-1].end, holds.t)
        begin, end = line.arrived, line.spans[-1].end  # an id may have come before, and come again
        ours = [hold for hold in holds.all if hold.who == (rid, line.epoch, line.choice)]
        line.holds = [hold for hold in ours if begin <= hold.begin and hold.end <= end]
        line.spans = _held(line.spans, line.holds)
    return found


def _held(spans: Sequence[Span], holds: Iterable[Hold]) -> list[Span]:
    """The spans with what was held cut out of them, as spans of its own."""
    found: list[Span] = []
    stretches = merged(holds)
    for span in spans:
        at = span.begin
        for begin, end in stretches:
            low, high = max(begin, at), min(end, span.end)
            if low < high:
                if at < low:
                    found.append(Span(span.kind, at, low))
                found.append(Span("held", low, high))
                at = high
        if at < span.end or span.begin == span.end:
            found.append(Span(span.kind, at, span.end))
    return found


def build(rid: str, moments: Iterable[Moment]) -> list[Timeline]:
    """From what `show.life` tells."""
    found: dict[tuple[int, int, int], Timeline] = {}
    newest: dict[tuple[int, int], int] = {}
    for moment in moments:
        detail = moment.detail
        if moment.what == "admit":
            for number in range(detail.get("choices", 1)):
                key = (moment.seq, detail.get("epoch", 0), number)
                newest[key[1:]] = moment.seq
                found[key] = Timeline(rid, *key[1:], moment.t, detail["prompt_tokens"])
                found[key].spans.append(Span("waiting", moment.t, moment.t))
            continue
        epoch, choice = detail.get("epoch"), detail.get("choice")
        for (seq, of_epoch, of_choice), line in found.items():
            named = (epoch in (None, of_epoch)) and (choice in (None, of_choice))
            general = moment.what in ("lost", "restarted", "failed", "control", "op", "op done", "abort")
            if newest[of_epoch, of_choice] == seq and line.ended is None and (
                named if general else (epoch or 0, choice or 0) == (of_epoch, of_choice)
            ):
                _extend(line, moment)
    return list(found.values())


def _extend(line: Timeline, moment: Moment) -> None:
    last, t, what = line.spans[-1], moment.t, moment.what
    last.end = t
    kind = last.kind
    if what in _NEXT:
        kind = "waiting" if _NEXT[what] == "preempted" and kind == "waiting" else _NEXT[what]
    elif what == "decode":
        kind = "decode"
    if what == "tokens":
        line.output_tokens += len(moment.detail["tokens"])
        if line.first is None:
            line.first = t
        kind = "decode"
    elif what == "join" and not line.cached_tokens and not line.chunks:
        line.cached_tokens = moment.detail.get("cached", 0)
    elif what == "preempt":
        line.preemptions.append(moment.seq)
    elif what == "finish":
        line.ended, line.reason = t, moment.detail["reason"]
        line.output_tokens = moment.detail.get("completion_tokens", line.output_tokens)
        return
    line.chunks += what == "chunk" and moment.detail["length"] > 0
    line.steps += (what == "decode") + (what == "chunk" and bool(moment.detail["samples"]))
    if kind != last.kind:
        line.spans.append(Span(kind, t, t))


__all__ = ["LEGEND", "Span", "Timeline", "build", "timelines"]
