"""Every table beside this file does what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios.runner import Player, Scenario, read

TABLES = sorted(Path(__file__).parent.glob("*.txt"))
SCENARIOS = [pytest.param(scenario, id=f"{path.stem}: {scenario.name}") for path in TABLES for scenario in read(path)]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_table_says_what_happens(scenario: Scenario) -> None:
    player = Player(scenario.limits)
    said = [(number, event, player.play(event)) for number, event, _ in scenario.rows]
    for (number, event, came), (_, _, expected) in zip(said, scenario.rows, strict=True):
        assert (number, event, sorted(came.split(", "))) == (number, event, sorted(expected.split(", ")))


def test_there_are_tables() -> None:
    assert len(SCENARIOS) >= 10


def test_a_table_that_is_wrong_says_where(tmp_path: Path) -> None:
    path = tmp_path / "wrong.txt"
    path.write_text("[wrong]\nnum_pages=4\nadmit a 4→2 → -\nwhat is this\n")
    with pytest.raises(ValueError, match=r"wrong\.txt:4: 'what is this'"):
        list(read(path))
