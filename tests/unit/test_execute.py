"""Executing a log again, on the oracle: what is the same, what differs, and what is compared at all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from leftfold.events import EventLog, ForwardDone, Record
from leftfold.executor.oracle import OracleExecutor
from leftfold.replay.errors import NotStarted
from leftfold.replay.execute import ExecutionFailed, execute, recorded
from tests.engines import CONFIG, Listener, admit, engine, oracle
from tests.logs import Recorder


def captured() -> EventLog:
    log = EventLog.memory()
    listener = Listener(count=6)
    made = engine(listener, log=log)
    for n in range(6):
        admit(made, f"r{n}", list(range(1, 6 + n)), max_tokens=4 + n)
    made.run()
    return log


def test_an_executor_that_says_the_same() -> None:
    config, model, requests = recorded(captured())
    assert (model, len(requests)) == ("oracle", 6) and config == CONFIG
    assert execute(requests, config, oracle()) == []


def test_the_first_token_that_differs_is_named_with_both_scores() -> None:
    log = captured()
    records = list(log)
    at = [n for n, (_, event) in enumerate(records) if isinstance(event, ForwardDone) and len(event.tokens)][1]
    seq, event = records[at]
    records[at] = Record(seq, replace(event, tokens=[int(event.tokens[0]) + 1, *event.tokens[1:]]))
    config, _, requests = recorded(records)
    asked = []

    def logits(context):
        asked.append(list(context))
        return [float(token) for token in range(2000)]

    (difference,) = execute(requests, config, oracle(), logits)
    request = next(one for one in requests if one.event.rid == difference.rid)
    assert difference.recorded == difference.got + 1
    assert difference.logits == (float(difference.recorded), float(difference.got))
    assert asked == [[*request.event.prompt, *request.said[0][: difference.output]]]
    assert difference.position == len(request.event.prompt) + difference.output
    assert difference.as_dict()["logits"]["got"] == float(difference.got)


def test_requests_are_chosen_by_id() -> None:
    config, _, requests = recorded(captured(), ["r2", "r4"])
    assert [request.event.rid for request in requests] == ["r2", "r4"]
    assert execute(requests, config, oracle()) == []


def test_a_request_that_comes_again_while_it_lives_is_executed_once() -> None:
    made = Recorder(EventLog.memory())
    made.admit("a", [1, 2, 3])
    made.run(2)
    made.admit("a", [4, 5, 6])  # lives already: nobody hears of this one
    made.run()
    made.admit("a", [7, 8, 9])
    made.run()
    _, model, requests = recorded(made.log)
    assert model == "made-up" and [list(request.event.prompt) for request in requests] == [[1, 2, 3], [7, 8, 9]]
    assert [len(request.said[0]) for request in requests] == [6, 6]


def test_a_log_without_records_has_nothing_to_execute() -> None:
    with pytest.raises(NotStarted, match="holds no Started"):
        recorded(EventLog.memory())


def test_another_model_differs() -> None:
    config, _, requests = recorded(captured())
    assert len(execute(requests, config, OracleExecutor(CONFIG.num_pages, CONFIG.page_size, 777))) == 6


def test_an_executor_that_fails_says_so() -> None:
    config, _, requests = recorded(captured())

    class Failing(OracleExecutor):
        def execute(self, plan):
            self.fail_next("planted")
            return super().execute(plan)

    with pytest.raises(ExecutionFailed, match="planted"):
        execute(requests, config, Failing(CONFIG.num_pages, CONFIG.page_size, 1000))
