"""Timeline, explanation, trace and difference of logs that are made by hand, and of simulated ones."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from leftfold.events import Abort, Admit, EventLog, ForwardDone, Pause, Plan, Record, SamplingParams, Shutdown, Tick
from leftfold.executor.cost import CostModel
from leftfold.fsm import Config
from leftfold.replay.diff import describe, diff
from leftfold.replay.explain import explain
from leftfold.replay.simulating import simulate
from leftfold.replay.simulating.jobs import drawn_prompt, job
from leftfold.replay.timeline import LEGEND, timelines
from leftfold.replay.trace import trace_events, write_trace
from tests.logs import CONFIG, Recorder, record

COST = CostModel({"step": 1000.0, "row": 100.0, "token": 10.0}, "made up")


def simulated(count: int = 12, **limits: Any) -> EventLog:
    """Requests that come at once and have to wait for pages, or for what `limits` say."""
    log = EventLog.memory()
    settings = {"num_pages": 24, "page_size": 4, "max_running": 4, "max_batch_tokens": 16, "max_model_len": 96} | limits
    jobs = [job(f"r{n}", 0, partial(drawn_prompt, 0, n, 10 + n), 10 + n, 20) for n in range(count)]
    simulate(jobs, Config(**settings), COST, keep=(log.append,))
    return log


@pytest.fixture
def log() -> EventLog:
    made = EventLog.memory()
    record(made)
    return made


# Timeline


def test_a_timeline_adds_up() -> None:
    log = simulated()
    [line] = timelines(log, "r5")
    found = line.as_dict()
    assert (found["prompt_tokens"], found["output_tokens"], found["reason"]) == (15, 20, "length")
    assert sum(found["seconds"].values()) == pytest.approx(found["e2e_ms"] / 1e3)
    assert found["seconds"]["waiting"] > 0 and found["tpot_ms"] > 0
    assert line.spans[0].kind == "waiting" and line.spans[-1].kind == "decode"
    assert all(a.end == b.begin for a, b in zip(line.spans, line.spans[1:], strict=False))
    assert len(line.bar(40)) == 40 and set(line.bar(40)) <= set(LEGEND.values())
    assert "TTFT" in line.describe() and "[" in line.describe()


def test_a_timeline_shows_preemptions(log: EventLog) -> None:
    [line] = timelines(log, "c")
    found = line.as_dict()
    assert found["preempted_at_seq"] and found["seconds"]["preempted"] > 0
    assert "preempted 1 ×" in line.describe() and "x" in line.bar()


def test_a_timeline_of_what_was_refused_or_aborted_or_never_came(log: EventLog) -> None:
    [refused] = timelines(log, "d")
    assert refused.reason == "error" and refused.first is None and "no token yet" not in refused.describe()[:40]
    [aborted] = timelines(log, "b")
    assert aborted.reason == "abort" and aborted.output_tokens > 0
    assert timelines(log, "nobody") == []


def test_choices_and_epochs_have_lines_of_their_own() -> None:
    made = Recorder(EventLog.memory())
    made.take(Admit, rid="a", prompt=[1, 2, 3], params=SamplingParams(max_tokens=3, n=2))
    made.run()
    made.take(Admit, rid="a", prompt=[4, 5], params=SamplingParams(max_tokens=2))
    made.run()
    found = [(line.choice, line.output_tokens, line.reason) for line in timelines(made.log, "a")]
    assert found == [(0, 3, "length"), (1, 3, "length"), (0, 2, "length")]


# Explanation


def test_an_explanation_counts_pages() -> None:
    told = explain(simulated(max_running=12), "r9")
    assert told.divergence is None and told.known
    kinds = {cause.kind for cause in told.causes}
    assert "order" in kinds and "pages" in kinds
    pages = next(cause for cause in told.causes if cause.kind == "pages")
    assert pages.needed > pages.available and str(pages.needed) in pages.sentence()
    assert all(cause.first_seq <= cause.last_seq and cause.begin <= cause.end for cause in told.causes)
    assert told.outcome[-1].endswith("it ended: length.")


def test_who_waits_behind_another_is_told_what_that_one_lacks() -> None:
    told = explain(simulated(max_running=12), "r11")
    order = next(cause for cause in told.causes if cause.kind == "order")
    assert "which does not fit (" in order.text and "pages are needed" in order.text


def test_an_explanation_counts_slots() -> None:
    told = explain(simulated(max_running=1, num_pages=200), "r1")
    assert [cause.kind for cause in told.causes] == ["slots"]
    assert "for a slot: 1 rows run, which is the most" in told.describe()


def test_stretches_of_one_kind_are_one_sentence() -> None:
    told = explain(simulated(max_running=12), "r11")
    assert len(told.causes) > len(told.sentences()) == len({cause.kind for cause in told.causes})


def test_a_victim_is_told_so(log: EventLog) -> None:
    told = explain(log, "c")
    victims = [cause for cause in told.causes if cause.kind == "victim"]
    seqs = [seq for seq, event in log if isinstance(event, Tick) and event.plan is not None and event.plan.preempt]
    assert [cause.last_seq for cause in victims] == seqs
    assert "had to give its pages back" in told.describe()


def test_an_explanation_ends_where_it_is_told() -> None:
    log = simulated()
    whole = explain(log, "r7")
    middle = whole.causes[1].first_seq
    part = explain(log, "r7", middle)
    assert part.seq == middle and part.phases == {"it": "WAITING"} and not part.outcome
    assert all(cause.last_seq <= middle for cause in part.causes)


def test_between_decisions_the_state_itself_is_asked() -> None:
    made = Recorder(EventLog.memory(), replace(CONFIG, max_running=1))
    made.admit("a", [1, 2, 3])
    made.run(2)
    made.admit("b", [4, 5, 6])
    told = explain(made.log, "b", len(made.log))
    assert [cause.kind for cause in told.causes] == ["slots"]
    made.tick()
    told = explain(made.log, "b", len(made.log))
    assert told.causes[-1].kind == "slots"
    made.take(Abort, rid="nobody")
    told = explain(made.log, "b", len(made.log))
    assert any("result of step" in text for text in told.outcome)


def test_between_decisions_each_is_told_its_own_reason() -> None:
    made = Recorder(EventLog.memory(), replace(CONFIG, max_running=1))
    made.admit("a", [1, 2, 3])
    made.run(2)
    made.admit("b", [4, 5, 6])
    made.admit("c", [7, 8, 9])
    for rid, kind in (("b", "slots"), ("c", "order")):
        [cause] = explain(made.log, rid, len(made.log)).causes
        assert (cause.who, cause.kind) == ((rid, 0, 0), kind)


def test_an_explanation_is_plain_data(log: EventLog) -> None:
    found = explain(log, "c", len(log)).as_dict()
    assert json.loads(json.dumps(found)) == found
    assert (found["rid"], found["seq"], found["phases"], found["divergence"]) == ("c", len(log), {}, None)
    [victim] = [cause for cause in found["causes"] if cause["kind"] == "victim"]
    assert (victim["rid"], victim["epoch"], victim["choice"]) == ("c", 0, 0)
    assert victim["sentence"].startswith(f"At seq {victim['last_seq']} ") and victim["text"] in victim["sentence"]


def test_nothing_is_known_of_anybody_in_an_empty_log() -> None:
    told = explain([], "a")
    assert (told.known, told.causes, told.phases, told.outcome) == (False, [], {}, [])


def test_a_log_that_today_would_be_otherwise_is_said_to_be(log: EventLog) -> None:
    events = [event for _, event in log]
    events.insert(2, Tick(t=events[1].t, plan=Plan(memo={"x": 1})))  # nobody decides this today
    told = explain([Record(seq, event) for seq, event in enumerate(events, 1)], "a")
    assert told.divergence == 3 and "otherwise at seq 3" in told.describe()


# Trace


PHASES = {"M", "X", "i", "C"}


def checked(events: list[dict[str, Any]]) -> None:
    """The rules of the trace event format for the phases that are used."""
    for event in events:
        assert event["ph"] in PHASES and isinstance(event["name"], str) and event["name"]
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] != "M":
            assert isinstance(event["ts"], int) and event["ts"] >= 0
        if event["ph"] == "X":
            assert isinstance(event["dur"], int) and event["dur"] >= 0
        if event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")
        if event["ph"] == "C":
            assert event["args"] and all(isinstance(value, int) for value in event["args"].values())
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in events:
        if event["ph"] == "X":
            lanes.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in lanes.values():
        ordered = sorted(spans)
        assert all(a[1] <= b[0] for a, b in zip(ordered, ordered[1:], strict=False)), "slices of a lane overlap"


@pytest.mark.parametrize("depth", [0, 1])
def test_a_trace_keeps_the_format_and_holds_every_step(depth: int) -> None:
    log = simulated(pipeline_depth=depth, num_pages=400)  # so that nobody is preempted
    file = io.BytesIO()
    count = write_trace(log, file)
    whole = json.loads(file.getvalue())
    events = whole["traceEvents"]
    assert whole["displayTimeUnit"] == "ms" and len(events) == count
    checked(events)
    steps = [event["name"] for event in events if event["ph"] == "X" and event["pid"] == 1]
    assert steps == [f"step {event.step}" for _, event in log if isinstance(event, ForwardDone)]
    slots = [event for event in events if event["ph"] == "X" and event["pid"] == 2]
    assert {event["cat"] for event in slots} == {"prefill", "decode"}
    assert sum(event["args"].get("steps", 0) for event in slots) == 12 * 19
    assert sum(event["args"].get("length", 0) for event in slots) == sum(10 + n for n in range(12))
    counters = {event["name"] for event in events if event["ph"] == "C"}
    assert counters == {"pages", "requests", "rows", "steps in flight", "log"}
    pages = [sum(event["args"].values()) for event in events if event["name"] == "pages"]
    assert set(pages) == {400}


def test_a_trace_of_failures_losses_and_restarts(log: EventLog) -> None:
    events = list(trace_events(log))
    checked(events)
    names = {event["name"] for event in events}
    assert {"Started", "ExecutorLost", "Abort b", "Admit a", "end a"} <= names
    assert any("error" in event["args"] for event in events if event["ph"] == "X" and event["pid"] == 1)


def test_a_trace_shows_steps_that_never_ended_as_open_and_not_those_that_failed_with_another() -> None:
    made = Recorder(EventLog.memory(), replace(CONFIG, pipeline_depth=1))
    made.admit("a", [1, 2, 3], max_tokens=9)
    first, second = made.tick(), made.tick()
    made.fail()
    third = made.tick()
    events = list(trace_events(made.log))
    checked(events)
    steps = {event["name"]: event["args"] for event in events if event["ph"] == "X" and event["pid"] == 1}
    assert (first.step, second.step) == (1, 2) and third.step > 2
    assert list(steps) == ["step 1", f"step {third.step}"]
    assert "planted" in steps["step 1"]["error"] and steps[f"step {third.step}"]["open"] is True


def test_a_trace_of_a_plan_that_only_ends_requests_has_no_step_for_it() -> None:
    made = Recorder(EventLog.memory())
    made.take(Pause, mode="keep", call="x")
    made.take(Admit, rid="a", prompt=[1, 2], params=SamplingParams(max_tokens=5), deadline=5)
    assert made.tick() is None and isinstance([*made.log][-1].event, Tick)
    events = list(trace_events(made.log))
    checked(events)
    assert [event["args"]["reason"] for event in events if event["name"] == "end a"] == ["deadline"]
    assert not [event for event in events if event["ph"] == "X"]


def test_counted_bytes_are_those_of_the_log(tmp_path: Any) -> None:
    with EventLog.open(tmp_path / "log") as made:
        record(made)
    last = [event for event in trace_events(EventLog.read(tmp_path / "log")) if event["name"] == "log"][-1]
    lines = (tmp_path / "log" / "00000001.jsonl").read_bytes().splitlines(keepends=True)
    assert last["args"]["bytes"] == sum(map(len, lines[1:]))


# Difference


def test_a_log_does_not_differ_from_itself(log: EventLog) -> None:
    found = diff(log, log)
    assert found["equal"] and found["digests"][0] == found["digests"][1]
    assert describe(found) == f"no difference in {len(log)} records"


def exchanged(log: EventLog, at: int, **fields: Any) -> list[Record]:
    return [Record(seq, replace(event, **fields) if seq == at else event) for seq, event in log]


def test_the_first_record_and_the_first_token_that_differ_are_named(log: EventLog) -> None:
    seq, done = next((seq, event) for seq, event in log if isinstance(event, ForwardDone) and len(event.tokens))
    found = diff(log, exchanged(log, seq, tokens=[int(token) + 1 for token in done.tokens]))
    assert not found["equal"] and found["record"]["seq"] == seq and found["record"]["fields"] == ["tokens"]
    assert {one["token"] for one in found["requests"]} == {0}
    assert f"the first difference is at seq {seq}, in tokens" in describe(found)


def test_times_matter_only_when_asked(log: EventLog) -> None:
    other = [Record(seq, replace(event, t=event.t + 5)) for seq, event in log]
    assert diff(log, other)["equal"]
    assert diff(log, other, times=True)["record"]["fields"] == ["t"]


def test_equal_records_at_other_times_may_lead_to_other_states() -> None:
    """An engine that is to stop by some time stops with the first decision after it."""
    made = Recorder(EventLog.memory())
    made.admit("a", [1, 2, 3], max_tokens=9)
    made.take(Shutdown, call="x", deadline=1000)
    made.tick()
    found = diff(made.log, exchanged(made.log, len(made.log), t=made.t + 1000))
    assert found["record"] is None and not found["equal"] and found["state"]["gate"] == ["closing", "stopped"]
    told = describe(found).splitlines()
    assert "state: gate is 'closing' and 'stopped'" in told and not any("first difference" in line for line in told)


def test_what_only_one_log_has_is_named(log: EventLog) -> None:
    shorter = [record for record in log if record.seq < len(log) - 1]
    found = diff(log, shorter)
    assert found["record"]["b"] is None and found["records"] == [len(log), len(log) - 2]
    other = EventLog.memory()
    Recorder(other).admit("z", [1])
    found = diff(log, other)
    names = {(one["rid"], one.get("only")) for one in found["requests"]}
    assert ("a", "a") in names and "request a: only in a" in describe(found).splitlines()


def test_an_answer_that_ended_otherwise_is_told_so() -> None:
    logs = [EventLog.memory(), EventLog.memory()]
    for log, reason in zip(logs, ("gone", "stop_string"), strict=True):
        made = Recorder(log)
        made.take(Admit, rid="a", prompt=[1, 2, 3], params=SamplingParams(max_tokens=9, n=2))
        made.run(3)
        made.take(Abort, rid="a", choice=1, reason=reason)
    found = diff(*logs)
    [one] = found["requests"]
    assert (one["choice"], one["token"], one["reasons"]) == (1, None, ["abort", "stop"])
    assert "request a choice 1: ended with 'abort' and 'stop'" in describe(found).splitlines()


def test_states_are_compared_after_the_record_asked_for(log: EventLog) -> None:
    seq, _ = next((seq, event) for seq, event in log if isinstance(event, ForwardDone))
    assert diff(log, log, at=seq)["records"] == [seq, seq]
