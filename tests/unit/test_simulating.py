"""Simulation: the arithmetic of virtual time, arrivals, routers, and that a simulated log is a log like any other."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from leftfold.events import ControlDone, EventLog, ForwardDone, Sleep
from leftfold.executor.cost import CostModel, Work, features
from leftfold.executor.errors import CostError
from leftfold.executor.sim import MADE_UP, SimExecutor, Speech, Tape
from leftfold.fsm import Config
from leftfold.replay.simulating import ROUTERS, Job, loop, simulate, summarize
from leftfold.replay.simulating.fit import FitError, Sample, fit, nnls, samples_of
from leftfold.replay.simulating.jobs import block_prompt, drawn_prompt, job
from leftfold.replay.simulating.loop import Stalled
from leftfold.replay.verify import verify
from tests.logs import Recorder

CONFIG = Config(num_pages=256, page_size=4, max_running=8, max_batch_tokens=32, max_model_len=512)
COST = CostModel({"step": 1000.0, "row": 100.0, "token": 10.0, "context": 1.0}, "made up")


def alike(rid: str, t: int, length: int, output: int, after: str | None = None, family: int = 0) -> Job:
    """A job whose prompt begins like those of its family."""
    return job(rid, t, partial(block_prompt, [family] * 64, 8, length), length, output, after)


def own(number: int, t: int, length: int, output: int) -> Job:
    return job(f"r{number}", t, partial(drawn_prompt, 0, number, length), length, output)


def many(count: int, seed: int = 0) -> list[Job]:
    rng = np.random.default_rng(seed)
    return [own(n, int(rng.integers(0, 200_000)), int(rng.integers(1, 90)), int(rng.integers(1, 60)))
            for n in range(count)]  # fmt: skip


def test_one_request_takes_the_time_of_its_steps() -> None:
    run = simulate([own(0, 5000, 40, 3)], CONFIG, COST)
    # 32 and 8 prompt tokens, then two decode steps that read 41 and 42 positions
    first = 5000 + 1000 + 320 + 1000 + 80
    service = run.meter.services["r0", 0, 0]
    assert (service.arrived, service.first, service.ended) == (5000, first, first + 1141 + 1142)
    assert (service.tokens, service.prompt, service.reason) == (3, 40, "length")
    figures = summarize(run).as_dict()
    assert figures["ttft_ms"]["mean"] == (first - 5000) / 1000 and figures["tpot_ms"]["p50"] == 1.141  # rounded
    assert figures["steps"] == 4 and figures["virtual_seconds"] == service.ended / 1e6


def test_rows_share_steps_and_arrivals_wait_for_the_step_that_runs() -> None:
    run = simulate([own(0, 0, 8, 20), own(1, 100, 8, 1)], CONFIG, COST)
    second = run.meter.services["r1", 0, 0]
    # the first step ends at 1080; the next one has one decode row that reads 9 positions, and 8 prompt tokens
    assert second.first == second.ended == 1080 + 1000 + 100 + 9 + 80


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_simulated_log_verifies_and_tells_the_same(depth: int) -> None:
    log = EventLog.memory()
    config = Config(num_pages=40, page_size=4, max_running=8, max_batch_tokens=32, max_model_len=512,
                    pipeline_depth=depth)  # fmt: skip
    run = simulate(many(30), config, COST, keep=(log.append,))
    verdict = verify(log)
    assert verdict.clean, verdict.describe()
    assert verdict.steps == run.replicas[0].steps
    assert run.replicas[0].state.counts["preemptions"] > 0
    assert all(service.reason == "length" for service in run.meter.services.values())
    run.replicas[0].state.check()


def test_equal_runs_are_equal() -> None:
    figures = [summarize(simulate(many(20), CONFIG, COST, replicas=2)).as_dict() for _ in range(2)]
    assert figures[0] == figures[1]


def test_a_session_goes_on_when_its_answer_is_there() -> None:
    run = simulate([alike("a", 0, 16, 4), alike("b", 700, 24, 2, after="a")], CONFIG, COST)
    services = run.meter.services
    assert services["b", 0, 0].arrived == services["a", 0, 0].ended + 700
    assert services["b", 0, 0].cached == 16


def test_a_client_that_leaves_aborts_its_request() -> None:
    leaver = own(0, 0, 8, 50)
    leaver.abort_after = 3000
    run = simulate([leaver], CONFIG, COST)
    assert run.meter.services["r0", 0, 0].reason == "abort" and run.t >= 3000


def test_the_prefix_router_keeps_families_together_and_round_robin_does_not() -> None:
    jobs = [alike(f"r{n}", n * 20_000, 64, 2, family=n % 3) for n in range(12)]
    hits = {}
    for name, router in ROUTERS.items():
        run = simulate(jobs, CONFIG, COST, replicas=2, router=router)
        assert sum(run.routed) == 12
        hits[name] = summarize(run).hits
    assert hits["prefix"] > hits["round_robin"]


def test_the_least_loaded_gets_the_next() -> None:
    jobs = [own(0, 0, 64, 60), *(own(n, n * 10, 4, 1) for n in range(1, 4))]
    run = simulate(jobs, CONFIG, COST, replicas=2, router=ROUTERS["least_loaded"])
    assert run.routed == [2, 2]


def test_the_prefix_router_leaves_a_replica_that_is_far_busier() -> None:
    jobs = [alike(f"r{n}", n, 64, 60) for n in range(40)]
    run = simulate(jobs, CONFIG, COST, replicas=2, router=ROUTERS["prefix"])
    assert min(run.routed) > 4


def test_a_tape_says_what_was_said_before() -> None:
    log = EventLog.memory()
    tape = Tape({("r0", 0, 0): [7, 8, 9], ("r1", 0, 0): [4, 5]})
    simulate([own(0, 0, 5, 3), own(1, 0, 6, 2), own(2, 0, 3, 2)], CONFIG, COST, tape=tape, keep=(log.append,))
    said = [list(done.tokens) for _, done in log if isinstance(done, ForwardDone)]
    assert said[0][:2] == [7, 4] and said[1][:2] == [8, 5] and said[2] == [9]
    assert said[0][2] >= MADE_UP and said[1][2] == said[0][2] + 1


def test_features_fit_back_to_the_model_they_came_from() -> None:
    log = EventLog.memory()
    simulate(many(60), CONFIG, COST, keep=(log.append,))
    model = fit(samples_of(log), "a simulated log")
    assert model.quality["r2"] > 0.9999 and abs(model.quality["total_off_percent"]) < 0.01
    for work in (Work(), Work(8, 400, 0, 0, 0), Work(2, 50, 1, 30, 465)):
        assert abs(model.micros(work) - COST.micros(work)) <= 0.02 * COST.micros(work)


def test_idle_time_is_no_part_of_a_step() -> None:
    log = EventLog.memory()
    simulate([own(n, n * 3_000_000, 20, 8) for n in range(4)], CONFIG, COST, keep=(log.append,))
    assert max(sample.micros for sample in samples_of(log)) < 3000


def test_least_squares_never_goes_below_zero() -> None:
    rng = np.random.default_rng(1)
    matrix = rng.random((200, 4))
    exact = nnls(matrix, matrix @ np.array([3.0, 0.0, 0.5, 2.0]))
    assert np.allclose(exact, [3.0, 0.0, 0.5, 2.0])
    bounded = nnls(matrix, matrix @ np.array([3.0, -1.0, 0.5, 2.0]))
    assert (bounded >= 0).all() and bounded[1] == 0
    residual = matrix.T @ (matrix @ np.array([3.0, -1.0, 0.5, 2.0]) - matrix @ bounded)
    assert (residual <= 1e-6).all()  # the conditions of Karush, Kuhn and Tucker
    assert np.abs(residual[bounded > 0]).max() < 1e-6


def test_least_squares_stops_after_so_many_tries() -> None:
    matrix = np.random.default_rng(2).random((50, 4))
    target = matrix @ np.array([3.0, 1.0, 0.5, 2.0])
    found = [nnls(matrix, target, tries) for tries in range(5)]
    assert [int((x > 0).sum()) for x in found] == [0, 1, 2, 3, 4]
    off = [float(np.square(matrix @ x - target).sum()) for x in found]
    assert off == sorted(off, reverse=True) and off[-1] < 1e-9


def test_steps_that_failed_or_computed_nothing_are_no_samples() -> None:
    made = Recorder(EventLog.memory())
    made.admit("a", [1, 2, 3], max_tokens=9)
    made.run(1)
    made.tick()
    made.fail()
    made.take(Sleep, call="nap", tags=("weights",))
    plan = made.tick()
    assert [chunk.length for chunk in plan.chunks] == [0]  # the row is left out while the engine goes to sleep
    made.done()
    made.take(ControlDone, op=plan.ops[0].op)
    samples = samples_of(made.log)
    assert [(sample.work, sample.micros) for sample in samples] == [(Work().chunk(0, 3), 10)]


def test_a_simulator_that_fails_and_a_planner_that_never_decides_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(SimExecutor, "_compute", lambda self, plan: [][0])
        with pytest.raises(Stalled, match="step 1 failed on the simulator: .*IndexError"):
            simulate([own(0, 0, 8, 2)], CONFIG, COST)
    monkeypatch.setattr(loop, "decide", lambda state, t: None)
    with pytest.raises(Stalled, match="2 requests live, 'r0' first, but nothing will happen any more"):
        simulate([own(0, 0, 8, 2), own(1, 5, 8, 2)], CONFIG, COST)


def test_too_few_steps_are_no_fit() -> None:
    with pytest.raises(FitError, match="too few"):
        fit([Sample(Work(1, 5), 100)] * 3, "little")


@pytest.mark.parametrize(
    "raw",
    [None, {}, {"microseconds": {}}, {"microseconds": {"steps": 1}}, {"microseconds": {"step": -1}},
     {"microseconds": {"step": "1"}}, {"microseconds": {"step": True}}],
)  # fmt: skip
def test_figures_that_make_no_model_are_refused(raw: Any) -> None:
    with pytest.raises(CostError):
        CostModel.from_dict(raw)


def test_a_model_survives_its_file() -> None:
    again = CostModel.from_dict(COST.as_dict())
    assert again == COST and again.micros(Work(3, 10, 1, 4, 10)) == 1000 + 300 + 10 + 40


def test_reach_counts_the_positions_that_each_token_reads() -> None:
    work = Work().chunk(10, 3)
    assert work.reach == 11 + 12 + 13
    assert features(Work(4, 0, 0, 16))[-4:] == (4, 0, 0, 0)


def test_made_up_tokens_are_nobody_elses() -> None:
    executor = SimExecutor(8, 4, speech=Speech.MADE_UP)
    from tests.plan_stream import generate

    said = generate(executor, [1, 2, 3], 20, num_pages=8, page_size=4)
    assert len(set(said)) == 20 and min(said) >= MADE_UP and max(said) < 1 << 31
