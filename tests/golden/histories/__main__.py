"""Write a new history: `python -m tests.golden.histories NAME (recorded | ahead1 | ahead2 | engine | wrong)`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from leftfold.events import EventLog, Started
from leftfold.replay.verify import verify
from tests.engines import Listener, Spied, admit, engine
from tests.logs import CONFIG, Recorder, record

HOME = Path(__file__).parent


def record_engine(log: EventLog) -> None:
    """Six requests with shared prefixes on a small pool, one crash of the executor."""

    def crash(plan: object) -> None:
        if len(executor.plans) == 9:
            raise RuntimeError("planted")

    executor = Spied(before=crash)
    made = engine(Listener(count=6), log=log, executor=executor)
    for index in range(6):
        admit(made, f"r{index}", [*range(1, 8), *range(index, index * 4)], max_tokens=10 + index)
    made.run()


def record_wrong(log: EventLog) -> None:
    """Plans of 4 tokens under a config that says 8: what a planner with a fault would leave behind."""
    small = EventLog.memory()
    made = Recorder(small, replace(CONFIG, max_batch_tokens=4))
    made.admit("a", list(range(1, 11)), max_tokens=4)
    made.run()
    for _, event in small:
        log.append(replace(event, config=CONFIG.as_dict()) if isinstance(event, Started) else event)


def record_ahead(depth: int, log: EventLog) -> None:
    """The same requests with up to `depth` steps planned ahead, on a pool that is too small for them all."""
    record(log, replace(CONFIG, pipeline_depth=depth))


KINDS: Mapping[str, Callable[[EventLog], object]] = {
    "recorded": record,
    "ahead1": partial(record_ahead, 1),
    "ahead2": partial(record_ahead, 2),
    "engine": record_engine,
    "wrong": record_wrong,
}


def main(name: str, kind: str) -> None:
    folder = HOME / name
    with EventLog.open(folder) as log:
        KINDS[kind](log)
    (folder / "LOCK").unlink()
    verdict = verify(EventLog.read(folder))
    assert verdict.clean == (kind != "wrong"), verdict.describe()
    found = {name: verdict.as_dict()[name] for name in ("events", "steps", "tokens", "divergence")}
    (folder / "expected.json").write_text(json.dumps({**found, "decides": True}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
