"""The fuzzer is measured by planted faults: the catalogue is sound, and some faults of each kind are caught."""

from __future__ import annotations

import ast
import json
import subprocess
from argparse import ArgumentParser
from pathlib import Path
from random import Random
from typing import Any, NoReturn

import pytest

from leftfold.replay import fuzz
from leftfold.replay.mutants import catalogue
from leftfold.replay.mutants.catalogue import PACKAGE, CatalogueError, Mutant, chosen, home, read
from leftfold.replay.mutants.command import noticed, suite_of, trial, tried
from leftfold.replay.mutants.sampling import ROOMS, changes, sampled

MUTANTS = read(home())
BY_NAME = {mutant.name: mutant for mutant in MUTANTS}

QUICK = (
    "release-loses-the-slot", "share-is-not-counted", "limit-one-token-short", "budget-is-spent-twice",
    "inputs-of-the-step-before", "resume-drops-the-pauses", "restart-keeps-the-chain", "abort-ends-one-choice",
    "priority-upside-down", "key-without-parent",
)  # fmt: skip
"""Of different classes, each caught within a second or two."""


def test_there_are_enough_of_every_class() -> None:
    assert len(MUTANTS) >= 60
    assert {mutant.kind for mutant in MUTANTS} == {
        "admission", "control", "deadlines", "ids", "log", "plans", "policy", "prefix", "recovery", "refcount",
        "release", "steps",
    }  # fmt: skip


def test_each_fault_is_another_one() -> None:
    planted = [(mutant.file, mutant.planted()) for mutant in MUTANTS]
    assert len(set(planted)) == len(planted)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_can_be_planted_where_it_says(mutant: Mutant) -> None:
    """Its place is there once, the patched source compiles, and says something else than the sound one."""
    sound = (PACKAGE / mutant.file).read_text()
    assert ast.dump(ast.parse(mutant.planted())) != ast.dump(ast.parse(sound))
    assert mutant.story.endswith(".") and len(mutant.story) <= 120


@pytest.mark.parametrize("name", QUICK)
def test_a_planted_fault_is_caught(name: str) -> None:
    row = tried(BY_NAME[name], seed=1, seconds=20)
    assert row["caught"], row


@pytest.mark.parametrize("name", ["release-while-a-step-names-it", "tokens-after-the-end"])
def test_the_test_of_a_finding_fails_on_the_mutant_alone(name: str, tmp_path: Path) -> None:
    mutant = BY_NAME[name]
    found = tried(mutant, seed=1, seconds=20, out=str(tmp_path))
    assert found["caught"], found
    assert not trial(mutant, test=found["test"])["passed"]
    assert trial(None, test=found["test"])["passed"]


def command(*arguments: str) -> int:
    parser = ArgumentParser()
    fuzz.add_arguments(parser)
    return fuzz.run(parser.parse_args(arguments))


def planted_catalogue(folder: Path, monkeypatch: pytest.MonkeyPatch, *mutants: str) -> None:
    """Let the command read this catalogue."""
    (folder / "some.toml").write_text("\n".join(f"[[mutant]]\n{mutant}" for mutant in mutants))
    monkeypatch.setattr("leftfold.replay.mutants.command.home", lambda: folder)


HARMLESS = """name = "harmless"
story = "Nothing is wrong."
file = "fsm/limits.py"
within = "demand"
old = "return "
new = "return 0 + "
"""
AWAY = """name = "away"
story = "No run imports this."
file = "replay/show.py"
old = "from __future__ import annotations"
new = "pass"
"""


def test_what_is_no_fault_is_missed_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planted_catalogue(tmp_path, monkeypatch, HARMLESS, AWAY)
    assert command("--mutants", "--seconds", "1", "--seed", "4", "--json") == 1
    said = json.loads(capsys.readouterr().out)
    assert said["seed"] == 4 and said["findings"] == [] and said["runs"] > 0
    harmless, away = said["mutants"]
    assert harmless["name"] == "harmless" and not harmless["caught"] and harmless["seconds"] >= 1
    assert not away["caught"] and away["error"] == "leftfold.replay.show plays no part in a run"


def test_a_table_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planted_catalogue(tmp_path, monkeypatch, HARMLESS, HARMLESS.replace("harmless", "harmful").replace("0 +", "1 +"))
    assert command("--mutants", "--only", "harmful", "--seconds", "20", "--seed", "4") == 0
    said = capsys.readouterr().out
    assert "harmful" in said and "harmless" not in said and "1 of 1 caught; median" in said


def test_without_a_catalogue_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(catalogue, "PACKAGE", tmp_path / "leftfold")
    assert command("--mutants") == 2
    told = capsys.readouterr()
    assert not told.out and "there is no catalogue of mutants at" in told.err


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (HARMLESS.replace("return ", "no such text"), "stands 0 times in fsm/limits.py, demand, expected once"),
        (HARMLESS.replace("demand", "nobody"), "there is no nobody in fsm/limits.py"),
        (HARMLESS.replace("fsm/limits.py", "fsm/nothing.py"), "cannot read"),
        (HARMLESS.replace("story", "tale"), "is no catalogue of mutants"),
        (f"{HARMLESS}\n[[mutant]]\n{HARMLESS}", "mutants harmless stand twice in"),
    ],
)
def test_an_entry_that_is_none_is_told(
    broken: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planted_catalogue(tmp_path, monkeypatch, broken)
    assert command("--mutants") == 2
    assert why in capsys.readouterr().err


def test_small_changes_are_not_drawn_without_the_sources_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(catalogue, "PACKAGE", tmp_path / "leftfold")
    assert command("--sampled", "3") == 2
    told = capsys.readouterr()
    assert not told.out and "there is no catalogue of mutants at" in told.err


def _no_answer(*command: object, **options: object) -> NoReturn:
    raise subprocess.TimeoutExpired("trial", 1)


def _half_an_answer(*command: object, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess("trial", -11, '{"caught": tr', "Segmentation fault\n")


@pytest.mark.parametrize(
    ("run", "says"), [(_no_answer, "no answer"), (_half_an_answer, "exit code -11: Segmentation fault")]
)
def test_a_trial_without_an_answer_is_no_catch_and_is_told(
    run: Any, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(subprocess, "run", run)
    assert command("--mutants", "--only", "release-loses-the-slot", "--seconds", "1") == 1
    shown = capsys.readouterr().out
    assert "MISSED" in shown and f"could not be tried: {says}" in shown and "0 of 1 caught" in shown


def test_a_change_of_what_no_run_imports_is_left_to_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def answers(planted: Any, **job: Any) -> dict[str, Any]:
        asked.append(job)
        if "suite" in job:
            return {"passed": False, "failed": ["FAILED tests/unit/test_some.py::test_it"], "seconds": 2.0}
        return {"caught": False, "runs": 3, "steps": 20, "seconds": 1.0, "planted": False}

    monkeypatch.setattr("leftfold.replay.mutants.command.trial", answers)
    change = next(iter(changes(PACKAGE / "events" / "compaction.py")))
    row = noticed(change, 1, 8.0, home().parent)
    assert [job.get("profile") for job in asked] == ["faults", None], "the other profile would not import it either"
    assert row["caught"] and row["kind"] == "tests" and "test_some" in row["message"] and row["seconds"] == 3.0


def test_mutants_are_chosen_by_name_class_or_pattern() -> None:
    assert [mutant.name for mutant in chosen(MUTANTS, ["limit-one-token-short"])] == ["limit-one-token-short"]
    assert {mutant.kind for mutant in chosen(MUTANTS, ["policy"])} == {"policy"}
    assert all(mutant.name.startswith("fair-") for mutant in chosen(MUTANTS, ["fair-*"]))
    with pytest.raises(CatalogueError, match="no mutant is called 'x'"):
        chosen(MUTANTS, ["x"])


SOURCES = [path for room in ROOMS for path in sorted((PACKAGE / room).glob("*.py"))]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_small_change_compiles_and_says_something_else(path: Path) -> None:
    sound = ast.dump(ast.parse(path.read_text()))
    for change in changes(path):
        assert ast.dump(ast.parse(change.planted())) != sound, change


def test_small_changes_leave_texts_and_annotations_alone(tmp_path: Path) -> None:
    room = tmp_path / "fsm"
    room.mkdir()
    (room / "some.py").write_text(
        'WORDS: dict[int, "1 + 1"] = {}\n\n\ndef small(a: int = 3) -> bool:\n    """Of 1 + 1."""\n    if a < 2 and a:\n'
        '        raise ValueError(f"{a + 1} is 0")\n    WORDS[a] = "ä"\n    return not a\n'
    )
    told = {change.story for change in changes(room / "some.py")}
    assert told == {
        "3 -> (4)", "a < 2 and a -> (a < 2 or a)", "a < 2 -> (a <= 2)", "2 -> (3)", 'WORDS[a] = "ä" -> pass',
        'raise ValueError(f"{a + 1} is 0") -> pass', "not a -> (a)",
    }  # fmt: skip


def test_a_sample_is_spread_over_all_files_and_is_the_same_for_the_same_seed() -> None:
    drawn = sampled(200, Random(3))
    assert [change.name for change in drawn] == [change.name for change in sampled(200, Random(3))]
    assert len(drawn) == 200 and len({change.file for change in drawn}) > 25


def test_a_small_change_is_noticed_by_the_fuzzer_or_by_tests_that_speak_of_it() -> None:
    demand = next(change for change in changes(PACKAGE / "fsm" / "limits.py") if "// page_size" in change.old)
    assert noticed(demand, 1, 8.0, home().parent)["caught"]
    told = trial(demand, suite=suite_of("fsm/limits.py", home().parent)[:1], seconds=30)
    assert not told["passed"] and told["failed"], told


def test_the_score_of_small_changes_is_told_with_what_nothing_notices(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first of three is caught by a run, the second by tests, the third by nothing."""
    caught = iter([True, False, False, False, False] * 2)
    passed = iter([False, True] * 2)

    def fuzzed(mutant: Mutant, **job: object) -> dict[str, object]:
        told = {"kind": "leak", "message": "", "runs": 3, "steps": 20, "seconds": 1.0, "planted": True}
        return {"caught": next(caught), **told}

    def suited(mutant: Mutant, **job: object) -> dict[str, object]:
        return {"passed": next(passed), "failed": ["FAILED tests/unit/test_some.py::test_it"], "seconds": 2.0}

    monkeypatch.setattr("leftfold.replay.mutants.command.fuzzed", fuzzed)
    monkeypatch.setattr("leftfold.replay.mutants.command.trial", suited)
    assert command("--sampled", "3", "--seed", "4", "--json") == 1
    told = json.loads(capsys.readouterr().out)["mutants"]
    assert [(row["caught"], row["seconds"]) for row in told] == [(True, 1.0), (True, 4.0), (False, 4.0)]
    assert "->" in told[2]["story"]
    assert command("--sampled", "3", "--seed", "4") == 1
    shown = capsys.readouterr().out
    assert "2 of 3 caught" in shown and "FAILED tests/unit/test_some.py" in shown


def test_what_is_found_without_the_fault_too_is_no_catch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the sound sources had the fault: every run that finds it is found again."""
    mutant = BY_NAME["release-loses-the-slot"]
    monkeypatch.setattr("leftfold.replay.mutants.command.trial", lambda planted, **job: trial(mutant, **job))
    row = tried(mutant, seed=1, seconds=20)
    assert not row["caught"] and "without the fault, too" in row["error"], row
