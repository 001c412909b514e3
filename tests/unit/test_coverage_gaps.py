"""What `make coverage` calls a gap, and when a reason counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import coverage_gaps
from tests.coverage_gaps import Gap, Known, exceptions, gaps

SOURCE = """class Pool:
    def take(self, page):
        if page:
            return page
        raise KeyError(page)
"""


def report(**told: list[object]) -> dict[str, object]:
    return {"files": {"fsm/some.py": {"missing_lines": [], "missing_branches": [], **told}}}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "fsm").mkdir()
    (tmp_path / "fsm" / "some.py").write_text(SOURCE)
    return tmp_path


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({}, {}),
        ({"missing_lines": [5], "missing_branches": [[3, 5]]}, {"raise KeyError(page)": 5}),
        ({"missing_branches": [[3, 5]]}, {"if page:": 3}),
    ],
)
def test_a_line_or_half_a_branch_is_a_gap(told: dict[str, list[object]], expected: dict[str, int], root: Path) -> None:
    found = gaps(report(**told), ("fsm/",), root)
    assert found == {Gap("fsm/some.py", "Pool.take", text): line for text, line in expected.items()}
    assert not gaps(report(**told), ("replay/",), root)


def test_only_a_gap_without_a_reason_fails(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    never, by_examples = root / "properties.json", root / "all.json"
    never.write_text(json.dumps(report(missing_lines=[5])))
    by_examples.write_text(json.dumps(report()))
    monkeypatch.setattr(coverage_gaps, "gaps", lambda told, rooms: gaps(told, rooms, root))

    def told(known: list[Known], everything: Path = by_examples) -> int:
        monkeypatch.setattr(coverage_gaps, "exceptions", lambda: known)
        return coverage_gaps.main(str(never), str(everything))

    assert told([]) == 1
    assert "fsm/some.py:5 Pool.take: raise KeyError(page)" in capsys.readouterr().out
    assert told([Known("fsm/*", "*", ["raise KeyError(*"], "It cannot be.")]) == 0
    held = Known("fsm/some.py", "Pool.take", ["raise KeyError(page)"], "Examples do it.", by_examples=True)
    assert told([held]) == 0 and told([held], everything=never) == 1


def test_every_exception_has_a_reason(tmp_path: Path) -> None:
    assert exceptions()
    path = tmp_path / "some.toml"
    path.write_text('[[exception]]\nfile = "a"\nfunction = "b"\nlines = ["c"]\nwhy = "because"\n')
    with pytest.raises(ValueError, match="say why"):
        exceptions(path)
