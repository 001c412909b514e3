"""Runs scenario tables: on the left what happens, on the right what the engine does.

A scenario is a name in brackets, a line of limits, and rows `event → plan or outputs`. Events:

    admit a 12→4 …     a request of 12 prompt tokens and max_tokens 4; further words: n=2 priority=1 deadline=9 like=b
                       (the same prompt as b's) cache=off stop=7
    tick [+9]          decide and apply, 1 µs later (or 9)
    done [1 2 …]       the oldest step in flight ends well with these tokens, one per sampling row (default: 1, 2, …)
    fail               it fails and is to be tried again
    void               the next one in flight is reported void
    abort a [#1]       a client leaves (one choice of it)
    lost · started     the executor is gone · ready
    pause keep · resume · flush · sleep kv · wake kv · shutdown · set max_running=1
    op                 the operation that the last plan started ends well

What comes of them, in any order, with commas:

    join a@0 [0 1 2]   at position 0, with these pages (` #1`: a choice other than the first)
    a:8 · a:8*         a computes 8 positions; `*`: and samples
    grow a [3] · preempt a · op sleep
    a=7 · a=7.         hears token 7; `.`: and that is its end by length (`!abort`, `!stop`, …: another reason)
    a!abort            ends without a token
    ack ok · ack no    a control call is answered
    -                  nothing
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leftfold.events import (
    Abort,
    Admit,
    Control,
    ControlDone,
    Event,
    ExecutionPlan,
    ExecutorLost,
    FlushCache,
    ForwardDone,
    Pause,
    Reconfigure,
    Resume,
    SamplingParams,
    Shutdown,
    Sleep,
    Started,
    Tick,
    Wake,
)
from leftfold.fsm import Config, Effects, FinishReason, State, step

LIMITS = {"num_pages": 8, "page_size": 4, "max_running": 4, "max_batch_tokens": 64, "max_model_len": 64}


@dataclass(frozen=True, slots=True)
class Scenario:
    """One table: where it stands, limits, and rows of (line number, event, expected)."""

    name: str
    limits: dict[str, Any]
    rows: Sequence[tuple[int, str, str]]


def read(path: Path) -> Iterator[Scenario]:
    """The scenarios of a file. Raises `ValueError` for a line that is none of a table's."""
    name, limits, rows = "", dict[str, Any](), list[tuple[int, str, str]]()
    for number, line in enumerate(path.read_text().splitlines(), 1):
        text = line.partition("//")[0].strip()
        if text.startswith("["):
            if name:
                yield Scenario(name, limits, rows)
            name, limits, rows = text.strip("[]"), {}, []
        elif " → " in text:
            event, _, expected = text.rpartition(" → ")
            rows.append((number, event.strip(), expected.strip()))
        elif text and not rows and all("=" in word for word in text.split()):
            limits = {key: _value(value) for key, _, value in (word.partition("=") for word in text.split())}
        elif text:
            raise ValueError(f"{path}:{number}: {line!r} is neither a name, nor limits, nor `event → what comes of it`")
    yield Scenario(name, limits, rows)


def _value(text: str) -> Any:
    if text in ("yes", "no"):
        return text == "yes"
    return int(text) if text.lstrip("-").isdigit() else text


class Player:
    """Plays one scenario on a state; the table is the executor."""

    def __init__(self, limits: dict[str, Any]) -> None:
        self.state = State(Config(**{**LIMITS, **limits}))
        self.t = 0
        self.flights: deque[ExecutionPlan] = deque()
        self.voided: deque[ExecutionPlan] = deque()
        self.op = 0
        self.prompts: dict[str, list[int]] = {}
        self.names: dict[int, str] = {}  # who ran in each slot last

    def play(self, text: str) -> str:
        """Fold the event that `text` says; what came of it, in the table's words."""
        verb, *words = text.split()
        event = getattr(self, f"_{verb}")(*words)
        effects = step(self.state, event)
        self.state.check()
        if effects.plan is not None:
            self.flights.append(effects.plan)
        return ", ".join(self._told(effects)) or "-"

    # Events

    def _admit(self, rid: str, size: str, *words: str) -> Event:
        prompt, _, most = size.partition("→")
        fields = {key: _value(value) for key, _, value in (word.partition("=") for word in words)}
        like = fields.pop("like", None)
        tokens = [100 * len(self.prompts) + position for position in range(int(prompt))]
        self.prompts[rid] = self.prompts[like][: int(prompt)] if like else tokens
        stop = [fields.pop("stop")] if "stop" in fields else []
        params = SamplingParams(max_tokens=int(most), n=fields.pop("n", 1), stop_token_ids=stop)
        return Admit(t=self.t, rid=rid, prompt=self.prompts[rid], params=params, **fields)

    def _tick(self, later: str = "+1") -> Event:
        self.t += int(later)
        return Tick(t=self.t)

    def _done(self, *tokens: str) -> Event:
        plan = self.flights.popleft()
        count = sum(row.samples for row in plan.rows)
        values = [int(token) for token in tokens] or list(range(1, count + 1))
        return ForwardDone(t=self.t, step=plan.step, tokens=values, digest=plan.digest)

    def _fail(self) -> Event:
        plan = self.flights.popleft()
        self.voided += self.flights
        self.flights.clear()
        error = {"text": "out of luck", "retry": True, "rows": ()}
        return ForwardDone(t=self.t, step=plan.step, digest=plan.digest, error=error)

    def _void(self) -> Event:
        plan = self.voided.popleft()
        error = {"text": "an earlier step failed", "retry": True, "rows": ()}
        return ForwardDone(t=self.t, step=plan.step, digest=plan.digest, error=error)

    def _abort(self, rid: str, choice: str = "") -> Event:
        return Abort(t=self.t, rid=rid, choice=int(choice[1:]) if choice else None)

    def _lost(self) -> Event:
        self.flights.clear()
        return ExecutorLost(t=self.t)

    def _started(self) -> Event:
        self.flights.clear()
        return Started(t=self.t)

    def _pause(self, mode: str) -> Event:
        return Pause(t=self.t, call="c", mode=mode)

    def _resume(self) -> Event:
        return Resume(t=self.t, call="c")

    def _flush(self) -> Event:
        return FlushCache(t=self.t, call="c")

    def _sleep(self, *tags: str) -> Event:
        return Sleep(t=self.t, call="c", tags=tags)

    def _wake(self, *tags: str) -> Event:
        return Wake(t=self.t, call="c", tags=tags)

    def _shutdown(self) -> Event:
        return Shutdown(t=self.t, call="c")

    def _set(self, *words: str) -> Event:
        return Reconfigure(t=self.t, call="c", set={key: _value(v) for key, _, v in (w.partition("=") for w in words)})

    def _op(self) -> Event:
        return ControlDone(t=self.t, op=self.op)

    # What comes of them

    def _told(self, effects: Effects) -> Iterator[str]:
        if effects.plan is not None:
            yield from self._planned(effects.plan)
        for output in effects.outputs:
            name = output.rid + (f"#{output.choice}" if output.choice else "")
            end = {None: "", FinishReason.LENGTH: "."}.get(output.finish_reason, f"!{output.finish_reason}")
            yield f"{name}={output.tokens[0]}{end}" if output.tokens else f"{name}{end}"
        for ack in effects.acks:
            yield f"ack {'ok' if ack.ok else 'no'}"

    def _planned(self, plan: ExecutionPlan) -> Iterator[str]:
        delta = plan.plan
        for slot in delta.preempt:
            yield f"preempt {self.names[slot]}"
        for op in delta.ops:
            assert isinstance(op, Control)
            self.op = op.op
            yield f"op {op.verb}"
        for join in delta.join:
            yield f"join {join.rid}{f'#{join.choice}' if join.choice else ''}@{join.start} {_listed(join.pages[0])}"
        for grow in delta.grow:
            for slot, page in zip(grow.slots, grow.pages, strict=True):
                seat = self.state.by_slot[slot]
                assert seat is not None
                choice = f"#{seat.request.choice}" if seat.request.choice else ""
                yield f"grow {seat.request.rid}{choice} [{page}]"
        for row in plan.rows:
            yield f"{row.rid}{f'#{row.choice}' if row.choice else ''}:{row.length}{'*' if row.samples else ''}"
        self.names |= {row.slot: row.rid for row in plan.rows}


def _listed(pages: Sequence[int]) -> str:
    return f"[{' '.join(map(str, pages))}]"
