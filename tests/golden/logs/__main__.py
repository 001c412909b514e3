"""Write a log for ever: `python -m tests.golden.logs NAME (whole | pruned | wrong)`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from leftfold.events import Event, EventLog, Retention, Started, compress_next, prune, save_snapshot
from leftfold.replay.fold import Fold
from leftfold.replay.snapshots import capture
from leftfold.replay.verify import verify
from tests.logs import CONFIG, Recorder, record

HOME = Path(__file__).parent
LATER = 4e9
"""Seconds since the epoch: after anything that is written here."""


def events(kind: str) -> list[Event]:
    """Some of everything; `wrong`: plans of 4 tokens under a config that says 8."""
    memory = EventLog.memory()
    if kind != "wrong":
        record(memory, replace(CONFIG, pipeline_depth=1))
        return [event for _, event in memory]
    made = Recorder(memory, replace(CONFIG, max_batch_tokens=4))
    made.admit("a", list(range(1, 11)), max_tokens=8)
    made.run()
    return [replace(one, config=CONFIG.as_dict()) if isinstance(one, Started) else one for _, one in memory]


def write(folder: Path, kind: str) -> str:
    """The log with snapshots, some of its segments compressed; the digest at its end."""
    fold = Fold()
    with EventLog.open(folder, segment_bytes=1_000) as log:
        for event in events(kind):
            fold.take(log.append(event), event)
            if fold.seq in (12, 24, 36):
                log.sync()
                save_snapshot(folder, fold.seq, capture(fold).encode(log.mark[1]))
        compress_next(folder)
        compress_next(folder)
    if kind == "pruned":
        assert prune(folder, Retention(size=0), LATER)
    (folder / "LOCK").unlink()
    assert fold.state is not None
    return fold.state.digest()


def main(name: str, kind: str) -> None:
    folder = HOME / name
    digest = write(folder, kind)
    verdict = verify(EventLog.read(folder))
    assert verdict.clean == (kind != "wrong"), verdict.describe()
    (folder / "expected.json").write_text(json.dumps({**verdict.as_dict(), "digest": digest}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
