"""Shrinking logs: what is left still shows it, and the test that is written fails on the fault alone."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

import leftfold.fsm.planner
import leftfold.replay.rerun
from leftfold.events import Admit, EventLog, Started, Tick
from leftfold.executor.cost import CostModel
from leftfold.fsm import Config, InvariantViolation, State, decide
from leftfold.replay.regression import refold
from leftfold.replay.rerun import items_of, rerun
from leftfold.replay.shrink import NothingFound, name_of, shrink, source_of, write_test
from leftfold.replay.simulating import simulate
from leftfold.replay.simulating.jobs import drawn_prompt, job
from tests.logs import record


def captured() -> EventLog:
    log = EventLog.memory()
    config = Config(num_pages=30, page_size=4, max_running=4, max_batch_tokens=16, max_model_len=96)
    jobs = [job(f"r{n}", n * 900, partial(drawn_prompt, 0, n, 9 + n), 9 + n, 12) for n in range(8)]
    simulate(jobs, config, CostModel({"step": 1000.0}, "made up"), keep=(log.append,))
    return log


@pytest.mark.parametrize("make", [captured, lambda: _recorded()])
def test_a_log_run_again_comes_to_the_same_decisions(make: Any) -> None:
    log = make()
    outcome = rerun(items_of(log))
    assert outcome.found is None
    ours = [event.plan.step for event in outcome.events if isinstance(event, Tick) and event.plan is not None]
    theirs = [event.plan.step for _, event in log if isinstance(event, Tick) and event.plan is not None]
    assert ours == theirs


def _recorded() -> EventLog:
    log = EventLog.memory()
    record(log)
    return log


def broken_by(state: State) -> bool:
    """The planted fault's condition: three rows at once, one of them a request of more than 11 tokens."""
    return len(state.running()) >= 3 and any(seat.target > 11 for seat in state.running())


def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(self: State, thorough: bool = True) -> None:
        if broken_by(self):
            raise InvariantViolation("planted: three rows and a long one")

    monkeypatch.setattr(State, "check", check)


def test_a_violation_shrinks_to_what_it_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    items = items_of(captured())
    planted(monkeypatch)
    shrunk = shrink(items, "violation")
    assert shrunk.kind == "InvariantViolation" and shrunk.before == len(items)
    assert len([event for event in shrunk.events if isinstance(event, Admit)]) == 3
    assert len(shrunk.events) <= 7
    lengths = sorted(len(event.prompt) for event in shrunk.events if isinstance(event, Admit))
    assert lengths == [1, 1, 12]
    records = written(write_test(shrunk, tmp_path))
    with pytest.raises(InvariantViolation, match="planted"):
        records()
    monkeypatch.undo()
    records()


def written(path: Path) -> Any:
    """The one test of a file that was written."""
    scope: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    (name,) = [name for name in scope if name.startswith("test_")]
    assert path.stem == name
    return scope[name]


def test_a_planner_that_fails_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(state: State, t: int) -> Any:
        if state.next_step == 3:
            raise KeyError("planted")
        return decide(state, t)

    items = items_of(captured())
    monkeypatch.setattr(leftfold.replay.rerun, "decide", fails)
    shrunk = shrink(items, "violation")
    assert shrunk.kind == "KeyError" and len(shrunk.events) <= 7
    assert isinstance(shrunk.events[-1], Tick)


def long_prompt_second(events: Any) -> bool:
    admits = [event for event in events if isinstance(event, Admit)]
    return len(admits) > 1 and len(admits[1].prompt) > 5


def test_a_predicate_of_ones_own(tmp_path: Path) -> None:
    shrunk = shrink(items_of(captured()), "predicate", predicate=long_prompt_second)
    assert [type(event) for event in shrunk.events] == [Started, Admit, Admit]
    path = write_test(shrunk, tmp_path, "tests.unit.test_shrink:long_prompt_second")
    with pytest.raises(AssertionError):
        written(path)()


def test_a_log_that_shows_nothing() -> None:
    with pytest.raises(NothingFound, match="show no violation"):
        shrink(items_of(captured()), "violation")


def test_no_more_tries_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    items = items_of(captured())
    planted(monkeypatch)
    found = rerun(items).found
    assert found is not None
    asked = iter(range(5 * (found.item + 1)))
    shrunk = shrink(items, "violation", go_on=lambda: next(asked, None) is not None)
    assert shrunk.tries >= 4 and len(shrunk.events) < len(items)


def test_time_ends_within_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run of a long log may alone take longer than there is time."""
    items = items_of(captured())
    asked = iter(range(7))
    with pytest.raises(NothingFound, match="^7 of the log's [0-9]+ records .* no violation: give it more"):
        shrink(items, "violation", go_on=lambda: next(asked, None) is not None)
    planted(monkeypatch)
    found = rerun(items).found
    assert found is not None
    asked = iter(range(found.item + 1 + 3))
    shrunk = shrink(items, "violation", go_on=lambda: next(asked, None) is not None)
    assert (shrunk.tries, shrunk.kind) == (1, "InvariantViolation")


def test_names_depend_on_the_events_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    items = items_of(captured())
    planted(monkeypatch)
    first, second = (shrink(items, "violation") for _ in range(2))
    assert name_of(first) == name_of(second) and source_of(first) == source_of(second)


def test_refolding_notices_another_decision() -> None:
    lines = [line.decode() for line in _lines(captured())]
    refold("\n".join(lines))
    at = next(index for index, line in enumerate(lines) if '"step":2' in line and '"tick"' in line)
    lines[at] = lines[at].replace('"step":2', '"step":2,"memo":{"x":1}')
    with pytest.raises(AssertionError, match="divergence at seq"):
        refold("\n".join(lines))


def _lines(log: EventLog) -> list[bytes]:
    from leftfold.events import encode

    return [encode(event) for _, event in log]
