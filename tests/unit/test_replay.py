"""Fold, verify and show: recorded plans fold without a planner, deciding anew finds the first difference."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import leftfold.fsm
import leftfold.fsm.planner
import leftfold.fsm.reducer
import leftfold.replay.verify
from leftfold.events import (
    Admit,
    Event,
    EventLog,
    FlushCache,
    ForwardDone,
    Pause,
    Reconfigure,
    Record,
    Resume,
    Retention,
    SamplingParams,
    Sleep,
    Started,
    Tick,
    Wake,
    prune,
)
from leftfold.fsm import Phase, State
from leftfold.replay.checkout import Checkout, CheckoutError
from leftfold.replay.compare import plan_dict
from leftfold.replay.errors import NotStarted, ReducerFault, SettingsError
from leftfold.replay.fold import fold
from leftfold.replay.show import describe_snapshot, life, snapshot
from leftfold.replay.snapshots import whole
from leftfold.replay.verify import verify
from tests.checkouts import checkout, dead
from tests.logs import CONFIG, Recorder, record
from tests.unit.test_log_snapshots import NOW, log_with_snapshots


@pytest.fixture
def log() -> EventLog:
    made = EventLog.memory()
    record(made)
    return made


def replaced(log: EventLog, seq: int, **fields: Any) -> Iterator[Record]:
    """The log with one record's fields exchanged."""
    for number, event in log:
        yield Record(number, dataclasses.replace(event, **fields) if number == seq else event)


def events(log: EventLog, kind: type[Event]) -> list[tuple[int, Any]]:
    return [(seq, event) for seq, event in log if isinstance(event, kind)]


def test_folding_gives_the_state_that_was_live() -> None:
    log = EventLog.memory()
    live = record(log)
    folded = fold(log)
    assert folded.state is not None and folded.state.digest() == live.digest()
    assert folded.seq == len(log) and folded.t == log.last_t
    folded.state.check()


def test_recorded_plans_fold_with_no_planner_at_all(log: EventLog, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = fold(log).state

    def refuse(*_: Any) -> Any:
        raise AssertionError("nothing may be decided")

    for module in (leftfold.fsm.planner, leftfold.fsm.reducer, leftfold.fsm, leftfold.replay.verify):
        monkeypatch.setattr(module, "decide", refuse)
    state = fold(log).state
    assert state is not None and expected is not None and state.digest() == expected.digest()


def test_folding_stops_where_it_is_told(log: EventLog) -> None:
    folded = fold(log, at=3)
    assert folded.seq == 3 and folded.state is not None
    assert list(folded.state.requests) == ["a", "b"]


def test_a_log_that_does_not_start_with_started_cannot_be_folded() -> None:
    with pytest.raises(NotStarted, match="seq 1 is a Admit"):
        fold([Record(1, Admit(t=0, rid="a", prompt=[1]))])
    with pytest.raises(NotStarted, match="no Started"):
        fold([])
    with pytest.raises(NotStarted, match="carries no config"):
        fold([Record(1, Started(t=0))])
    with pytest.raises(NotStarted, match="page_size 0"):
        fold([Record(1, Started(t=0, config={**CONFIG.as_dict(), "page_size": 0}))])
    with pytest.raises(NotStarted, match="laws 99"):
        fold([Record(1, Started(t=0, config=CONFIG.as_dict(), laws=99))])


def test_a_plan_that_cannot_be_applied_names_its_record(log: EventLog) -> None:
    seq, tick = next((seq, event) for seq, event in events(log, Tick) if event.plan.step == 2)
    wrong = dataclasses.replace(tick.plan, preempt=(2,))
    with pytest.raises(ReducerFault, match=f"Tick at seq {seq}") as fault:
        fold(replaced(log, seq, plan=wrong))
    assert fault.value.seq == seq


def test_a_clean_log_has_no_divergence(log: EventLog) -> None:
    verdict = verify(log)
    assert verdict.clean and verdict.divergence is None
    assert verdict.events == len(log)
    assert verdict.steps == len([event for _, event in events(log, Tick) if event.plan.step is not None])
    assert 0 < verdict.tokens <= sum(len(event.tokens) for _, event in events(log, ForwardDone))
    assert verdict.describe().endswith("no divergence")
    assert verdict.as_dict()["divergence"] is None


def test_the_first_plan_that_differs_is_named_with_both_plans(log: EventLog) -> None:
    verdict = verify(log, {"max_batch_tokens": 4})
    divergence = verdict.divergence
    assert divergence is not None and not verdict.clean
    first, tick = events(log, Tick)[0]
    assert (divergence.seq, divergence.field) == (first, "chunks")
    assert divergence.expected_plan is not None and divergence.got_plan is not None
    assert divergence.expected == [list(chunk) for chunk in tick.plan.chunks] == [[0, 8, False]]
    assert divergence.got == divergence.got_plan["chunks"] == [[0, 4, False]]
    told = verdict.describe().splitlines()
    assert f"seq {first}" in told[1]
    (chunks,) = [line.split() for line in told if " chunks " in line and line.lstrip().startswith("*")]
    assert chunks == ["*", "chunks", "[[0,8,false]]", "[[0,4,false]]"]
    (join,) = [line for line in told if " join " in line]
    assert not join.lstrip().startswith("*") and join.count('"a"') == 2  # the same on both sides


def test_another_checkouts_planner_is_asked(log: EventLog) -> None:
    with Checkout(Path(leftfold.fsm.__file__).resolve().parents[1]) as same:
        assert verify(log, other=same).clean


def test_another_checkouts_other_decision_is_the_divergence(log: EventLog, tmp_path: Path) -> None:
    seq, tick = next((seq, event) for seq, event in events(log, Tick) if event.plan.step == 2)
    path = checkout(tmp_path, "return replace(plan, memo={'x': 1}) if plan and plan.step == 2 else plan")
    with Checkout(path) as other:
        divergence = verify(log, other=other).divergence
    assert divergence is not None
    assert (divergence.seq, divergence.field, divergence.expected, divergence.got) == (seq, "memo", None, {"x": 1})
    assert divergence.got_plan == {**plan_dict(tick.plan), "memo": {"x": 1}}


def test_another_checkouts_planner_that_raises_is_the_divergence(log: EventLog, tmp_path: Path) -> None:
    seq, _ = next((seq, event) for seq, event in events(log, Tick) if event.plan.step == 2)
    path = checkout(tmp_path, "if plan and plan.step == 2: raise KeyError('planted')\nreturn plan")
    with Checkout(path) as other:
        verdict = verify(log, other=other)
    divergence = verdict.divergence
    assert divergence is not None and verdict.events == len(log)
    assert (divergence.seq, divergence.field, divergence.got) == (seq, "plan", "KeyError: 'planted'")
    assert "  got      KeyError: 'planted'" in verdict.describe().splitlines()


def test_a_checkout_that_dies_says_its_last_words(log: EventLog, tmp_path: Path) -> None:
    mute = checkout(tmp_path / "mute", "os._exit(3)")
    with Checkout(mute) as other, pytest.raises(CheckoutError, match=f"at {re.escape(str(mute))} is gone: exit code 3"):
        verify(log, other=other)
    old = dead(tmp_path / "old", "raise ImportError('made for another Python')")
    with Checkout(old) as other:
        other._process.wait(60)
        with pytest.raises(CheckoutError, match="is gone: ImportError: made for another Python"):
            other.decide(5)
    with Checkout(old) as other:
        other._process.wait(60)
        with pytest.raises(CheckoutError, match="is gone: ImportError: made for another Python"):
            for _ in range(10_000):  # what is told first waits in a buffer
                other.take(Started(t=0, config=CONFIG.as_dict()))


def test_what_is_no_checkout_cannot_be_asked(tmp_path: Path) -> None:
    with pytest.raises(CheckoutError, match=re.escape(f"{tmp_path} is no checkout")):
        Checkout(tmp_path)


def test_other_settings_diverge_where_they_first_matter_and_the_log_is_still_counted(log: EventLog) -> None:
    plain, verdict = verify(log), verify(log, {"num_pages": 7})
    assert verdict.divergence is not None
    assert verdict.divergence.seq > events(log, Tick)[2][0]
    assert (verdict.events, verdict.steps, verdict.tokens) == (plain.events, plain.steps, plain.tokens)


def test_settings_that_make_no_config_are_the_callers_error(log: EventLog) -> None:
    with pytest.raises(SettingsError, match="page_size"):
        verify(log, {"page_size": 0})


def test_settings_that_change_nothing_diverge_nowhere(log: EventLog) -> None:
    assert verify(log, {"max_queued_requests": 1000}).clean


def test_a_plan_that_would_not_be_made_is_a_divergence(log: EventLog) -> None:
    *_, (seq, event) = log
    empty = Record(seq + 1, Tick(t=event.t, plan=dataclasses.replace(events(log, Tick)[0][1].plan, step=None, join=(),
                                                                      chunks=(), memo={"x": 1})))  # fmt: skip
    divergence = verify([*log, empty]).divergence
    assert divergence is not None and (divergence.seq, divergence.field, divergence.got) == (seq + 1, "plan", None)
    told = [line.split() for line in divergence.describe().splitlines()[2:]]
    assert ["*", "step", "no", "plan"] in told and ["*", "memo", '{"x":1}'] in told


def test_a_result_that_attests_to_another_plan_is_a_divergence(log: EventLog) -> None:
    seq, event = events(log, ForwardDone)[1]
    divergence = verify(replaced(log, seq, digest="f" * 32)).divergence
    assert divergence is not None and (divergence.seq, divergence.field) == (seq, "digest")
    assert (divergence.expected, divergence.got) == ("f" * 32, event.digest)


def test_a_record_that_does_not_fold_is_a_divergence_and_the_rest_is_counted(log: EventLog) -> None:
    seq, tick = events(log, Tick)[1]
    verdict = verify(replaced(log, seq, plan=dataclasses.replace(tick.plan, chunks=(), preempt=(0, 1, 2))))
    assert verdict.divergence is not None and verdict.divergence.seq == seq
    assert verdict.events == len(log)


def test_a_failed_decision_in_the_log_is_a_divergence(log: EventLog) -> None:
    *_, (seq, event) = log
    divergence = verify([*log, Record(seq + 1, Tick(t=event.t))]).divergence
    assert divergence is not None and divergence.seq == seq + 1


def test_a_planner_that_raises_is_named(log: EventLog, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(state: State, t: int) -> Any:
        raise KeyError("planted")

    monkeypatch.setattr(leftfold.replay.verify, "decide", broken)
    verdict = verify(log)
    assert verdict.divergence is not None and "KeyError: 'planted'" in str(verdict.divergence.got)


def damaged(path: Path) -> Path:
    with EventLog.open(path) as log:
        record(log)
    segment = path / "00000001.jsonl"
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    return path


def test_a_flipped_byte_is_damage_at_its_place(tmp_path: Path) -> None:
    verdict = verify(EventLog.read(damaged(tmp_path / "log")))
    assert verdict.divergence is None and not verdict.clean
    assert verdict.damage is not None and verdict.damage["segment"] == "00000001.jsonl"
    assert 0 < verdict.events
    assert "damaged log: 00000001.jsonl, line " in verdict.describe()


@pytest.mark.filterwarnings("ignore::leftfold.events.TornTail")
def test_a_torn_tail_is_reported_and_is_no_finding(tmp_path: Path) -> None:
    with EventLog.open(tmp_path / "log") as log:
        record(log)
        events = len(log)
    segment = tmp_path / "log" / "00000001.jsonl"
    segment.write_bytes(segment.read_bytes()[:-5])
    verdict = verify(EventLog.read(tmp_path / "log"))
    assert verdict.clean and verdict.events == events - 1
    assert verdict.torn is not None and verdict.torn["segment"] == "00000001.jsonl"
    assert "torn tail: 00000001.jsonl, line " in verdict.describe()


def test_an_empty_log_is_not_clean() -> None:
    assert not verify([]).clean


def test_snapshot_shows_figures_and_live_requests(log: EventLog) -> None:
    seq, _ = events(log, ForwardDone)[2]
    folded = fold(log, seq)
    found = snapshot(folded)
    assert found["seq"] == seq and found["live"] == len(found["requests"]) == 2
    assert folded.state is not None
    for row in found["requests"]:
        assert row["phase"] == folded.state.requests[row["rid"]].phase.name
        assert (row["slot"] is None) == (row["phase"] in (Phase.WAITING.name, Phase.PREEMPTED.name))
    text = describe_snapshot(found)
    assert "2 live requests" in text and "pages_free" in text


def test_a_life_tells_everything_that_happened_to_a_request(log: EventLog) -> None:
    told = life(log, "a")
    kinds = [moment.what for moment in told]
    assert kinds[:3] == ["admit", "join", "chunk"] and kinds[-1] == "finish"
    assert {"decode", "tokens", "failed"} <= set(kinds)
    assert {"preempt", "lost", "restarted"} <= {moment.what for moment in life(log, "c")}
    tokens = [token for moment in told if moment.what == "tokens" for token in moment.detail["tokens"]]
    positions = [moment.detail["position"] for moment in told if moment.what == "tokens"]
    assert len(tokens) == told[-1].detail["completion_tokens"] == 10
    assert positions == list(range(10, 20))
    assert all(moment.line() for moment in told)


def test_a_life_shows_abort_and_refusal(log: EventLog) -> None:
    assert [moment.what for moment in life(log, "b")][-2:] == ["abort", "finish"]
    refused = life(log, "d")
    assert [moment.what for moment in refused] == ["admit", "finish"] and "empty" in refused[-1].detail["error"]
    assert life(log, "nobody") == []


def test_a_life_ends_where_it_is_told(log: EventLog) -> None:
    assert [moment.what for moment in life(log, "a", at=2)] == ["admit"]


def test_the_recorder_itself_runs_dry() -> None:
    made = Recorder(EventLog.memory())
    made.admit("a", [1, 2, 3], max_tokens=2)
    assert made.run() == 2 and made.state.requests["a"].phase is Phase.FINISHED


def test_a_later_started_without_a_config_keeps_the_limits_in_force(log: EventLog) -> None:
    *_, (seq, event) = log
    more = [Record(seq + 1, Started(t=event.t, incarnation=9)), Record(seq + 2, Admit(t=event.t, rid="z", prompt=[1]))]
    folded = fold([*log, *more])
    assert folded.state is not None and folded.state.config == CONFIG and folded.state.incarnation == 9
    assert folded.last is not None and folded.last.incarnation == 9
    assert verify([*log, *more]).clean
    assert verify([*log, *more], {"max_queued_requests": 1000}).clean


def test_a_config_that_no_machine_can_hold_is_no_crash() -> None:
    with pytest.raises(NotStarted, match="not usable"):
        fold([Record(1, Started(t=0, config={**CONFIG.as_dict(), "num_pages": 1 << 60}))])


class Story:
    """Records of several requests of one rid, made by hand."""

    def __init__(self) -> None:
        self.log = EventLog.memory()
        self.made = Recorder(self.log)

    def tell(self, rid: str = "a") -> list[Any]:
        return life(self.log, rid)


def detail(told: list[Any], what: str) -> list[dict[str, Any]]:
    return [moment.detail for moment in told if moment.what == what]


def test_a_life_keeps_two_epochs_of_one_rid_apart() -> None:
    story = Story()
    made = story.made
    made.admit("a", [1, 2, 3], max_tokens=3)
    made.run(1)
    made.take(Admit, rid="a", epoch=1, prompt=[7, 8, 9, 10], params=SamplingParams(max_tokens=5))
    made.run()
    told = story.tell()
    assert [found.get("epoch", 0) for found in detail(told, "join")] == [0, 1]
    by_epoch: dict[int, list[int]] = {0: [], 1: []}
    for found in detail(told, "decode"):
        by_epoch[found.get("epoch", 0)].append(found["start"])
    assert by_epoch == {0: [3, 4], 1: [4, 5, 6, 7]}
    assert [found.get("epoch", 0) for found in detail(told, "finish")] == [0, 1]


def test_a_life_says_which_choice_where_there_are_several() -> None:
    story = Story()
    story.made.take(Admit, rid="a", prompt=[1, 2, 3, 4, 5], params=SamplingParams(max_tokens=3, n=2))
    story.made.run()
    told = story.tell()
    assert detail(told, "admit")[0]["choices"] == 2
    for what in ("join", "decode", "tokens", "finish"):
        assert {found["choice"] for found in detail(told, what)} == {0, 1}, what
    assert "choice=1" in next(moment.line() for moment in told if moment.detail.get("choice") == 1)


def test_a_life_tells_a_failed_step_in_whatever_form_it_was_reported() -> None:
    story = Story()
    story.made.admit("a", [1, 2, 3])
    plan = story.made.tick()
    story.made.take(ForwardDone, step=plan.step, error="boom")
    assert detail(story.tell(), "failed") == [{"step": plan.step, "error": "boom"}]


def test_a_life_goes_on_where_a_log_without_its_beginning_begins(tmp_path: Path) -> None:
    log_with_snapshots(tmp_path, every=3)
    before = EventLog.read(tmp_path)
    lives = {rid: life(before, rid) for rid in "abcd"}
    prune(tmp_path, Retention(size=0), NOW)
    reader = EventLog.read(tmp_path)
    begun, _ = whole(reader)
    assert begun.state is not None
    [rid] = {seat.request.rid for seat in begun.state.running()}
    told = life(reader, rid)
    assert told == [moment for moment in lives[rid] if moment.seq > begun.seq]
    assert {"decode", "tokens"} <= {moment.what for moment in told}


def test_a_life_tells_of_deadlines() -> None:
    story = Story()
    story.made.take(Admit, rid="a", prompt=[1, 2], params=SamplingParams(max_tokens=5), deadline=25)
    for _ in range(4):
        story.made.run(1)
    assert detail(story.tell(), "end") == [{"reason": "deadline"}]
    story.made.take(Admit, rid="other", prompt=[1, 2], params=SamplingParams(max_tokens=5), deadline=25)
    story.made.admit("b", [3, 4], max_tokens=9)
    story.made.run()
    assert detail(story.tell("b"), "end") == [], "the other one's"
    assert detail(story.tell(), "finish")[0]["reason"] == "deadline"


def test_a_life_tells_of_control_calls_and_their_operations_while_it_lasts() -> None:
    story = Story()
    made = story.made
    made.take(Pause, mode="wait", call="before")
    made.take(Resume, call="before")
    made.admit("a", [1, 2, 3], max_tokens=9)
    made.run(2)
    made.operate(Sleep, call="nap", tags=("kv",))
    made.operate(Wake, call="up", tags=("kv",))
    made.run()
    made.take(FlushCache, call="after")
    told = story.tell()
    assert [(found["type"], found["call"]) for found in detail(told, "control")] == [("Sleep", "nap"), ("Wake", "up")]
    assert detail(told, "control")[0]["tags"] == ["kv"]
    assert [found["verb"] for found in detail(told, "op")] == ["sleep", "wake"]
    assert len(detail(told, "op done")) == 2 and len(detail(told, "preempt")) == 1
    assert len(detail(told, "join")) == 2 and told[-1].what == "finish"


def test_a_life_tells_of_rows_that_a_lower_limit_puts_back() -> None:
    story = Story()
    story.made.admit("b", [1, 2, 3], max_tokens=9)
    story.made.admit("a", [4, 5, 6], max_tokens=9)
    story.made.run(2)
    story.made.take(Reconfigure, call="less", set={"max_running": 1})
    assert [found["slot"] for found in detail(story.tell(), "put back")] == [1]


def test_a_snapshot_shows_control_calls_that_wait(log: EventLog) -> None:
    story = Story()
    story.made.admit("a", [1, 2, 3])
    story.made.tick()
    story.made.take(Sleep, call="nap", tags=("kv",))
    found = snapshot(fold(story.log))
    assert found["controls"] == [{"type": "Sleep", "call": "nap", "op": None}]
    assert "Sleep 'nap' waits" in describe_snapshot(found)
