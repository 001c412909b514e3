"""Deadlines are durations from the `Admit`, expire at `Tick`s only, and say when the next `Tick` is due."""

from __future__ import annotations

import pytest

from leftfold.events import Admit, Resume, SamplingParams, Shutdown, Tick
from leftfold.fsm import Config, FinishReason, Gate, State, decide, step
from leftfold.replay.fuzzing import World


def world(**limits: object) -> World:
    fields = {"num_pages": 8, "page_size": 4, "max_running": 1, "max_batch_tokens": 8, "max_model_len": 40}
    return World(**{**fields, **limits})  # type: ignore[arg-type]


def test_a_deadline_is_counted_from_the_admit() -> None:
    state = State(Config(num_pages=8, page_size=4, max_running=1, max_batch_tokens=8, max_model_len=40))
    effects = step(state, Admit(t=100, rid="a", prompt=[1], params=SamplingParams(), deadline=50))
    assert effects.wake_at == 150


def test_the_earliest_deadline_wakes_and_an_ended_request_wakes_nobody() -> None:
    w = world()
    w.admit("a", [1], 30, deadline=50)
    w.admit("b", [1], 30, deadline=20, queue_deadline=10)
    assert w.state.wake_at == 10
    w.abort("b")
    assert w.state.wake_at == 50
    w.abort("a")
    assert w.state.wake_at is None


def test_no_event_but_a_tick_lets_a_deadline_expire() -> None:
    w = world()
    w.admit("a", [1], 30, deadline=5)
    w.steps(1)
    w.tick()
    w.wait(100)
    w.stray("Prepared")
    w.done()
    assert ("a", 0, 0) in w.clients
    w.tick()
    assert w.ended["a", 0, 0].finish_reason is FinishReason.DEADLINE


def test_it_expires_at_the_very_microsecond() -> None:
    w = world()
    w.admit("a", [1], 30, deadline=10)
    assert not (plan := decide(w.state, 9)) or not plan.ends
    plan = decide(w.state, 10)
    assert plan is not None and [(end.rid, end.reason) for end in plan.ends] == [("a", "deadline")]


def test_a_queue_deadline_ends_with_the_first_join() -> None:
    w = world()
    w.admit("a", [1], 30, queue_deadline=10)
    w.admit("b", [1], 30, queue_deadline=10)
    w.steps(1)
    w.wait(50)
    w.steps(1)
    assert ("a", 0, 0) in w.clients
    assert w.ended["b", 0, 0].finish_reason is FinishReason.DEADLINE
    w.finish()


def test_a_preempted_request_does_not_miss_its_queue_deadline_any_more() -> None:
    w = world(max_running=2)
    w.admit("a", [1] * 4, 28)
    w.admit("b", [2] * 4, 20, queue_deadline=40)
    while not w.state.stats()["preemptions"]:
        w.steps(1)
    w.wait(100)
    w.finish()
    assert w.ended["b", 0, 0].finish_reason is FinishReason.LENGTH


def test_both_deadlines_at_once_end_a_request_once() -> None:
    w = world()
    w.admit("a", [1], 30, deadline=5, queue_deadline=5)
    w.wait(5)
    w.tick()
    assert w.ended["a", 0, 0].finish_reason is FinishReason.DEADLINE and w.state.wake_at is None


def test_deadlines_expire_while_the_executor_is_gone() -> None:
    w = world()
    w.admit("a", [1], 30, deadline=5)
    w.steps(2)
    w.lose()
    w.wait(10)
    w.tick()
    assert w.ended["a", 0, 0].finish_reason is FinishReason.DEADLINE


def test_the_room_of_an_overdue_row_is_used_in_the_same_plan() -> None:
    w = world(num_pages=2)
    w.admit("a", [1] * 5, 3, deadline=5)
    w.steps(1)
    w.admit("b", [2] * 5, 3)
    w.wait(5)
    w.tick()
    assert w.flight is not None and [row.rid for row in w.flight.rows] == ["b"]
    w.finish()


@pytest.mark.parametrize("flying", [False, True])
def test_a_shutdown_stops_at_its_deadline_and_keeps_what_lives(flying: bool) -> None:
    w = world()
    w.admit("a", [1], 30)
    w.steps(3)
    if flying:
        w.tick()
    effects = step(w.state, Shutdown(t=w.t, call="bye", deadline=20))
    due = w.t + 20
    assert effects.wake_at == due and not effects.acks
    assert decide(w.state, due - 1) is None or not flying
    plan = decide(w.state, due)
    assert plan is not None and plan.step is None and not plan.empty
    effects = step(w.state, Tick(t=due, plan=plan))
    assert [(ack.call, ack.ok) for ack in effects.acks] == [("bye", True)]
    assert w.state.gate is Gate.STOPPED and list(w.state.live) == [("a", 0, 0)]
    assert effects.wake_at is None and decide(w.state, due + 1000) is None
    w.state.check()


def test_in_a_stopped_engine_no_deadline_expires() -> None:
    w = world()
    w.admit("a", [1], 30, deadline=50)
    w.steps(2)
    w.shutdown(deadline=10)
    w.wait(20)
    w.tick()
    assert w.state.gate is Gate.STOPPED
    w.wait(100)
    w.tick()
    assert ("a", 0, 0) in w.clients
    w.start()
    w.tick()
    assert w.ended["a", 0, 0].finish_reason is FinishReason.DEADLINE


def test_a_shutdown_is_answered_when_the_last_request_ends() -> None:
    w = world()
    w.admit("a", [1], 3)
    call = w.shutdown()
    assert call not in w.desk.answered
    w.admit("b", [1], 3)
    assert (w.ended["b", 0, 0].error or {})["code"] == "closing"
    w.steps(3)
    assert w.desk.answered[call].ok and w.state.gate is Gate.STOPPED


def test_a_start_answers_the_shutdown_it_supersedes() -> None:
    w = world()
    w.admit("a", [1], 3)
    call = w.shutdown()
    w.start()
    assert not w.desk.answered[call].ok and w.state.gate is Gate.RUNNING
    w.finish()


def test_what_is_not_carried_out_is_answered() -> None:
    w = world()
    effects = step(w.state, Resume(t=0, call="r"))
    assert [ack.call for ack in effects.acks] == ["r"]
