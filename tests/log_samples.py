"""Small events for the tests of the log, and the log's bytes cut into lines."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from leftfold.events import (
    Abort,
    Admit,
    Chunk,
    End,
    Event,
    EventLog,
    ForwardDone,
    Grow,
    Join,
    Pause,
    Plan,
    Resume,
    SamplingParams,
    Shutdown,
    Started,
    Tick,
)


def events(count: int = 10, t: int = 0) -> list[Event]:
    """`count` events of many kinds, 5 µs apart from `t` on."""
    plan = Plan(
        step=3, join=(Join(0, "a", 0, 0, ((4, 5),)),), chunks=(Chunk(0, 3, True),), grow=(Grow((1,), (7,)),),
        ends=(End("b", 0, "deadline"),), memo={"estimate": 12},
    )  # fmt: skip
    kinds = (
        lambda t: Started(t=t, config={"page_size": 4}, model="toy", wall_ns=1_700_000_000_000_000_000),
        lambda t: Admit(t=t, rid="a", prompt=[1, 2, 3], params=SamplingParams(max_tokens=4, seed=2**63)),
        lambda t: Admit(t=t, rid='ü"\n\\', prompt=np.arange(5, dtype=np.int32), tenant="x"),
        lambda t: Tick(t=t, plan=plan),
        lambda t: ForwardDone(t=t, step=3, tokens=np.array([7, 8], np.int32), digest="0123456789abcdef" * 2),
        lambda t: ForwardDone(t=t, step=4, error={"text": "out of memory", "retry": True, "rows": [0]}),
        lambda t: Abort(t=t, rid="a", reason="client gone", keep=0),
        lambda t: Pause(t=t, mode="keep", call="c1"),
        lambda t: Resume(t=t),
        lambda t: Shutdown(t=t, deadline=1_000_000),
    )
    return [kinds[i % len(kinds)](t + 5 * i) for i in range(count)]


def write(directory: Path, count: int = 10, segment_bytes: int = 1 << 20) -> list[Event]:
    """A closed log of `count` events in `directory`."""
    written = events(count)
    with EventLog.open(directory, segment_bytes=segment_bytes) as log:
        for event in written:
            log.append(event)
    return written


def segments(directory: Path) -> list[Path]:
    """The plain segments of a log, in order."""
    return sorted(directory.glob("*.jsonl"))
