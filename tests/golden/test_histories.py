"""Old logs fold and are decided the same by today's code; one that was tampered with must not be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from leftfold.events import EventLog
from leftfold.replay.fold import fold
from leftfold.replay.verify import verify

HISTORIES = Path(__file__).parent / "histories"
NAMES = sorted(path.parent.name for path in HISTORIES.glob("*/expected.json"))


def expected(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((HISTORIES / name / "expected.json").read_text())
    return found


def test_there_are_histories_and_one_that_must_fail() -> None:
    outcomes = [expected(name)["divergence"] is None for name in NAMES]
    assert True in outcomes and False in outcomes


@pytest.mark.parametrize("name", NAMES)
def test_history_replays_to_what_it_was(name: str) -> None:
    wanted = expected(name)
    decides = wanted.pop("decides")
    verdict = verify(EventLog.read(HISTORIES / name))
    assert verdict.damage is None and verdict.torn is None
    found = {name: value for name, value in verdict.as_dict().items() if name in wanted}
    if not decides:
        found["divergence"] = wanted["divergence"]
    assert found == wanted


@pytest.mark.parametrize("name", NAMES)
def test_history_folds_without_deciding_and_holds_every_invariant(name: str) -> None:
    folded = fold(EventLog.read(HISTORIES / name))
    assert folded.state is not None
    folded.state.check()
