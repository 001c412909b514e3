"""What holds a request while nothing is decided, and what takes its row: pauses, drains, sleep, losses, restarts."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leftfold.events import (
    Abort,
    ControlDone,
    EventLog,
    ExecutorLost,
    FlushCache,
    ForwardDone,
    Pause,
    Reconfigure,
    Resume,
    Shutdown,
    Sleep,
    UpdateWeights,
    Wake,
)
from leftfold.replay.explain import Explanation, explain, explain_from
from leftfold.replay.fold import fold
from leftfold.replay.names import Named
from leftfold.replay.show import life
from leftfold.replay.timeline import Timeline, timelines
from leftfold.replay.worlds import World
from leftfold.replay.worlds.world import MOST_CALLS
from tests.logs import CONFIG, Recorder

SECOND = 1_000_000
BOTH = ("weights", "kv")


@pytest.fixture
def made() -> Recorder:
    return Recorder(EventLog.memory())


def seq(made: Recorder) -> int:
    return len(made.log)


def held(told: Explanation) -> list[tuple[str, str, float]]:
    """Of each hold: its kind, what the request was, and the seconds, one digit behind the point."""
    holds = [cause.hold for cause in told.causes if cause.hold is not None]
    return [(hold.kind, hold.phase, round((hold.end - hold.begin) / 1e6, 1)) for hold in holds]


def one(made: Recorder, rid: str = "a") -> Timeline:
    [line] = timelines(made.log, rid)
    return line


def test_who_comes_into_a_pause_is_told_of_it(made: Recorder) -> None:
    made.take(Pause, mode="keep", call="p")
    pause = seq(made)
    made.t += SECOND
    made.admit("a", [1, 2, 3])
    made.t += 5 * SECOND
    made.take(Resume, call="r")
    resume = seq(made)
    made.run()
    told = explain(made.log, "a")
    assert held(told) == [("paused", "waiting", 5.0)]
    text = f"from the Pause (keep) at seq {pause}, before it came, to the Resume at seq {resume}"
    assert told.sentences()[0] == (
        f"From 1.000 s on it was held 5.000 s, waiting, while the engine was paused: {text}."
    )
    assert "nothing held it" not in told.describe()
    line = one(made)
    assert line.seconds("held") == pytest.approx(5.0, abs=0.001) and line.seconds("waiting") < 0.001
    assert "- held 5.000 s" in line.describe() and text in line.describe() and "-" in line.bar()


def test_a_row_is_held_from_the_result_of_its_last_step_on(made: Recorder) -> None:
    made.admit("a", [1, 2, 3], max_tokens=12)
    made.run(4)
    made.tick()
    made.take(Pause, mode="keep", call="p")
    made.t += SECOND  # the step in flight takes so long
    made.done()
    made.t += 4 * SECOND
    made.take(Resume, call="r")
    made.run()
    assert held(explain(made.log, "a")) == [("paused", "decoding", 4.0)]
    line = one(made)
    assert line.seconds("held") == pytest.approx(4.0, abs=0.001)
    assert line.seconds("decode") == pytest.approx(1.0, abs=0.001)
    assert [span.kind for span in line.spans][-3:] == ["decode", "held", "decode"]


def test_a_row_that_sleep_took_and_a_pause_held_is_told_both(made: Recorder) -> None:
    made.admit("a", [1, 2, 3], max_tokens=12)
    made.run(4)
    made.take(Pause, mode="keep", call="p")
    pause = seq(made)
    made.operate(Sleep, tags=BOTH, call="s")
    asleep = seq(made)
    made.t += 2 * SECOND
    made.operate(Wake, tags=BOTH, call="w")
    awake = seq(made)
    made.t += 38 * SECOND
    made.take(Resume, call="r")
    resume = seq(made)
    made.run()
    told = explain(made.log, "a")
    assert held(told) == [("paused", "decoding", 40.0), ("asleep", "preempted", 2.0)]
    text = told.describe()
    assert f"from the Pause (keep) at seq {pause} to the Resume at seq {resume}." in text
    assert f"from the Sleep at seq {pause + 1} to seq {awake}, the end of the Wake at seq {asleep + 1}." in text
    assert f"go back in line: the Sleep at seq {pause + 1} takes what every row has computed with it." in text
    assert not any(cause.kind == "gate" and cause.hold is None for cause in told.causes)
    line = one(made)
    assert line.seconds("held") == pytest.approx(40.0, abs=0.001) and line.seconds("preempted") < 0.001
    assert [hold.kind for hold in line.holds] == ["paused", "asleep"]
    upto = explain(made.log, "a", asleep, until=made.t)
    assert held(upto)[1] == ("asleep", "preempted", 2.0), "until the next record, which ends nothing that is asked for"
    assert f"from the Sleep at seq {pause + 1} to seq {asleep}, and on." in upto.describe()
    assert held(explain(made.log, "a", asleep, until=SECOND))[1] == ("asleep", "preempted", 1.0)
    assert held(explain(made.log, "a", asleep))[1] == ("asleep", "preempted", 0.0)


def test_a_drain_holds_only_who_came_after_its_pause(made: Recorder) -> None:
    made.admit("a", [1, 2, 3])
    made.run(2)
    made.take(Pause, mode="wait", call="p")
    made.admit("b", [1, 2, 3])
    made.t += SECOND
    made.run()
    drained = seq(made)
    made.t += 3 * SECOND
    made.take(Resume, call="r")
    made.run()
    assert held(explain(made.log, "a")) == []
    told = explain(made.log, "b")
    assert held(told) == [("draining", "waiting", 1.0), ("paused", "waiting", 3.0)]
    assert f"to seq {drained}, when all that came before had run." in told.describe()
    assert "from the Pause (wait) at seq" in told.sentences()[1]


def test_a_lost_executor_and_a_restart_hold_and_take_rows(made: Recorder) -> None:
    made.admit("a", [1, 2, 3], max_tokens=12)
    made.run(2)
    made.take(ExecutorLost, error="gone")
    made.t += 2 * SECOND
    made.start()
    made.run(2)
    last = seq(made)
    made.t += 5 * SECOND
    made.start()
    made.run()
    told = explain(made.log, "a")
    assert held(told) == [("absent", "preempted", 2.0), ("down", "running", 5.0)]
    assert [cause.text.split(",")[0] for cause in told.causes if cause.kind == "put_back"] == [
        "the executor was lost", "the engine was started again",
    ]  # fmt: skip
    assert f"while no engine ran: from seq {last}, the last record before, to the Started at seq {last + 1}" in (
        told.describe()
    )


def test_a_call_that_is_carried_out_holds_as_long_as_it_takes(made: Recorder) -> None:
    made.admit("a", [1, 2, 3], max_tokens=12)
    made.run(2)
    made.take(UpdateWeights, call="u", source="x", version="v2", live="recompute")
    call = seq(made)
    plan = made.tick()
    made.done()
    made.t += 3 * SECOND
    made.take(ControlDone, op=plan.ops[0].op, error="no such file")
    failed = seq(made)
    made.run()
    told = explain(made.log, "a")
    assert held(told) == [("call", "decoding", 3.0)]
    assert f"from the UpdateWeights at seq {call} to seq {failed}, the failure of the UpdateWeights at seq {call}" in (
        told.describe()
    )
    assert f"the UpdateWeights at seq {call} takes what every row has computed with it" in told.describe()


def test_a_call_beside_a_drain_holds_who_the_drain_lets_run(made: Recorder) -> None:
    made.admit("a", [1, 2, 3], max_tokens=12)
    made.run(2)
    made.take(Pause, mode="wait", call="p")
    made.admit("b", [1, 2, 3])
    made.take(UpdateWeights, call="u", source="x", version="v2", live="keep")
    plan = made.tick()
    made.done()
    made.t += 3 * SECOND
    made.take(ControlDone, op=plan.ops[0].op)
    made.run()
    assert held(explain(made.log, "a")) == [("call", "decoding", 3.0)]
    assert held(explain(made.log, "b"))[0] == ("draining", "waiting", 3.0)
    assert not [cause for cause in explain(made.log, "a").causes if cause.kind == "put_back"]


def test_what_held_before_the_first_record_holds_from_there_on(made: Recorder) -> None:
    made.admit("a", [1, 2, 3], max_tokens=12)
    made.run(2)
    made.take(Pause, mode="keep", call="p")
    begin = seq(made)
    made.t += 6 * SECOND
    made.take(Resume, call="r")
    made.run()
    rest = (record for record in made.log if record.seq > begin)
    told = explain_from(fold(made.log, begin), rest, "a")
    assert held(told) == [("paused", "decoding", 6.0)] and f"from before seq {begin + 1} to" in told.describe()


def test_rows_that_lower_limits_put_back_are_told_so() -> None:
    made = Recorder(EventLog.memory(), replace(CONFIG, max_running=2))
    made.admit("a", [1, 2, 3])
    made.admit("b", [4, 5, 6])
    made.run(2)
    made.take(Reconfigure, call="c", set={"max_running": 1})
    made.run()
    assert "back in line: the limits leave room for 1 running, fewer than ran" in explain(made.log, "b").describe()
    assert not held(explain(made.log, "a")) and not held(explain(made.log, "b"))


def test_pauses_that_come_again_are_one_sentence(made: Recorder) -> None:
    made.admit("a", [1, 2, 3], max_tokens=12)
    for _ in range(3):
        made.run(2)
        made.take(Pause, mode="keep", call="p")
        made.t += SECOND
        made.take(Resume, call="r")
    made.take(FlushCache, call="f")
    made.run()
    told = explain(made.log, "a")
    assert held(told) == [("paused", "decoding", 1.0)] * 3
    [text] = told.sentences()
    assert text.startswith("3 times, from seq ") and "it was held, 3.000 s in all; the last time 1.000 s" in text


def test_what_took_no_time_is_not_told(made: Recorder) -> None:
    made.admit("a", [1, 2, 3], max_tokens=12)
    made.run(2)
    made.take(Pause, mode="keep", call="p")
    made.t -= 10
    made.take(Resume, call="r")
    made.run()
    assert held(explain(made.log, "a")) == [] and one(made).holds == []


def test_an_engine_that_closes_from_a_pause_holds_what_lives(made: Recorder) -> None:
    made.admit("a", [1, 2, 3], max_tokens=12)
    made.run(2)
    made.take(Pause, mode="keep", call="p")
    made.t += SECOND
    made.take(Shutdown, call="x", deadline=SECOND)
    shutdown = seq(made)
    made.t += 2 * SECOND
    made.start()
    made.run()
    told = explain(made.log, "a")
    assert held(told)[0] == ("paused", "decoding", 1.0) and f"to the Shutdown at seq {shutdown}" in told.describe()
    assert {kind for kind, _, _ in held(told)} & {"closing", "stopped"}


def test_an_engine_that_closes_from_a_pause_ends_its_operation_first(made: Recorder) -> None:
    made.admit("a", [1, 2, 3], max_tokens=12)
    made.run(2)
    made.take(Pause, mode="keep", call="p")
    made.take(Sleep, tags=("weights",), call="s")
    plan = made.tick()
    made.take(Shutdown, call="x", deadline=9 * SECOND)
    shutdown = seq(made)
    made.t += 2 * SECOND
    made.done()
    made.take(ControlDone, op=plan.ops[0].op)
    told = explain(made.log, "a")
    assert ("closing", "decoding", 2.0) in held(told)
    assert f"while the engine closed from a pause: from the Shutdown at seq {shutdown}" in told.describe()


def test_a_result_that_could_not_be_used_took_the_rows(made: Recorder) -> None:
    made.admit("a", [1, 2, 3], max_tokens=12)
    made.run(2)
    made.tick()
    wrong = made.flights.popleft()
    made.take(ForwardDone, step=wrong.step, tokens=[1], digest="0" * 32)
    made.start()
    made.run()
    assert f"the result of step {wrong.step} could not be used" in explain(made.log, "a").describe()


def test_a_pause_ends_what_made_a_request_wait(made: Recorder) -> None:
    rows = made.config.rows
    for number in range(rows + 1):
        made.admit(f"r{number}", [number, 2, 3], max_tokens=9)
    last = f"r{rows}"
    made.run(3)
    made.take(Pause, mode="keep", call="p")
    made.t += SECOND
    made.take(Resume, call="r")
    made.run()
    told = explain(made.log, last)
    [full, *_] = [cause for cause in told.causes if cause.hold is None]
    assert held(told) == [("paused", "waiting", 1.0)] and full.end <= next(
        cause.hold.begin for cause in told.causes if cause.hold is not None
    )


def test_what_holds_at_the_end_of_a_log_still_holds(made: Recorder) -> None:
    made.admit("a", [1, 2, 3], max_tokens=12)
    made.run(2)
    made.take(Pause, mode="keep", call="p")
    made.t += 7 * SECOND
    made.admit("b", [1, 2, 3])
    told = explain(made.log, "a")
    assert held(told) == [("paused", "decoding", 7.0)] and f"to seq {seq(made)}, and on." in told.describe()
    line = one(made)
    assert line.ended is None and line.seconds("held") == pytest.approx(7.0, abs=0.001)


def test_a_world_looks_back_for_the_call_that_held_who_comes(made: Recorder) -> None:
    made.admit("z", [1, 2, 3])
    made.run()
    made.take(Pause, mode="keep", call="p")
    pause = seq(made)
    made.take(FlushCache, call="f")
    made.admit("a", [1, 2, 3])
    came = seq(made)
    made.t += SECOND
    made.take(Resume, call="r")
    made.run()
    world = World.read(made.log)
    told = [world.explain(life) for life in world.overview.lives.all]
    assert [held(one) for one in told] == [[], [("paused", "waiting", 1.0)]]
    assert f"from the Pause (keep) at seq {pause}, before it came, to the Resume" in told[1].describe()
    assert held(world.explain(world.overview.lives.all[1], came)) == [("paused", "waiting", 0.0)]


def test_where_the_beginning_is_not_seen_it_is_said_to_be_before(made: Recorder) -> None:
    made.take(Pause, mode="keep", call="p")
    for _ in range(MOST_CALLS):
        made.take(FlushCache, call="f")
    made.admit("a", [1, 2, 3])
    came = seq(made)
    made.take(Abort, rid="a")
    made.admit("a", [1, 2, 3])
    made.t += SECOND
    made.take(Resume, call="r")
    made.run()
    world = World.read(made.log)
    first, second = [world.explain(life) for life in world.overview.lives.all]
    assert f"from before seq {came}, before it came, to its own end at seq {came + 1}." in first.describe()
    assert held(second) == [("paused", "waiting", 1.0)] and f"from before seq {came + 2}," in second.describe()
    assert [explain(made.log, "a").sentences()[0][:8]] == ["2 times,"]


def test_holds_are_plain_data(made: Recorder) -> None:
    made.take(Pause, mode="keep", call="p")
    made.admit("a", [1, 2, 3])
    made.t += SECOND
    made.take(Resume, call="r")
    made.run()
    for found in (explain(made.log, "a").as_dict(), one(made).as_dict()):
        assert json.loads(json.dumps(found)) == found
    [cause] = explain(made.log, "a").as_dict()["causes"]
    assert (cause["kind"], cause["held"], cause["first_seq"], cause["last_seq"]) == ("gate", "paused", 3, 4)
    assert one(made).as_dict()["held"][0]["kind"] == "paused"


MOVES: dict[str, Any] = {
    "keep": lambda made: made.take(Pause, mode="keep", call="p"),
    "wait": lambda made: made.take(Pause, mode="wait", call="p"),
    "resume": lambda made: made.take(Resume, call="r"),
    "sleep": lambda made: made.take(Sleep, tags=BOTH, call="s"),
    "doze": lambda made: made.take(Sleep, tags=("weights",), call="s"),
    "wake": lambda made: made.take(Wake, tags=BOTH, call="w"),
    "lost": lambda made: (made.take(ExecutorLost, error="x"), made.flights.clear()),
    "start": lambda made: made.start(),
    "steps": lambda made: steps(made, 3),
    "tick": lambda made: made.tick(),
}


def steps(made: Recorder, count: int) -> None:
    """So many plans and their results, operations included."""
    for _ in range(count):
        while len(made.flights) <= made.config.pipeline_depth and made.tick() is not None:
            pass
        if not made.flights:
            return
        plan = made.flights[0]
        made.done()
        for op in plan.ops:
            made.take(ControlDone, op=op.op)


@given(st.lists(st.tuples(st.sampled_from([*MOVES, "admit"]), st.integers(0, 50)), max_size=25), st.integers(0, 1))
def test_while_it_is_held_nothing_happens_to_a_request_and_times_add_up(
    moves: list[tuple[str, int]], depth: int
) -> None:
    made = Recorder(EventLog.memory(), replace(CONFIG, pipeline_depth=depth))
    rids = []
    for move, wait in moves:
        if move == "admit":
            rids.append(f"r{len(rids)}")
            made.admit(rids[-1], [1, 2, 3])
        else:
            MOVES[move](made)
        made.t += wait
    for rid in rids:
        found = explain(made.log, rid)
        moments = life(made.log, rid)
        [line] = timelines(made.log, rid)
        end = line.ended if line.ended is not None else made.log.last_t
        assert sum(span.end - span.begin for span in line.spans) == end - line.arrived
        assert all(a.end == b.begin for a, b in zip(line.spans, line.spans[1:], strict=False))
        holds = [cause.hold for cause in found.causes if cause.hold is not None]
        assert holds == line.holds
        for hold in holds:
            assert line.arrived <= hold.begin <= hold.end <= end
            inside = [moment for moment in moments if hold.first_seq < moment.seq < hold.last_seq]
            assert not {moment.what for moment in inside} & {"tokens", "join", "decode"}
        for text in {hold.text for hold in holds}:
            times = [(hold.begin, hold.end) for hold in holds if hold.text == text]
            assert all(a[1] <= b[0] for a, b in zip(times, times[1:], strict=False))


def test_a_log_without_requests_says_so() -> None:
    assert Named([], []).others() == "it holds no request"
    assert Named([], ["a", "b"]).others() == "it holds 'a', 'b'"
