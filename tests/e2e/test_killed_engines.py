"""Engines that are killed while they answer: what they have told is in the log, and the next one goes on from it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from leftfold.events import EventLog
from leftfold.fsm import Output
from leftfold.keeping import KeptLog
from leftfold.replay.fold import Fold
from leftfold.replay.verify import verify
from tests.engines import CONFIG, Listener, Spied, admit, alone, engine

TOKENS = 50


def answer(folder: str, strict: bool) -> None:
    """What the process does: it prints every token that is told, at once, and takes its time for each step."""
    import time

    class Printing(Listener):
        def __call__(self, effects: object) -> None:
            before = len(self.outputs)
            super().__call__(effects)  # type: ignore[arg-type]
            for output in self.outputs[before:]:
                for token in output.tokens:
                    print(output.rid, output.position, int(token), flush=True)

    log = KeptLog(EventLog.open(folder, segment_bytes=4096), Path(folder), strict=strict, snapshot_every=25)
    heard = Printing()
    made = engine(heard, log=log, executor=Spied(before=lambda plan: time.sleep(0.002)))
    heard.left = len(made.state.live) or 3
    if not made.state.live:
        for rid in "abc":
            admit(made, rid, max_tokens=TOKENS)
    made.run()


def by_place(outputs: list[Output]) -> dict[tuple[str, int], int]:
    """Tokens by request and position; each output has one, an end without a token none."""
    return {(output.rid, output.position): int(output.tokens[0]) for output in outputs if len(output.tokens)}


@pytest.mark.parametrize("strict", [True, False])
def test_a_killed_engine_has_lost_nothing_that_it_told(strict: bool, tmp_path: Path) -> None:
    told: dict[tuple[str, int], int] = {}
    command = [sys.executable, "-m", "tests.e2e.test_killed_engines", str(tmp_path), str(int(strict))]
    for lines in (7, 30, 61):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            if not line.endswith("\n"):
                break  # cut off by the kill
            rid, position, token = line.split()
            assert told.setdefault((rid, int(position)), int(token)) == int(token), "a token is told once, or the same"
            lines -= 1
            if not lines:
                process.send_signal(signal.SIGKILL)
        process.wait()
        fold = Fold()
        logged = by_place([output for record in EventLog.read(tmp_path) for output in fold.take(*record).outputs])
        assert told.items() <= logged.items()
    heard = Listener(count=len(fold.state.live) if fold.state is not None else 0)
    made = engine(heard, log=KeptLog(EventLog.open(tmp_path), tmp_path, strict=strict))
    if made.state.live:
        made.run()
    else:
        made.close()
    logged |= by_place(heard.outputs)
    assert CONFIG.vocab_size is not None
    for rid in "abc":
        assert [logged[rid, at] for at in range(5, 5 + TOKENS)] == alone(max_tokens=TOKENS)
    assert verify(EventLog.read(tmp_path)).clean


if __name__ == "__main__":
    answer(sys.argv[1], bool(int(sys.argv[2])))
