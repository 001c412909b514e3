"""The actor: order, time, faults of executor, reducer, listener and client; going on after a restart."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import leftfold.engine
import leftfold.fsm.reducer
import leftfold.replay.fold
from leftfold.engine import Engine
from leftfold.errors import ConfigurationError, EngineError, EngineFault
from leftfold.events import Abort, Admit, Event, EventLog, ExecutorLost, Pause, Shutdown, Started, Tick
from leftfold.fsm import Config, State
from leftfold.keeping import NoLog
from leftfold.replay.verify import verify
from tests.engines import CONFIG, Listener, Spied, admit, alone, engine


def types(log: EventLog) -> list[str]:
    return [type(event).__name__ for _, event in log]


def assert_idle(made: Engine) -> None:
    stats = made.stats()
    assert (stats["running"], stats["waiting"], stats["live"]) == (0, 0, 0)
    assert stats["pages_free"] + stats["pages_cached"] == CONFIG.num_pages
    made.state.check()


def test_a_request_is_logged_folded_executed_and_answered() -> None:
    listener, log = Listener(), EventLog.memory()
    made = engine(listener, log=log)
    admit(made, "a", max_tokens=3)
    made.run()
    assert types(log) == ["Started", "Admit", *["Tick", "ForwardDone"] * 3]
    assert len(listener.tokens("a")) == 3 and listener.end("a").finish_reason == "length"
    assert verify(log).clean
    assert_idle(made)


def test_requests_in_one_batch_get_what_they_get_alone() -> None:
    listener = Listener(count=3)
    made = engine(listener)
    prompts = {"a": (1, 2, 3), "b": tuple(range(20)), "c": (1, 2, 3, 4, 5, 6, 7, 8, 9)}
    for rid, prompt in prompts.items():
        admit(made, rid, prompt, max_tokens=9)
    made.run()
    for rid, prompt in prompts.items():
        assert listener.tokens(rid) == alone(prompt, max_tokens=9)
    assert_idle(made)


def test_messages_are_logged_in_the_order_they_were_taken() -> None:
    listener, log = Listener(count=2), EventLog.memory()
    made = engine(listener, log=log)
    admit(made, "a")
    made.submit(Abort, rid="a")
    admit(made, "b")
    made.run()
    inputs = [event for _, event in log if isinstance(event, Admit | Abort)]
    assert [(type(event), event.rid) for event in inputs] == [(Admit, "a"), (Abort, "a"), (Admit, "b")]
    assert listener.tokens("a") == [] and listener.end("a").finish_reason == "abort"


def test_abort_while_the_step_runs_is_taken_before_its_result() -> None:
    listener, log = Listener(count=2), EventLog.memory()

    def abort_a(plan: Any) -> None:
        if plan.step == 3:
            made.submit(Abort, rid="a", reason="gone")

    made = engine(listener, log=log, executor=Spied(before=abort_a))
    admit(made, "a", max_tokens=9)
    admit(made, "b", (9, 8, 7), max_tokens=9)
    made.run()
    assert listener.tokens("a") == alone(max_tokens=9)[:2]
    assert listener.end("a").finish_reason == "abort"
    assert listener.tokens("b") == alone((9, 8, 7), max_tokens=9)
    assert verify(log).clean
    assert_idle(made)


def test_a_step_that_fails_once_is_run_again() -> None:
    listener, log = Listener(), EventLog.memory()

    def fail_one(plan: Any) -> None:
        if plan.step == 2:
            executor.inner.fail_next("out of memory")

    executor = Spied(before=fail_one)
    made = engine(listener, log=log, executor=executor)
    admit(made, "a")
    made.run()
    assert listener.tokens("a") == alone()
    assert made.stats()["failed_steps"] == 1
    assert verify(log).clean


def test_rows_whose_steps_fail_only_together_are_run_apart() -> None:
    listener, log = Listener(count=2), EventLog.memory()

    def fail(plan: Any) -> None:
        if len(plan.rows) == 2:
            executor.inner.fail_next("out of memory")

    executor = Spied(before=fail)
    made = engine(listener, log=log, executor=executor)
    admit(made, "a")
    admit(made, "b")
    made.run()
    assert listener.tokens("a") == listener.tokens("b") == alone()
    assert verify(log).clean


def test_an_executor_that_raises_is_lost_reset_and_used_again() -> None:
    listener, log = Listener(), EventLog.memory()

    def crash(plan: Any) -> None:
        if len(executor.plans) == 3:
            raise RuntimeError("device\nlost")

    executor = Spied(before=crash)
    made = engine(listener, log=log, executor=executor)
    admit(made, "a")
    made.run()
    assert listener.tokens("a") == alone()
    assert [event.error for _, event in log if isinstance(event, ExecutorLost)] == ["RuntimeError: device lost"]
    assert [event.incarnation for _, event in log if isinstance(event, Started)] == [1, 2]
    assert executor.resets == 2
    assert verify(log).clean


def test_a_request_that_always_kills_the_executor_ends_with_an_error_and_the_others_are_served() -> None:
    listener, log = Listener(count=2), EventLog.memory()

    def crash(plan: Any) -> None:
        if any(row.rid == "poison" for row in plan.rows):
            raise RuntimeError("poisoned")

    made = engine(listener, log=log, executor=Spied(before=crash))
    admit(made, "poison")
    made_later: list[str] = []
    inner = made.on_effects

    def admit_after_the_end(effects: Any) -> None:
        assert inner is not None
        if not made_later and any(output.finish_reason for output in effects.outputs):
            made_later.append("b")
            admit(made, "b")
        inner(effects)

    made.on_effects = admit_after_the_end
    made.run()
    end = listener.end("poison")
    assert end.finish_reason == "error" and end.error is not None and "poisoned" in end.error["text"]
    assert listener.tokens("b") == alone()
    assert verify(log).clean


def test_an_executor_that_cannot_be_reset_ends_the_run_with_the_reason() -> None:
    listener = Listener()

    def crash(plan: Any) -> None:
        raise RuntimeError("gone")

    def broken() -> None:
        raise OSError("no device")

    executor = Spied(before=crash)
    made = engine(listener, executor=executor)
    executor.reset = broken  # type: ignore[method-assign]
    admit(made, "a")
    with pytest.raises(EngineError, match="cannot be reset: OSError: no device"):
        made.run()
    assert made.submit(Abort, rid="a") is False


def test_a_result_of_another_plan_is_never_taken() -> None:
    listener, log = Listener(), EventLog.memory()
    lies = iter([True])

    def forge(result: Any) -> Any:
        return result._replace(digest="0" * 32) if result.step == 2 and next(lies, False) else result

    made = engine(listener, log=log, executor=Spied(after=forge))
    admit(made, "a")
    made.run()
    assert listener.tokens("a") == alone()
    assert types(log).count("Started") == 2


def test_results_that_never_match_their_plans_end_the_run() -> None:
    made = engine(Listener(), executor=Spied(after=lambda result: result._replace(digest="0" * 32)))
    admit(made, "a")
    with pytest.raises(EngineError, match="not that of its plan"):
        made.run()


def test_a_restart_goes_on_with_live_requests_and_gives_the_same_tokens(tmp_path: Path) -> None:
    first = Listener(count=9, until=lambda output: output.position >= 8)
    made = engine(first, log=EventLog.open(tmp_path / "log"))
    admit(made, "a", max_tokens=12)
    admit(made, "b", (7, 7, 7), max_tokens=12)
    made.run()
    second = Listener(count=2)
    engine(second, log=EventLog.open(tmp_path / "log")).run()
    for rid, prompt in (("a", (1, 2, 3, 4, 5)), ("b", (7, 7, 7))):
        assert 0 < len(first.tokens(rid)) < 12
        assert first.tokens(rid) + second.tokens(rid) == alone(prompt, max_tokens=12)
        assert second.end(rid).usage.completion_tokens == 12
    log = EventLog.read(tmp_path / "log")
    assert [event.incarnation for _, event in log if isinstance(event, Started)] == [1, 2]
    assert verify(log).clean


@pytest.mark.parametrize("resume", [True, False])
def test_a_restart_says_what_it_goes_on_with_and_drops_it_when_told_to(
    resume: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    listener = Listener(until=lambda output: output.position >= 7)
    first = engine(listener, log=EventLog.open(tmp_path))
    admit(first, "a")
    first.run()
    assert first.state.live and not caplog.records
    listener, log = Listener(), EventLog.open(tmp_path)
    second = engine(listener, log=log, resume=resume)
    (said,) = [record.message for record in caplog.records if "live request" in record.message]
    assert ("goes on with 1 live request of the log; --resume=no" in said) == resume
    second.run()
    assert listener.end("a").finish_reason == ("length" if resume else "abort")
    events = [event for _, event in EventLog.read(tmp_path)]
    last = max(i for i, event in enumerate(events) if isinstance(event, Started))
    assert isinstance(events[last + 1], Abort) != resume
    assert verify(EventLog.read(tmp_path)).clean
    assert_idle(second)


def test_a_restart_with_other_limits_goes_on_too(tmp_path: Path) -> None:
    first = Listener(until=lambda output: output.position >= 8)
    made = engine(first, log=EventLog.open(tmp_path / "log"))
    admit(made, "a", max_tokens=12)
    made.run()
    second = Listener()
    other = Config(num_pages=64, page_size=2, max_running=2, max_batch_tokens=3, max_model_len=64, vocab_size=1000)
    from tests.engines import oracle

    engine(second, log=EventLog.open(tmp_path / "log"), config=other, executor=Spied(inner=oracle(other))).run()
    assert first.tokens("a") + second.tokens("a") == alone(max_tokens=12)
    assert verify(EventLog.read(tmp_path / "log")).clean


def test_a_log_of_another_model_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    engine(Listener(), log=EventLog.open(tmp_path / "log")).close()
    before = (tmp_path / "log" / "00000001.jsonl").read_bytes()
    log = EventLog.open(tmp_path / "log")
    with pytest.raises(ConfigurationError, match="holds model 'oracle', not 'other'"):
        engine(Listener(), log=log, model="other")
    assert (tmp_path / "log" / "00000001.jsonl").read_bytes() == before


def fails_on_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    real = leftfold.replay.fold.step

    def step(state: State, event: Event) -> Any:
        if isinstance(event, Abort):
            raise ZeroDivisionError("planted")
        return real(state, event)

    monkeypatch.setattr(leftfold.replay.fold, "step", step)


def test_a_fault_of_the_reducer_stops_the_engine_and_is_not_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    with monkeypatch.context() as patch:
        fails_on_abort(patch)
        made = engine(Listener(), log=EventLog.open(path))
        made.submit(Abort, rid="x")
        with pytest.raises(EngineFault, match="Abort at seq 2: ZeroDivisionError: planted") as fault:
            made.run()
        assert fault.value.seq == 2

        listener = Listener()
        again = engine(listener, log=EventLog.open(path))
        assert "seq 2" in again.fault and "seq 2" in again.stats()["fault"]
        admit(again, "a")
        again.run()
        end = listener.end("a")
        assert end.finish_reason == "error" and end.error is not None
        assert end.error["code"] == "failed" and "seq 2" in end.error["text"]
        assert types(EventLog.read(path)) == ["Started", "Abort"]

    mended = Listener()
    made = engine(mended, log=EventLog.open(path))
    admit(made, "a")
    made.run()
    assert mended.tokens("a") == alone()


def test_a_fault_while_refusing_answers_control_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails_on_abort(monkeypatch)
    made = engine(Listener(), log=EventLog.open(tmp_path / "log"))
    made.submit(Abort, rid="x")
    with pytest.raises(EngineFault):
        made.run()
    listener = Listener()
    again = engine(listener, log=EventLog.open(tmp_path / "log"))
    again.submit(Pause, call="p", mode="keep")
    again.stop()
    again.run()
    assert [(ack.call, ack.ok) for ack in listener.acks] == [("p", False)]


def test_a_decision_that_fails_is_in_the_log_and_is_not_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decide(state: State, t: int) -> Any:
        if state.waiting:
            raise IndexError("planted")
        return None

    monkeypatch.setattr(leftfold.engine, "decide", decide)
    monkeypatch.setattr(leftfold.fsm.reducer, "decide", decide)
    made = engine(Listener(), log=EventLog.open(tmp_path / "log"))
    admit(made, "a")
    with pytest.raises(EngineFault, match="IndexError: planted"):
        made.run()
    log = EventLog.read(tmp_path / "log")
    assert types(log) == ["Started", "Admit", "Tick"]
    assert [event.plan for _, event in log if isinstance(event, Tick)] == [None]
    again = engine(Listener(), log=EventLog.open(tmp_path / "log"))
    assert "Tick at seq 3" in again.fault
    again.close()


def test_a_listener_that_raises_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    listener = Listener()
    made = engine(listener)
    calls = []

    def faulty(effects: Any) -> None:
        listener(effects)
        calls.append(effects)
        raise ValueError("planted")

    made.on_effects = faulty
    admit(made, "a")
    made.run()
    assert listener.tokens("a") == alone() and len(calls) > 6
    assert "a listener failed" in caplog.text


@pytest.mark.parametrize("log", [EventLog.memory(), NoLog()])
def test_a_value_that_no_record_can_hold_is_refused_alone(log: Any) -> None:
    listener = Listener(count=2)
    made = engine(listener, log=log)
    admit(made, "bad", cache_salt=object())
    admit(made, "good")
    made.run()
    assert listener.end("bad").error["code"] == "invalid"
    assert listener.tokens("good") == alone()
    if isinstance(log, EventLog):
        assert [event.rid for _, event in log if isinstance(event, Admit)] == ["good"]


@pytest.mark.parametrize("failing", ["append", "flush"])
def test_a_full_disk_ends_the_run_with_the_reason_and_tells_no_client(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener, log = Listener(), EventLog.memory()
    made = engine(listener, log=log)
    admit(made, "a")

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(log, failing, full)
    with pytest.raises(EngineError, match="cannot be written: .*No space left"):
        made.run()
    assert listener.outputs == []


def test_a_wrong_field_is_the_callers_error() -> None:
    made = engine(Listener())
    with pytest.raises(TypeError, match="colour"):
        made.submit(Admit, rid="a", colour="red")
    made.close()


def test_a_deadline_fires_although_nothing_else_happens() -> None:
    listener = Listener(count=2)
    ended = threading.Event()
    made = engine(listener, executor=Spied(before=lambda plan: ended.wait(60) and None))
    inner = made.on_effects

    def tell(effects: Any) -> None:
        assert inner is not None
        inner(effects)
        if any(output.finish_reason == "deadline" for output in effects.outputs):
            ended.set()

    made.on_effects = tell
    admit(made, "a", deadline=20_000)
    admit(made, "b", (9, 9), max_tokens=2)
    made.run()
    assert listener.end("a").finish_reason == "deadline" and listener.tokens("a") == []
    assert listener.tokens("b") == alone((9, 9), max_tokens=2)
    assert_idle(made)


def test_a_deadline_fires_while_the_executor_is_away() -> None:
    listener, ended = Listener(), threading.Event()

    def crash(plan: Any) -> None:
        raise RuntimeError("planted")

    executor = Spied(before=crash)
    made = engine(listener, executor=executor)
    executor.reset = lambda: ended.wait(60) and None  # type: ignore[method-assign]
    inner = made.on_effects

    def tell(effects: Any) -> None:
        assert inner is not None
        inner(effects)
        if listener.left == 0:
            ended.set()

    made.on_effects = tell
    admit(made, "a", deadline=20_000)
    made.run()
    assert listener.end("a").finish_reason == "deadline" and executor.resets == 1


def test_shutdown_finishes_what_lives_refuses_the_rest_and_ends_the_run() -> None:
    listener = Listener(count=99)
    made = engine(listener)
    admit(made, "a")
    made.submit(Shutdown, call="bye")
    admit(made, "late")
    made.run()
    assert listener.tokens("a") == alone()
    assert listener.end("late").error["code"] == "closing"
    assert [(ack.call, ack.ok) for ack in listener.acks] == [("bye", True)]


def test_shutdown_ends_at_its_deadline_and_what_lives_is_for_the_next_start(tmp_path: Path) -> None:
    listener, over = Listener(), threading.Event()
    log = EventLog.open(tmp_path / "log")
    made = engine(listener, log=log, executor=Spied(before=lambda plan: over.wait(60) and None))
    inner = made.on_effects

    def tell(effects: Any) -> None:
        assert inner is not None
        inner(effects)
        if effects.acks:
            over.set()

    made.on_effects = tell
    admit(made, "a")
    made.submit(Shutdown, call="bye", deadline=20_000)
    made.run()
    assert [(ack.call, ack.ok) for ack in listener.acks] == [("bye", True)] and listener.tokens("a") == []
    second = Listener()
    engine(second, log=EventLog.open(tmp_path / "log")).run()
    assert second.tokens("a") == alone()
    assert verify(EventLog.read(tmp_path / "log")).clean


def test_event_time_never_goes_back_and_goes_on_after_a_restart(tmp_path: Path) -> None:
    walls = iter([1_000_000_000, 1_000_000_000, 5_000_000_000, *range(4_000_000_000, 0, -100_000_000)])

    def clock() -> int:
        return next(walls, 500_000_000)

    listener = Listener()
    made = engine(listener, log=EventLog.open(tmp_path / "log"), clock=clock)
    admit(made, "a")
    made.run()
    times = [event.t for _, event in EventLog.read(tmp_path / "log")]
    assert times[0] == 0 and max(times) == 4_000_000 and times == sorted(times)
    engine(Listener(), log=EventLog.open(tmp_path / "log"), clock=lambda: 9_000_000_000).close()
    *_, last = EventLog.read(tmp_path / "log")
    assert last.event.t == 8_000_000


def test_started_carries_what_a_fold_needs() -> None:
    log = EventLog.memory()
    engine(Listener(), log=log, code="1.2.3").close()
    ((_, event),) = list(log)
    assert isinstance(event, Started) and event.config is not None
    assert Config.from_dict(event.config) == CONFIG
    assert (event.model, event.code, event.incarnation, event.laws) == ("oracle", "1.2.3", 1, 1)
    assert event.wall_ns > 0
