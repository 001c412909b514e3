"""What if: a log's own requests under the same and under other settings."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from leftfold.commands.replay_whatif import described, warnings
from leftfold.events import Abort, Admit, EventLog, Retention, SamplingParams, prune
from leftfold.executor.cost import CostModel
from leftfold.fsm import Config
from leftfold.replay.errors import NotStarted, SettingsError
from leftfold.replay.simulating import simulate
from leftfold.replay.simulating.fit import fit, samples_of
from leftfold.replay.simulating.jobs import drawn_prompt, job
from leftfold.replay.simulating.whatif import recording, what_if
from leftfold.replay.snapshots import whole
from leftfold.replay.timeline import timelines
from tests.logs import CONFIG, Recorder
from tests.unit.test_log_snapshots import log_with_snapshots

COST = CostModel({"step": 1000.0, "row": 100.0, "token": 10.0}, "made up")
LIMITS = Config(num_pages=60, page_size=4, max_running=4, max_batch_tokens=16, max_model_len=96)


def captured(config: Config = LIMITS) -> EventLog:
    log = EventLog.memory()
    jobs = [job(f"r{n}", n * 2000, partial(drawn_prompt, 0, n, 10 + n), 10 + n, 5 + n % 7) for n in range(40)]
    simulate(jobs, config, COST, keep=(log.append,))
    return log


def test_the_same_settings_give_what_was_recorded() -> None:
    log = captured()
    table = what_if(recording(log), COST, {})
    assert table["recorded"] == table["simulated"] == table["changed"]
    assert table["recorded"]["requests"] == 40 and table["recorded"]["preemptions"] >= 0


def test_a_model_fitted_to_the_log_comes_close() -> None:
    log = captured()
    table = what_if(recording(log), fit(samples_of(log), "the log"), {})
    for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
        assert table["simulated"][name]["mean"] == pytest.approx(table["recorded"][name]["mean"], rel=0.02)


def test_other_settings_change_what_they_should() -> None:
    table = what_if(recording(captured()), COST, {"max_running": 16, "max_batch_tokens": 64})
    assert table["changed"]["ttft_ms"]["mean"] < table["recorded"]["ttft_ms"]["mean"]
    assert table["changed"]["output_tokens"] == table["recorded"]["output_tokens"]


def test_what_was_simulated_is_what_the_engine_would_have_done() -> None:
    changed = what_if(recording(captured()), COST, {"max_running": 2})["changed"]
    really = recording(captured(replace(LIMITS, max_running=2))).figures.as_dict()
    assert changed == really


def test_settings_that_cannot_be() -> None:
    with pytest.raises(SettingsError, match="page_size"):
        what_if(recording(captured()), COST, {"page_size": 0})


def told(settings: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The table and its lines, as the command prints them."""
    table = what_if(recording(captured()), COST, settings)
    found = {**table, "warnings": warnings(table), "settings": settings, "left_out": {}, "cost": COST.as_dict()}
    return found, described(found).splitlines()


@pytest.mark.parametrize("settings", [{"num_pages": 2, "max_model_len": 8}, {"max_model_len": 24}])
def test_a_table_says_how_many_were_refused_and_warns(settings: dict[str, Any]) -> None:
    found, lines = told(settings)
    ended = found["changed"]["ended"]
    assert ended["error"] > 0
    answered = sum(count for reason, count in ended.items() if reason != "error")
    rows = {line.split("  ")[0]: line.split()[-3:] for line in lines}
    assert rows["answered"] == ["40", "40", str(answered)]
    assert rows["ended with error"] == ["0", "0", str(ended["error"])]
    [warning] = found["warnings"]
    assert warning.startswith(f"{ended['error']} of 40 end with error (as recorded: 0)")
    assert f"warning: {warning}" in lines


def test_a_queue_that_is_full_is_warned_of() -> None:
    found, lines = told({"max_queued_requests": 1, "max_running": 1})
    assert found["changed"]["ended"]["error"] > 0 and any(line.startswith("warning: ") for line in lines)


def test_answers_that_are_cut_short_are_warned_of() -> None:
    found, _ = told({"max_model_len": 52})
    changed = found["changed"]
    assert changed["ended"] == {"length": 40} and changed["output_tokens"] < found["simulated"]["output_tokens"]
    tokens = [changed["output_tokens"], found["simulated"]["output_tokens"]]
    assert found["warnings"] == ["answers are cut short: {} output tokens instead of {}".format(*tokens)]


def test_what_was_refused_as_recorded_and_what_gets_better_is_no_warning() -> None:
    found, lines = told({"max_running": 16})
    assert found["warnings"] == [] and not any("warning" in line for line in lines)
    story = Story()
    story.made.take(Admit, rid="wrong", prompt=[], params=SamplingParams())
    story.made.admit("a", [1, 2, 3])
    story.made.run(2)
    table = what_if(story.recorded(), COST, {})
    assert table["recorded"]["ended"] == {"error": 1, "live": 1} and warnings(table) == []
    shown = described({**table, "warnings": [], "settings": {}, "left_out": {}, "cost": COST.as_dict()}).splitlines()
    rows = {line.split("  ")[0]: line.split()[-3:] for line in shown}
    assert rows["ended with error"] == ["1", "1", "1"] and rows["still live"] == ["1", "0", "0"]


class Story:
    def __init__(self) -> None:
        self.made = Recorder(EventLog.memory(), CONFIG)

    def recorded(self) -> Any:
        return recording(self.made.log)


def test_answers_end_where_they_ended() -> None:
    story = Story()
    made = story.made
    stops = SamplingParams(max_tokens=20, stop_token_ids=(14,))
    made.take(Admit, rid="a", prompt=[1, 2, 3], params=stops)
    made.run()
    recorded = story.recorded()
    length = recorded.figures.services[0].tokens
    assert 0 < length < 20
    assert what_if(recorded, COST, {})["changed"]["output_tokens"] == length


def test_a_client_that_left_early_leaves_again_and_one_that_left_late_is_cut() -> None:
    story = Story()
    made = story.made
    made.admit("late", [1, 2, 3], max_tokens=20)
    made.run(4)
    made.take(Abort, rid="late")
    made.admit("early", [1, 2, 3], max_tokens=20)
    made.take(Abort, rid="early")
    made.run()
    recorded = story.recorded()
    early = next(one for one in recorded.jobs if one.rid.endswith("early"))
    late = next(one for one in recorded.jobs if one.rid.endswith("late"))
    assert early.abort_after == 10 and late.abort_after is None and late.output_tokens == 4
    assert what_if(recorded, COST, {})["simulated"]["ended"] == {"abort": 1, "length": 1}


def test_choices_of_unequal_length_stay_so() -> None:
    story = Story()
    made = story.made
    made.take(Admit, rid="a", prompt=[1, 2, 3], params=SamplingParams(max_tokens=6, n=2))
    made.run(3)
    made.take(Abort, rid="a", choice=1)
    made.run()
    recorded = story.recorded()
    tokens = [service.tokens for service in recorded.figures.services]
    assert tokens[0] != tokens[1]
    changed = what_if(recorded, COST, {})["changed"]
    assert changed["output_tokens"] == sum(tokens)


@pytest.mark.parametrize(("fields", "params"), [
    ({"prompt": []}, {}), ({}, {"n": 0}), ({}, {"n": "2"}), ({}, {"n": 10**9}), ({}, {"max_tokens": "x"}),
])  # fmt: skip
def test_who_was_refused_is_refused_again(fields: dict[str, Any], params: dict[str, Any]) -> None:
    story = Story()
    story.made.take(Admit, **{"rid": "wrong", "prompt": [1, 2], "params": SamplingParams(**params), **fields})
    story.made.admit("a", [1, 2, 3])
    story.made.run()
    table = what_if(story.recorded(), COST, {})
    assert [found["ended"] for found in table.values()] == [{"error": 1, "length": 1}] * 3
    assert [line.reason for line in timelines(story.made.log, "wrong")] == ["error"]


def test_an_id_that_comes_again_while_it_lives_is_one_request() -> None:
    story = Story()
    story.made.admit("a", [1, 2, 3])
    story.made.run(2)
    story.made.admit("a", [4, 5])
    story.made.run()
    story.made.admit("a", [4, 5])
    story.made.run()
    recorded = story.recorded()
    assert [(one.rid, one.prompt_tokens) for one in recorded.jobs] == [("0:a", 3), ("1:a", 2)]
    assert what_if(recorded, COST, {})["simulated"]["ended"] == {"length": 2}


def test_deadlines_hold_in_virtual_time() -> None:
    story = Story()
    made = story.made
    made.take(Admit, rid="slow", prompt=[1, 2, 3], params=SamplingParams(max_tokens=20), deadline=6000)
    made.run()
    made.take(Admit, rid="stuck", prompt=[1, 2, 3], params=SamplingParams(max_tokens=20), queue_deadline=100)
    made.run()
    recorded = story.recorded()
    assert recorded.figures.as_dict()["ended"] == {"length": 2}
    found = simulate(recorded.jobs, recorded.config, COST, tape=recorded.tape).meter.services
    slow = found["0:slow", 0, 0]
    assert (slow.reason, slow.ended - slow.arrived) == ("deadline", 6000) and 0 < slow.tokens < 20
    assert found["1:stuck", 0, 0].reason == "deadline", "a step ran when it came, and longer than it would wait"


def test_what_lived_before_a_log_begins_is_no_part_of_the_workload(tmp_path: Path) -> None:
    log_with_snapshots(tmp_path, every=3)
    assert prune(tmp_path, Retention(size=0), 4e9)
    log = EventLog.read(tmp_path)
    begun = {key[0] for key in whole(log)[0].state.live}  # type: ignore[union-attr]
    assert begun and not begun & {job.rid.partition(":")[2] for job in recording(log).jobs}


def test_an_empty_log_is_no_workload() -> None:
    with pytest.raises(NotStarted, match="holds no Started"):
        recording(EventLog.memory())


def test_what_is_not_taken_over_is_counted() -> None:
    from leftfold.events import FlushCache

    story = Story()
    story.made.take(FlushCache, call="x")
    story.made.admit("a", [1, 2])
    story.made.run(2)
    assert story.recorded().left_out == {"FlushCache": 1, "unfinished requests": 1}
