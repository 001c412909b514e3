"""Steps planned ahead: whatever goes wrong in one of them, each request gets what it gets alone, at every depth."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from leftfold.errors import EngineError
from leftfold.events import EventLog, ExecutorLost, ForwardDone, Started
from leftfold.replay.verify import verify
from leftfold.worker import Ready, Worker
from tests.engines import Gated, Listener, Spied, admit, alone, gated

DEPTHS = (0, 1, 2)
PROMPTS = {"a": (1, 2, 3), "b": tuple(range(20)), "c": (1, 2, 3, 4, 5, 6, 7, 8, 9)}


def count(log: EventLog, kind: type) -> int:
    return sum(isinstance(event, kind) for _, event in log)


def admit_all(made: Any) -> None:
    for rid, prompt in PROMPTS.items():
        admit(made, rid, prompt, max_tokens=9)


def assert_served(listener: Listener, *rids: str) -> None:
    for rid in rids:
        assert listener.tokens(rid) == alone(PROMPTS[rid], max_tokens=9), rid


@pytest.mark.parametrize("depth", DEPTHS)
def test_as_many_steps_are_in_flight_as_may_be(depth: int) -> None:
    listener, log, executor = Listener(count=3), EventLog.memory(), Gated()
    made = gated(listener, depth, executor, log=log)
    admit_all(made)
    made.run()
    assert_served(listener, *PROMPTS)
    assert max(executor.depths) == depth
    assert verify(log).clean


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("change", [{"digest": "0" * 32}, {"tokens": [1, 2, 3, 4, 5, 6]}], ids=["digest", "count"])
def test_one_wrong_result_costs_one_reset(depth: int, change: dict[str, Any]) -> None:
    listener, log, lies = Listener(count=3), EventLog.memory(), iter([True])

    def forge(result: Any) -> Any:
        return result._replace(**change) if result.step == 4 and next(lies, False) else result

    executor = Gated(after=forge)
    made = gated(listener, depth, executor, log=log)
    admit_all(made)
    made.run()
    assert_served(listener, *PROMPTS)
    assert (count(log, Started), executor.resets) == (2, 2)
    assert verify(log).clean == ("digest" not in change)  # a digest that the plan does not have is told


@pytest.mark.parametrize("depth", DEPTHS)
def test_results_that_never_match_end_the_run_with_the_reason(depth: int) -> None:
    executor = Gated(after=lambda result: result._replace(digest="0" * 32))
    made = gated(Listener(), depth, executor)
    admit_all(made)
    with pytest.raises(EngineError, match="not that of its plan"):
        made.run()
    assert executor.resets == 3


@pytest.mark.parametrize("depth", DEPTHS)
def test_results_that_are_wrong_only_after_good_ones_end_the_run_too(depth: int) -> None:
    def forge(result: Any) -> Any:
        chunk = executor.plans[-1].rows[0]
        return result._replace(digest="0" * 32) if chunk.start else result

    executor = Gated(after=forge)
    made = gated(Listener(), depth, executor)
    admit(made, "b", PROMPTS["b"])
    with pytest.raises(EngineError, match="not that of its plan"):
        made.run()
    assert executor.resets == 3


@pytest.mark.parametrize("depth", DEPTHS)
def test_one_loss_costs_one_reset(depth: int) -> None:
    listener, log = Listener(count=3), EventLog.memory()

    def crash(plan: Any) -> None:
        if len(executor.plans) == 4:
            raise RuntimeError("device lost")

    executor = Gated(before=crash)
    made = gated(listener, depth, executor, log=log)
    admit_all(made)
    made.run()
    assert_served(listener, *PROMPTS)
    assert (count(log, Started), count(log, ExecutorLost), executor.resets) == (2, 1, 2)
    assert verify(log).clean


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("company", [False, True], ids=["alone", "in company"])
def test_a_request_that_crashes_the_executor_after_its_first_chunk_ends(depth: int, company: bool) -> None:
    listener, log = Listener(count=4 if company else 1), EventLog.memory()

    def crash(plan: Any) -> None:
        if any(row.rid == "poison" and row.start for row in plan.rows):
            raise RuntimeError("poisoned")

    executor = Gated(before=crash)
    made = gated(listener, depth, executor, log=log)
    if company:
        admit_all(made)
    admit(made, "poison", range(30, 60))
    made.run()
    end = listener.end("poison")
    assert end.finish_reason == "error" and end.error is not None and "poisoned" in end.error["text"]
    if company:
        assert_served(listener, *PROMPTS)
    assert executor.resets <= 5
    assert verify(log).clean


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("position", [1, 14])
@pytest.mark.parametrize("crashes", [False, True], ids=["fails", "crashes"])
def test_a_bad_request_takes_nobody_with_it(depth: int, position: int, crashes: bool) -> None:
    """It goes wrong for ever at its prompt, or while all of them decode."""
    listener, log = Listener(count=4), EventLog.memory()

    def poison(plan: Any) -> None:
        if any(row.rid == "poison" and row.start + row.length >= position for row in plan.rows):
            if crashes:
                raise RuntimeError("poisoned")
            if plan.voids == executor.inner._failures:  # else it is void already
                executor.inner.fail_next("poisoned")

    executor = Gated(before=poison)
    made = gated(listener, depth, executor, log=log)
    admit(made, "poison", (5, 5, 5), max_tokens=40)
    admit_all(made)
    made.run()
    end = listener.end("poison")
    assert end.finish_reason == "error" and end.error is not None and "poisoned" in end.error["text"]
    assert_served(listener, *PROMPTS)
    assert verify(log).clean
    assert made.stats()["failed_steps"] <= 5 and executor.resets <= 4
    made.state.check()


@pytest.mark.parametrize("depth", DEPTHS)
def test_results_of_void_steps_are_nobodys_failures(depth: int) -> None:
    """A step may fail once again, however many steps were planned behind it and are void."""
    listener, log = Listener(count=2), EventLog.memory()
    failing = iter([True, True])

    def fail(plan: Any) -> None:
        if plan.voids == executor.inner._failures and plan.rows[0].start == 6 and next(failing, False):
            executor.inner.fail_next("planted")

    executor = Gated(before=fail)
    made = gated(listener, depth, executor, log=log)
    admit(made, "c", PROMPTS["c"], max_tokens=9)
    admit(made, "a", PROMPTS["a"], max_tokens=9)
    made.run()
    assert_served(listener, "a", "c")
    assert verify(log).clean


@pytest.mark.parametrize("depth", DEPTHS)
def test_every_step_fails_once_and_all_are_served_together(depth: int) -> None:
    listener, log, done = Listener(count=3), EventLog.memory(), set()

    def fail(plan: Any) -> None:
        place = tuple((row.rid, row.start) for row in plan.rows)
        if plan.voids == executor.inner._failures and place not in done:
            done.add(place)
            executor.inner.fail_next("planted")

    executor = Gated(before=fail)
    made = gated(listener, depth, executor, log=log)
    admit_all(made)
    made.run()
    assert_served(listener, *PROMPTS)
    assert not any(event.error and event.error.get("apart") for _, event in log if isinstance(event, ForwardDone))
    assert verify(log).clean


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_restart_goes_on_at_every_depth(tmp_path: Path, depth: int) -> None:
    first = Listener(count=99, until=lambda output: output.rid == "a" and output.position >= 7)
    made = gated(first, depth, Gated(), log=EventLog.open(tmp_path / "log"))
    admit_all(made)
    made.run()
    second = Listener(count=3 - sum(output.finish_reason is not None for output in first.outputs))
    made = gated(second, (depth + 1) % 3, Gated(), log=EventLog.open(tmp_path / "log"))
    made.run()
    for rid, prompt in PROMPTS.items():
        assert first.tokens(rid) + second.tokens(rid) == alone(prompt, max_tokens=9)
    assert verify(EventLog.read(tmp_path / "log")).clean


def test_what_waits_of_an_incarnation_that_ended_is_not_executed() -> None:
    posted: list[Any] = []
    executor = Spied()
    worker = Worker(executor, posted.append)
    worker.execute(1, None)  # type: ignore[arg-type]
    worker.execute(1, None)  # type: ignore[arg-type]
    worker.reset(1)
    worker.start()
    assert worker.close(60)
    assert executor.plans == [] and {type(message) for message in posted} <= {Ready}


def test_a_close_does_not_wait_for_the_next_reset() -> None:
    executor = Spied()
    worker = Worker(executor, lambda message: None)
    worker.start()
    worker.reset(1, delay=3600.0)
    begin = time.monotonic()
    assert worker.close(60)
    assert time.monotonic() - begin < 60 and executor.resets == 0
