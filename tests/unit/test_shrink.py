"""Shrinking logs: what is left still shows it, and the test that is written fails on the fault alone."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import leftfold.fsm.planner
import leftfold.replay.rerun
from leftfold.events import Admit, ControlDone, EventLog, SamplingParams, Sleep, Started, Tick, Wake, encode
from leftfold.executor.cost import CostModel
from leftfold.fsm import Config, InvariantViolation, Phase, State, decide
from leftfold.replay.checkout import Checkout
from leftfold.replay.compare import plan_dict
from leftfold.replay.errors import NotStarted
from leftfold.replay.regression import events_of, refold
from leftfold.replay.rerun import Item, items_of, rerun
from leftfold.replay.shrink import NothingFound, name_of, shrink, source_of, write_test
from leftfold.replay.simulating import simulate
from leftfold.replay.simulating.jobs import drawn_prompt, job
from tests.checkouts import REAL, checkout
from tests.logs import CONFIG, Recorder, record


def captured() -> EventLog:
    log = EventLog.memory()
    config = Config(num_pages=30, page_size=4, max_running=4, max_batch_tokens=16, max_model_len=96)
    jobs = [job(f"r{n}", n * 900, partial(drawn_prompt, 0, n, 9 + n), 9 + n, 12) for n in range(8)]
    simulate(jobs, config, CostModel({"step": 1000.0}, "made up"), keep=(log.append,))
    return log


@pytest.mark.parametrize("make", [captured, lambda: _recorded(), lambda: _stopped(), lambda: _controlled()])
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


def _stopped() -> EventLog:
    """An answer that a stop id ends, and one whose end others wait for."""
    made = Recorder(EventLog.memory(), replace(CONFIG, max_running=1))
    made.take(Admit, rid="a", prompt=[1, 2, 3], params=SamplingParams(max_tokens=20, stop_token_ids=(21,)))
    made.admit("b", [1, 2, 3])
    made.run()
    assert made.state.requests["a"].phase is Phase.FINISHED and made.state.counts["finished_stop"] == 1
    return made.log


def _controlled() -> EventLog:
    made = Recorder(EventLog.memory())
    made.admit("a", [1, 2, 3], max_tokens=9)
    made.run(2)
    for kind in (Sleep, Wake):
        made.take(kind, call=kind.__name__, tags=("kv",))
        plan = made.tick()
        made.done()
        made.take(ControlDone, op=plan.ops[0].op)
    made.run()
    return made.log


def test_items_that_begin_nothing_cannot_be_run() -> None:
    with pytest.raises(NotStarted, match="the first Started carries no config"):
        rerun([Item(0, Started(t=0))])
    with pytest.raises(NotStarted, match="a Admit before any Started"):
        rerun([Item(0, Admit(t=0, rid="a", prompt=[1]))])


@pytest.mark.parametrize("make", [captured, _recorded, _controlled])
def test_the_same_planner_in_another_process_decides_the_same(make: Any) -> None:
    with Checkout(REAL.parent) as same:
        outcome = rerun(items_of(make()), same)
    assert outcome.found is None


@pytest.mark.parametrize(("planner", "field", "theirs"), [
    ("return None if plan and plan.step == 2 else plan", "plan", None),
    ("if plan and plan.step == 2: raise KeyError('planted')\nreturn plan", "plan", "KeyError: 'planted'"),
    ("return replace(plan, memo={'x': 1}) if plan and plan.step == 2 else plan", "memo", {"x": 1}),
])  # fmt: skip
def test_what_another_planner_decides_otherwise_is_found(
    planner: str, field: str, theirs: Any, tmp_path: Path
) -> None:
    with Checkout(checkout(tmp_path, planner)) as other:
        outcome = rerun(items_of(_recorded()), other)
    found = outcome.found
    assert found is not None and found.divergence is not None and found.kind == f"divergence in {field}"
    last = outcome.events[-1]
    assert isinstance(last, Tick) and last.plan is not None and last.plan.step == 2
    ours = None if field == "memo" else plan_dict(last.plan)
    assert (found.divergence.expected, found.divergence.got) == (ours, theirs)
    refold("\n".join(encode(event).decode() for event in outcome.events))


def test_a_decision_that_only_another_planner_makes_is_found(tmp_path: Path) -> None:
    log = _recorded()
    items = [*items_of(log), Item(log.last_t, Tick(t=log.last_t))]
    path = checkout(tmp_path, "from leftfold.events import Plan\nreturn Plan(memo={'x': 1}) if plan is None else plan")
    with Checkout(path) as other:
        outcome = rerun(items, other)
    found = outcome.found
    assert found is not None and found.divergence is not None and (found.kind, found.item) == (
        "divergence in plan", len(items) - 1,
    )  # fmt: skip
    assert (found.divergence.expected, found.divergence.got) == (None, {"memo": {"x": 1}})
    refold("\n".join(encode(event).decode() for event in outcome.events))


def test_a_divergence_shrinks_to_a_test_that_holds_here_and_fails_there(tmp_path: Path) -> None:
    planner = "return replace(plan, memo={'x': 1}) if plan and len(state.decoding.seats) == 2 else plan"
    made = Recorder(EventLog.memory())
    for rid, prompt in (("a", [1, 2]), ("b", [3, 4]), ("c", [5, 6, 7])):
        made.admit(rid, prompt, max_tokens=3)
        made.run(1)
    made.run()
    path = checkout(tmp_path / "other", planner)
    with Checkout(path) as other:
        shrunk = shrink(items_of(made.log), "divergence", other=other)
    assert shrunk.kind == "divergence in memo" and 4 <= len(shrunk.events) < shrunk.before
    assert all(event.plan is not None for event in shrunk.events if isinstance(event, Tick))
    test = write_test(shrunk, tmp_path)
    written(test)()
    environment = {**os.environ, "PYTHONPATH": str(path)}
    call = f"import runpy; runpy.run_path({str(test)!r})[{test.stem!r}]()"
    done = subprocess.run([sys.executable, "-c", call], env=environment, cwd=path, capture_output=True, text=True)
    assert done.returncode == 1 and "AssertionError: divergence at seq" in done.stderr


def test_a_violation_is_no_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    items = items_of(captured())
    planted(monkeypatch)
    with Checkout(REAL.parent) as same, pytest.raises(NothingFound, match="show no divergence"):
        shrink(items, "divergence", other=same)


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


@pytest.mark.parametrize("prompt", [None, 5, "text", {"a": 1}, [[1], [2]], [1.5], (-7, -7), np.array([[1, 2]])])
def test_a_prompt_that_is_none_is_as_small_as_it_gets(prompt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Recorder(EventLog.memory())
    made.admit("b", [1, 2, 3])
    made.take(Admit, rid="odd", prompt=prompt)
    made.run()

    def check(self: State, thorough: bool = True) -> None:
        if self.counts["refused"]:
            raise InvariantViolation("planted: somebody was refused")

    monkeypatch.setattr(State, "check", check)
    shrunk = shrink(items_of(made.log), "violation")
    assert [getattr(event, "rid", None) for event in shrunk.events] == [None, "odd"]
    assert shrunk.text == "InvariantViolation: planted: somebody was refused"


def test_prompts_that_no_log_has_read_back_are_cut_as_well() -> None:
    """An event made here may hold an array, where one that was read holds a list."""
    items = [
        Item(0, Started(t=0, config=CONFIG.as_dict())),
        Item(1, Admit(t=1, rid="a", prompt=np.arange(4, dtype=np.int32))),
        Item(2, Admit(t=2, rid="b", prompt=np.arange(9, dtype=np.int32))),
    ]
    shrunk = shrink(items, "predicate", predicate=long_prompt_second)
    prompts = [event.prompt for event in shrunk.events if isinstance(event, Admit)]
    assert prompts == [[1], [1] * 6]


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


def the_longest_prompt_is_the_last(events: Any) -> bool:
    lengths = [len(event.prompt) for event in events if isinstance(event, Admit)]
    return lengths[-1:] == [max(lengths)] and len(lengths) > 2


def test_a_predicate_that_cannot_judge_some_lists() -> None:
    """`max` of nothing raises a `ValueError`: a list without requests is none that shows it."""
    shrunk = shrink(items_of(captured()), "predicate", predicate=the_longest_prompt_is_the_last)
    assert [type(event) for event in shrunk.events] == [Started, Admit, Admit, Admit]


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


def test_records_without_plans_are_decided_anew() -> None:
    log = captured()
    events = [replace(event, plan=None) if isinstance(event, Tick) else event for _, event in log]
    lines = [encode(event).decode() for event in [*events, Tick(t=log.last_t)]]  # at the last nothing is to be decided
    assert [encode(event) for event in events_of("\n".join(lines))] == _lines(log)
    state = refold("\n".join(lines))
    assert not state.live and state.counts["finished_length"] == 8


def _lines(log: EventLog) -> list[bytes]:
    return [encode(event) for _, event in log]
