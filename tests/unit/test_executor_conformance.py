"""One contract for every executor: what a stream of plans does, whatever the model behind it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from leftfold.events import Copy, Move, SamplingParams
from leftfold.events.digest import START
from leftfold.executor.base import Executor, Result
from leftfold.executor.oracle import OracleExecutor, expected_tokens
from leftfold.executor.sim import SimExecutor
from tests.plan_stream import Driver, PlanStream, generate, joined

PAGES, PAGE, VOCAB = 24, 4, 199
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


def torch_executor(folder: Path) -> Executor:
    from leftfold.executor.torch_executor import TorchExecutor
    from tests.tiny_models import make

    if not (folder / "config.json").exists():
        make("llama", folder)
    return TorchExecutor(folder, num_pages=PAGES, page_size=PAGE, max_model_len=96, max_running=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(params=["oracle", "sim", "torch"])
def executor(request: pytest.FixtureRequest, folder: Path) -> Executor:
    if request.param == "sim":
        return SimExecutor(PAGES, PAGE, vocab_size=VOCAB)
    return OracleExecutor(PAGES, PAGE, VOCAB) if request.param == "oracle" else torch_executor(folder)


def alone(executor: Executor, prompt: list[int], count: int) -> list[int]:
    """What the prompt gives when nothing else runs, all of it in one chunk."""
    tokens = generate(executor, prompt, count, num_pages=PAGES, page_size=PAGE)
    executor.reset()
    return tokens


def ok(result: Result) -> list[int]:
    assert result.error is None, result.error
    assert result.tokens.dtype == np.int32
    return result.tokens.tolist()


def test_the_oracle_says_what_is_expected() -> None:
    oracle = OracleExecutor(PAGES, PAGE, VOCAB)
    assert alone(oracle, PROMPT, 20) == expected_tokens(PROMPT, 20, VOCAB)
    assert len(set(expected_tokens(PROMPT, 200, VOCAB))) > 80


def test_an_empty_prompt_position_and_order_change_what_the_oracle_says() -> None:
    assert expected_tokens([1, 2], 8, 1000) != expected_tokens([2, 1], 8, 1000)
    assert expected_tokens([1, 1], 8, 1000) != expected_tokens([1, 1, 1], 8, 1000)


def test_a_chunk_then_decode_rows_then_end(executor: Executor) -> None:
    expected, stream = alone(executor, PROMPT, 3), PlanStream()
    first = stream.plan(joined=[joined(2, PROMPT, [7, 3, 11])], chunks=[(2, 9, True)], chunk_tokens=[PROMPT])
    got = [ok(executor.execute(first)), ok(executor.execute(stream.plan())), ok(executor.execute(stream.plan()))]
    assert [token for tokens in got for token in tokens] == expected
    assert ok(executor.execute(stream.plan(ended=[2]))) == []


def test_a_chunk_without_sample_gives_no_token_and_length_zero_leaves_a_row_out(executor: Executor) -> None:
    expected, stream = alone(executor, PROMPT, 2), PlanStream()
    rows = [joined(0, PROMPT, [0, 1, 2]), joined(1, [8, 8], [3])]
    plan = stream.plan(joined=rows, chunks=[(0, 5, False), (1, 2, True)], chunk_tokens=[PROMPT[:5], [8, 8]])
    assert len(ok(executor.execute(plan))) == 1
    plan = stream.plan(chunks=[(1, 0, False), (0, 4, True)], chunk_tokens=[[], PROMPT[5:]])
    assert ok(executor.execute(plan)) == expected[:1]
    plan = stream.plan(chunks=[(1, 0, False)], chunk_tokens=[[]])
    assert ok(executor.execute(plan)) == expected[1:]


def test_tokens_come_in_join_order_then_chunk_order(executor: Executor) -> None:
    prompts = {4: [1, 2, 3], 0: [9, 8], 2: [5, 5, 5, 5, 5], 1: [7]}
    first = {slot: alone(executor, prompt, 2) for slot, prompt in prompts.items()}
    stream = PlanStream()
    rows = [joined(4, prompts[4], [0]), joined(0, prompts[0], [1])]
    plan = stream.plan(joined=rows, chunks=[(4, 3, True), (0, 2, True)], chunk_tokens=[prompts[4], prompts[0]])
    assert ok(executor.execute(plan)) == [first[4][0], first[0][0]]
    rows = [joined(2, prompts[2], [2, 4]), joined(1, prompts[1], [3])]
    # Slot 1 needs no chunk: one token to compute is what a decode row computes, and it joined last.
    plan = stream.plan(joined=rows, chunks=[(2, 5, True)], chunk_tokens=[prompts[2]], grow=([4, 0], [5, 6]))
    assert ok(executor.execute(plan)) == [first[4][1], first[0][1], first[1][0], first[2][0]]


def test_rows_grow_across_pages_and_keep_their_context(executor: Executor) -> None:
    expected = alone(executor, [6], 30)
    assert generate(executor, [6], 30, num_pages=PAGES, page_size=PAGE) == expected
    assert generate(executor, [6] + expected[:17], 13, num_pages=PAGES, page_size=PAGE, chunk=5) == expected[17:]


def test_a_row_that_starts_after_cached_pages_reads_them(executor: Executor) -> None:
    expected, stream = alone(executor, PROMPT, 2), PlanStream()
    plan = stream.plan(joined=[joined(0, PROMPT, [9, 8, 7])], chunks=[(0, 9, True)], chunk_tokens=[PROMPT])
    ok(executor.execute(plan))
    plan = stream.plan(ended=[0], joined=[joined(1, PROMPT, [9, 8, 5], start=8)], chunks=[], chunk_tokens=[])
    assert ok(executor.execute(plan)) == expected[:1]
    assert ok(executor.execute(stream.plan())) == expected[1:]


def test_preempted_rows_join_again_with_all_their_tokens(executor: Executor) -> None:
    prompts = [PROMPT, [2, 7], [1] * 6]
    expected = [alone(executor, prompt, 12) for prompt in prompts]
    driver = Driver(executor, PAGES, PAGE, chunk=4)
    rows = [driver.add(slot, prompt, 12) for slot, prompt in enumerate(prompts)]
    for count in range(9):
        ok(driver.step())
        if count in (1, 4, 6):
            driver.preempt(rows[count % 3])
    driver.run()
    assert [row.tokens[row.prompt_len :] for row in rows] == expected


def test_a_slot_is_free_for_another_row_in_the_plan_that_ends_it(executor: Executor) -> None:
    expected, stream = alone(executor, [5, 5], 1), PlanStream()
    ok(executor.execute(stream.plan(joined=[joined(3, [1, 2], [0])], chunks=[(3, 2, True)], chunk_tokens=[[1, 2]])))
    plan = stream.plan(ended=[3], joined=[joined(3, [5, 5], [0])], chunks=[(3, 2, True)], chunk_tokens=[[5, 5]])
    assert ok(executor.execute(plan)) == expected


def test_a_failed_step_keeps_its_deltas_and_advances_no_row(executor: Executor) -> None:
    expected, stream = alone(executor, PROMPT, 3), PlanStream()
    executor.fail_next("the device fell over", rows=(0,))
    rows = [joined(0, PROMPT, [0, 1, 2]), joined(1, [4], [3])]
    plan = stream.plan(joined=rows, chunks=[(0, 9, True)], chunk_tokens=[PROMPT])
    result = executor.execute(plan)
    assert result.error == {"text": "the device fell over", "retry": True, "rows": (0,)}
    assert (result.step, len(result.tokens), result.digest) == (plan.step, 0, plan.digest)
    stream.failed()
    again = stream.plan(ended=[1], chunks=[(0, 9, True)], chunk_tokens=[PROMPT])
    assert ok(executor.execute(again)) == expected[:1]
    executor.fail_next("once more")
    assert executor.execute(stream.plan()).error is not None
    stream.failed()
    assert ok(executor.execute(stream.plan())) == expected[1:2]
    assert ok(executor.execute(stream.plan())) == expected[2:]


def test_a_failed_step_still_grows(executor: Executor) -> None:
    expected, stream = alone(executor, [1, 2, 3, 4], 2), PlanStream()
    prompt = [1, 2, 3, 4]
    plan = stream.plan(joined=[joined(0, prompt, [5])], chunks=[(0, 4, True)], chunk_tokens=[prompt])
    assert ok(executor.execute(plan)) == expected[:1]
    executor.fail_next("no")
    assert executor.execute(stream.plan(grow=([0], [2]))).error is not None
    stream.failed()
    assert ok(executor.execute(stream.plan())) == expected[1:]


def test_steps_planned_before_a_failure_was_known_are_void_but_their_deltas_hold(executor: Executor) -> None:
    expected, other, stream = alone(executor, PROMPT, 3), alone(executor, [4, 5], 1), PlanStream()
    join = stream.plan(joined=[joined(0, PROMPT, [0, 1, 2])], chunks=[(0, 9, True)], chunk_tokens=[PROMPT])
    assert ok(executor.execute(join)) == expected[:1]
    executor.fail_next("no")
    assert executor.execute(stream.plan()).error is not None
    late = stream.plan(joined=[joined(1, [4, 5], [3])], chunks=[(1, 2, True)], chunk_tokens=[[4, 5]])
    result = executor.execute(late)
    assert result.error is not None and result.digest == late.digest
    stream.failed()
    again = stream.plan(chunks=[(1, 2, True)], chunk_tokens=[[4, 5]])
    assert ok(executor.execute(again)) == [expected[1], other[0]]


def test_the_digest_is_chained_over_received_plans_and_restarts(executor: Executor) -> None:
    stream = PlanStream()
    plans = [
        stream.plan(joined=[joined(0, [1, 2], [0])], chunks=[(0, 2, True)], chunk_tokens=[[1, 2]]),
        stream.plan(),
        stream.plan(ended=[0]),
    ]
    assert [executor.execute(plan).digest for plan in plans] == [plan.digest for plan in plans]
    executor.reset()
    assert executor.execute(plans[0]).digest == plans[0].digest
    lost = executor.execute(plans[2])  # plan 1 never arrived
    assert lost.digest != plans[2].digest != START


def test_reset_forgets_rows_and_memory(executor: Executor) -> None:
    expected, stream = alone(executor, PROMPT, 1), PlanStream()
    join = {"joined": [joined(0, PROMPT, [0, 1, 2])], "chunks": [(0, 9, True)], "chunk_tokens": [PROMPT]}
    first = ok(executor.execute(stream.plan(**join)))
    executor.reset()
    stream.restart()
    assert ok(executor.execute(stream.plan(**join))) == first == expected
    executor.reset()
    stream.restart()
    cached = stream.plan(joined=[joined(0, PROMPT, [0, 1, 2], start=8)])
    assert ok(executor.execute(cached)) != expected


def test_copied_pages_hold_the_same_context(executor: Executor) -> None:
    expected, stream = alone(executor, PROMPT, 1), PlanStream()
    ok(
        executor.execute(
            stream.plan(joined=[joined(0, PROMPT, [0, 1, 2])], chunks=[(0, 9, True)], chunk_tokens=[PROMPT])
        )
    )
    copies = (Copy(src=(0, 1), dst=(6, 0)),)
    plan = stream.plan(ended=[0], joined=[joined(0, PROMPT, [6, 0, 9], start=8)], ops=copies)
    assert ok(executor.execute(plan)) == expected


def test_a_plan_of_operations_alone_gives_no_tokens(executor: Executor) -> None:
    assert ok(executor.execute(PlanStream().plan(ops=(Copy(src=(0,), dst=(1,)),)))) == []


WRONG = {
    "ends a free slot": {"ended": [5]},
    "preempts a free slot": {"preempt": [5]},
    "joins a taken slot": {"joined": [joined(0, [1], [4])]},
    "joins with nothing to compute": {"joined": [joined(1, [1, 2], [4], start=2)]},
    "joins with a page that is not there": {"joined": [joined(1, [1], [PAGES])], "chunks": [(1, 0, False)]},
    "grows a free slot": {"grow": ([5], [4])},
    "grows by a page that is not there": {"grow": ([0], [PAGES])},
    "grows by a page below zero": {"grow": ([0], [-1])},
    "has rows of width 2": {"width": 2},
    "computes a free slot": {"chunks": [(5, 1, True)], "chunk_tokens": [[1]]},
    "names a slot twice": {"chunks": [(0, 1, True), (0, 1, True)], "chunk_tokens": [[1], [1]]},
    "gives other tokens than it says": {"chunks": [(0, 1, True)], "chunk_tokens": [[1, 2]]},
    "computes more than is known": {"chunks": [(0, 2, True)], "chunk_tokens": [[1, 2]]},
    "computes past its pages": {},
    "has an unknown operation": {"ops": (Move(op=1, from_tier="device", to_tier="host"),)},
}


@pytest.mark.parametrize("fault", sorted(WRONG))
def test_a_wrong_plan_is_an_error_without_retry(executor: Executor, fault: str) -> None:
    stream = PlanStream()
    prompt = [1, 2, 3, 4] if fault == "computes past its pages" else [1, 2, 3]
    ok(
        executor.execute(
            stream.plan(joined=[joined(0, prompt, [0])], chunks=[(0, len(prompt), True)], chunk_tokens=[prompt])
        )
    )
    wrong = {"chunk_tokens": [[]] * len(WRONG[fault].get("chunks", ()))} | WRONG[fault]
    result = executor.execute(stream.plan(**wrong))
    assert result.error is not None
    assert result.error["retry"] is False
    assert result.error["text"]
    assert len(result.tokens) == 0


def test_a_plan_from_another_base_is_refused(executor: Executor) -> None:
    stream = PlanStream()
    ok(executor.execute(stream.plan(joined=[joined(0, [1], [0])])))
    assert ok(executor.execute(stream.plan(base=1)))
    assert executor.execute(stream.plan(base=1)).error is not None


@pytest.mark.parametrize("reuse", ["grown", "joined"])
def test_the_oracle_notices_a_page_that_two_rows_hold(reuse: str) -> None:
    oracle, stream = OracleExecutor(PAGES, PAGE, 10_000), PlanStream()
    expected = expected_tokens(PROMPT, 2, 10_000)
    ok(oracle.execute(stream.plan(joined=[joined(0, PROMPT, [0, 1, 2])], chunks=[(0, 9, True)], chunk_tokens=[PROMPT])))
    if reuse == "joined":
        plan = stream.plan(joined=[joined(1, [8], [1])])
    else:
        other = joined(1, [8, 8, 8, 8, 8], [3])
        ok(
            oracle.execute(
                stream.plan(joined=[other], chunks=[(0, 0, False), (1, 4, False)], chunk_tokens=[[], [8] * 4])
            )
        )
        plan = stream.plan(grow=([1], [1]))
    assert ok(oracle.execute(plan))[0] != expected[1]


def test_seeded_draws_do_not_depend_on_neighbours(folder: Path) -> None:
    executor = torch_executor(folder)
    params = SamplingParams(temperature=1.0, seed=3)
    driver = Driver(executor, PAGES, PAGE)
    rows = [driver.add(slot, PROMPT, 8, params) for slot in range(2)]
    driver.add(2, [1, 2], 8, SamplingParams(temperature=2.0, seed=4))
    driver.run()
    expected = generate(executor, PROMPT, 8, num_pages=PAGES, page_size=PAGE, params=params)
    assert rows[0].tokens[9:] == rows[1].tokens[9:] == expected
    other = SamplingParams(temperature=1.0, seed=4)
    assert generate(executor, PROMPT, 8, num_pages=PAGES, page_size=PAGE, params=other) != expected


def test_scores_that_are_not_finite_name_their_row(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor, stream = torch_executor(folder), PlanStream()
    whole = executor.model.logits

    def broken(hidden):
        logits = whole(hidden)
        logits[1] = float("nan")
        return logits

    monkeypatch.setattr(executor.model, "logits", broken)
    rows = [joined(slot, [slot + 1], [slot]) for slot in range(3)]
    result = executor.execute(stream.plan(joined=rows))
    assert result.error is not None
    assert (result.error["retry"], result.error["rows"]) == (True, (1,))


@pytest.mark.parametrize(
    ("error", "sticks"),
    [
        (torch.AcceleratorError("an illegal memory access was encountered"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), True),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
    ],
)
def test_a_fault_of_the_device_is_raised_for_it_would_stay(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: RuntimeError, sticks: bool
) -> None:
    executor = torch_executor(folder)

    def broken(*given: object) -> None:
        raise error

    monkeypatch.setattr(executor.model, "forward", broken)
    plan = PlanStream().plan(joined=[joined(0, [1, 2], [0])], chunks=[(0, 2, True)], chunk_tokens=[[1, 2]])
    if sticks:
        with pytest.raises(type(error)):
            executor.execute(plan)
    else:
        failed = executor.execute(plan).error
        assert failed is not None and failed["retry"]


def test_a_row_whose_own_parameters_forbid_every_token_is_named(folder: Path) -> None:
    executor = torch_executor(folder)
    every = SamplingParams(min_tokens=2, stop_token_ids=tuple(range(executor.config.vocab_size)))
    rows = [joined(0, [1, 2], [0], rid="a"), joined(1, [1, 2], [1], rid="b", params=every)]
    plan = PlanStream().plan(joined=rows, chunks=[(0, 2, True), (1, 2, True)], chunk_tokens=[[1, 2]] * 2)
    failed = executor.execute(plan).error
    assert failed is not None and failed["rows"] == (1,)


def test_whatever_a_model_raises_becomes_a_failed_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor, stream = torch_executor(folder), PlanStream()
    expected = alone(executor, [1], 1)

    def broken(*given):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(executor.model, "forward", broken)
        result = executor.execute(stream.plan(joined=[joined(0, [1], [0])]))
    assert result.error == {"text": "RuntimeError: out of memory", "retry": True, "rows": ()}
    stream.failed()
    assert ok(executor.execute(stream.plan())) == expected
