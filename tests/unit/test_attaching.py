"""Scores through the engine: with their outputs, each once, in order, whatever is preempted, aborted or lost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leftfold.events import Abort, Admit, EventLog, ForwardDone, SamplingParams, Sleep, Wake
from leftfold.executor.base import Attachment, Score
from leftfold.executor.oracle import expected_scores, expected_tokens
from leftfold.fsm import Config
from leftfold.replay.verify import verify
from tests.engines import CONFIG, Listener, Spied, admit, engine, oracle

ALL = {"logprobs": 2, "logprobs_from": 0}
VOCAB = 1000
NINE = tuple(range(9))


def said(prompt: Any, count: int, want: dict[str, int]) -> list[Score]:
    """The scores of a request that nothing disturbs, each once."""
    tokens = [*prompt, *expected_tokens(list(prompt), count, VOCAB)]
    first = max(1, min(want.get("logprobs_from", len(prompt)), len(prompt)))
    last = len(tokens) if "logprobs" in want else len(prompt)
    return [s for s in expected_scores(tokens, first, want.get("logprobs", 0), VOCAB) if s.position < last]


@pytest.mark.parametrize(("how", "depth"), [("sleep", 0), ("loss", 0), ("loss", 1), ("loss", 2)])
@pytest.mark.parametrize("chunks", [0, 1, 2, 3, 5])
def test_c31_prompt_scores_of_a_request_that_is_preempted(how: str, depth: int, chunks: int) -> None:
    """After so many chunks of 4 (9 tokens are 3 of them) it loses its K/V; after 0: it never does."""
    listener = Listener()
    lost: list[int] = []

    def before(plan: Any) -> None:
        if how == "sleep" and plan.step == chunks:
            made.submit(Sleep, tags=("kv",))
            made.submit(Wake, tags=("kv",))
        if how == "loss" and chunks and plan.step == chunks + 1 and not lost:
            lost.append(plan.step)
            raise RuntimeError("the device fell off the bus")

    config = replace(CONFIG, max_chunk_tokens=4, pipeline_depth=depth)
    log = EventLog.memory()
    made = engine(listener, executor=Spied(before), config=config, log=log)
    admit(made, "a", NINE, max_tokens=1 if chunks < 3 else 6, want=ALL)
    made.run()
    scores = listener.scores["a"]
    assert [score.position for score in scores if score.position < 9] == list(range(1, 9))
    assert scores == said(NINE, len(listener.tokens("a")), ALL)
    again = made.stats()["prompt_tokens"] - 9
    assert again == 4 * chunks if chunks < 3 else again > 9
    assert verify(log).clean


@pytest.mark.parametrize("want", [{"logprobs": 0}, {"logprobs_from": 3}, {"logprobs": 1, "logprobs_from": 7}, ALL])
def test_what_is_wanted_comes_and_nothing_else(want: dict[str, int]) -> None:
    listener = Listener(count=2)
    made = engine(listener, config=replace(CONFIG, max_chunk_tokens=4))
    admit(made, "a", NINE, want=want)
    admit(made, "b", (5, 5, 5))
    made.run()
    assert listener.scores == {"a": said(NINE, 6, want), "b": []}


def test_every_choice_gets_its_own() -> None:
    listener = Listener(count=3)
    made = engine(listener)
    by_choice: dict[int, list[Score]] = {}

    def tell(effects: Any) -> None:
        for attachment in effects.attachments:
            by_choice.setdefault(attachment.choice, []).extend(attachment.scores)
        listener(effects)

    made.on_effects = tell
    made.submit(Admit, rid="a", prompt=list(NINE), params=SamplingParams(max_tokens=3, n=3), want=ALL)
    made.run()
    assert by_choice == dict.fromkeys(range(3), said(NINE, 3, ALL))


def test_a_hit_in_the_prefix_cache_takes_nothing_away() -> None:
    listener = Listener(count=2)
    made = engine(listener, config=replace(CONFIG, max_running=1))
    admit(made, "a", NINE, max_tokens=2)
    admit(made, "b", NINE, max_tokens=2, want=ALL)
    made.run()
    assert listener.scores["b"] == said(NINE, 2, ALL)


def test_scores_of_drawn_tokens_come_also_after_a_hit() -> None:
    listener, hits = Listener(count=2), {"logprobs": 3}
    made = engine(listener, config=replace(CONFIG, max_running=1))
    admit(made, "a", NINE, max_tokens=2)
    admit(made, "b", NINE, max_tokens=4, want=hits)
    made.run()
    end = listener.end("b")
    assert end.usage is not None and end.usage.cached_tokens == 8
    assert listener.scores["b"] == said(NINE, 4, hits)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_an_abort_leaves_with_what_had_come_and_nothing_comes_later(depth: int) -> None:
    listener = Listener(count=2)

    def before(plan: Any) -> None:
        if plan.step == 2:
            made.submit(Abort, rid="a", reason="gone")

    made = engine(listener, executor=Spied(before), config=replace(CONFIG, max_chunk_tokens=4, pipeline_depth=depth))
    admit(made, "a", tuple(range(20)), want=ALL)
    admit(made, "b", (7, 7), want={"logprobs": 0})
    made.run()
    assert listener.scores["a"] == said(range(20), 1, ALL)[: len(listener.scores["a"])]
    assert len(listener.scores["a"]) <= 8
    assert not made._attaching


@pytest.mark.parametrize("fault", ["raises", "fails", "lies"])
def test_a_step_without_a_result_is_said_again_once(fault: str) -> None:
    listener, inner = Listener(), oracle()
    done: list[int] = []

    def before(plan: Any) -> None:
        if plan.step == 2 and not done:
            done.append(1)
            if fault == "raises":
                raise RuntimeError("lost")
            if fault == "fails":
                inner.fail_next("no")

    def after(result: Any) -> Any:
        if fault == "lies" and result.step == 2 and len(done) == 1:
            done.append(2)
            rubbish = [Attachment("a", 0, 0, [Score(3, 0, 0.0), Score(50, 0, 0.0)])]
            return result._replace(digest="f" * 32, attachments=rubbish)
        return result

    made = engine(listener, executor=Spied(before, after, inner), config=replace(CONFIG, max_chunk_tokens=4))
    admit(made, "a", NINE, want=ALL)
    made.run()
    assert done and listener.scores["a"] == said(NINE, 6, ALL)


def test_a_name_used_again_gets_nothing_of_the_earlier_request() -> None:
    listener = Listener(count=2)

    def before(plan: Any) -> None:
        if plan.step == 1:  # while the step runs that computes the first request's prompt
            made.submit(Abort, rid="a")
            admit(made, "a", (8,) * 12, max_tokens=2, want={"logprobs": 2, "logprobs_from": 6})

    made = engine(listener, executor=Spied(before))
    admit(made, "a", NINE, want=ALL)
    made.run()
    assert listener.scores["a"] == said((8,) * 12, 2, {"logprobs": 2, "logprobs_from": 6})


@pytest.mark.parametrize("fields", [{"want": ALL, "prompt": ()}, {"want": {"logprobs": 99}}, {"want": {"hidden": 1}}])
def test_a_refused_request_leaves_nothing_behind(fields: dict[str, Any]) -> None:
    listener = Listener()
    made = engine(listener)
    admit(made, "a", **fields)
    made.run()
    assert listener.end("a").finish_reason == "error" and not made._attaching


@settings(max_examples=80, deadline=None)
@given(
    pages=st.integers(8, 20), depth=st.integers(0, 2), chunk=st.integers(1, 9), cache=st.booleans(),
    requests=st.lists(st.tuples(st.integers(1, 14), st.integers(1, 10), st.integers(0, 15)), min_size=2, max_size=5),
)  # fmt: skip
def test_every_position_comes_once_whatever_the_pool_chunks_depth_and_neighbours(
    pages: int, depth: int, chunk: int, cache: bool, requests: list[tuple[int, int, int]]
) -> None:
    config = Config(
        num_pages=pages, page_size=2, max_running=4, max_batch_tokens=16, max_model_len=2 * pages, vocab_size=VOCAB,
        max_chunk_tokens=chunk, pipeline_depth=depth, prefix_cache=cache,
    )  # fmt: skip
    room = 2 * pages
    requests = [(length, min(count, room - length), first) for length, count, first in requests if length < room]
    listener = Listener(count=len(requests))
    made = engine(listener, executor=oracle(config), config=config)
    for number, (length, count, first) in enumerate(requests):
        admit(made, f"r{number}", range(length), max_tokens=count, want={"logprobs": 1, "logprobs_from": first})
    made.run()
    for number, (length, count, first) in enumerate(requests):
        want = {"logprobs": 1, "logprobs_from": first}
        assert listener.scores[f"r{number}"] == said(range(length), count, want)


@pytest.mark.parametrize("kept", [False, True])
def test_scores_are_in_the_log_only_where_that_is_asked_for(kept: bool) -> None:
    listener, log = Listener(), EventLog.memory()
    made = engine(listener, log=log, log_logprobs=kept)
    admit(made, "a", NINE, max_tokens=3, want=ALL)
    made.run()
    logged = [
        Score(position, token, logprob, tuple((other, value) for other, value in top))
        for record in log
        if isinstance(record.event, ForwardDone)
        for rid, epoch, choice, scores in record.event.scores
        for position, token, logprob, top in scores
        if (rid, epoch, choice) == ("a", 0, 0)
    ]
    assert logged == ([replace_top(score) for score in listener.scores["a"]] if kept else [])
    assert listener.scores["a"] and verify(log).clean


def replace_top(score: Score) -> Score:
    return score._replace(top=tuple((token, value) for token, value in score.top))
