"""Fit a cost model to a run of which only the times of its requests are known (`*_requests.jsonl`, `*_meta.json`).

No step was timed, so the steps are found by simulation: with a model, the run is simulated, which says how much work
lies between the arrival of each request and its first token, and from there to its last. The times that were measured
there give a better model by least squares; and again, until nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from leftfold.executor.cost import FEATURES, CostModel, Work, features
from leftfold.fsm import Config
from leftfold.replay.simulating.figures import Service
from leftfold.replay.simulating.fit import FitError, Matrix, model_of, nnls
from leftfold.replay.simulating.jobs import Job, TraceError, drawn_prompt, job
from leftfold.replay.simulating.loop import Run, simulate

START = CostModel({"step": 10_000.0, "row": 50.0, "token": 100.0, "context": 0.1}, "a guess to begin with")
ROUNDS = 12
USED = ("step", "context", "token")
"""Spans of whole requests tell little apart: what all of them hold (rows, chunks) goes into these."""

_NOTHING = (0,) * len(FEATURES)
_USED = np.array([name in USED for name in FEATURES], np.float64)


@dataclass(frozen=True, slots=True)
class Measured:
    """A measured run. `services`: what each request saw, in the order of arrival; `config`: its engine's limits."""

    jobs: list[Job]
    services: list[Service]
    config: Config
    source: str


def read_measured(requests: str | Path, meta: str | Path, seed: int = 0) -> Measured:
    """A run that vLLM's bench wrote, times relative to the first arrival. Raises `TraceError`."""
    try:
        rows = [orjson.loads(line) for line in Path(requests).read_bytes().splitlines() if line.strip()]
        about = orjson.loads(Path(meta).read_bytes())
        kwargs, cache = about["engine_kwargs"], about["kv_cache"]
        config = Config(
            num_pages=cache["num_gpu_blocks"], page_size=cache["block_size"], max_running=kwargs["max_num_seqs"],
            max_batch_tokens=kwargs["max_num_batched_tokens"], max_model_len=kwargs["max_model_len"],
            prefix_cache=cache["enable_prefix_caching"],
        )  # fmt: skip
        first = min(row["queued_ts"] for row in rows)
        jobs, services = [], []
        for number, row in enumerate(rows):
            times = [round((row[name] - first) * 1e6) for name in ("queued_ts", "first_token_ts", "last_token_ts")]
            length, count = row["input_toks"], row["output_toks"]
            jobs.append(job(row["request_id"], times[0], _prompt(seed, number, length), length, count))
            services.append(Service(times[0], times[1], times[2], count, length, 0, "length"))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{requests}, {meta}: {type(error).__name__}: {error}") from error
    name = about.get("hardware", {}).get("device_name", "an unknown device")
    return Measured(jobs, services, config, f"{about.get('model')} on {name}, vLLM {about.get('vllm_version')}")


def _prompt(seed: int, number: int, length: int) -> Callable[[], Any]:
    return lambda: drawn_prompt(seed, number, length)


def calibrate(measured: Measured, which: Sequence[int], rounds: int = ROUNDS) -> CostModel:
    """The model under which the simulated run serves the requests `which` (indices) as they were measured."""
    cost = START
    for _ in range(rounds):
        run, steps = traced(measured, cost)
        matrix, times = _spans(measured, run, steps, which)
        weight = 1 / np.sqrt(times)
        found = nnls(matrix * weight[:, None], times * weight)
        newer = model_of(found, matrix, times, f"{measured.source}: fitted to times of {len(which)} requests")
        same = _distance(cost, newer) < 1e-3
        cost = newer
        if same:
            break
    return cost


def _distance(one: CostModel, other: CostModel) -> float:
    pairs = [(one.microseconds.get(name, 0.0), other.microseconds.get(name, 0.0)) for name in FEATURES]
    return max(abs(a - b) / max(a, b) for a, b in pairs if a or b)


def traced(measured: Measured, cost: CostModel) -> tuple[Run, tuple[Matrix, Matrix]]:
    """Simulate the run; its steps as (when each began and ended, one after the other; sums of features by then)."""
    times: list[int] = []
    rows: list[tuple[int, ...]] = []

    def observe(t: int, work: Work) -> None:
        times.extend((t - cost.micros(work), t))
        rows.extend((_NOTHING, features(work)))

    run = simulate(measured.jobs, measured.config, cost, observe=observe)
    return run, (np.array(times, np.float64), np.cumsum(np.array(rows, np.float64), axis=0))


def _spans(
    measured: Measured, run: Run, steps: tuple[Matrix, Matrix], which: Sequence[int]
) -> tuple[Matrix, Matrix]:
    """The work from each request's arrival to its first token, and on to its last; the times measured there.

    A request that comes in the middle of a step waits for the rest of it, so that much of its work counts.
    """
    at, sums = steps
    got = [run.meter.services[measured.jobs[index].rid, 0, 0] for index in which]
    real = [measured.services[index] for index in which]
    moments = np.array([(one.arrived, one.first, one.ended) for one in got], np.float64)
    done = np.stack([np.interp(moments, at, column) for column in sums.T], axis=2)
    spans = np.diff(done, axis=1).reshape(-1, sums.shape[1]) * _USED
    times = np.diff(np.array([(one.arrived, one.first, one.ended) for one in real], np.float64), axis=1).reshape(-1)
    usable = (times > 0) & (np.diff(moments, axis=1).reshape(-1) > 0)
    matrix, times = spans[usable], times[usable]
    if len(matrix) < len(FEATURES):
        raise FitError(f"{len(matrix)} spans are too few to fit {len(USED)} coefficients to")
    return matrix, times


__all__ = ["Measured", "calibrate", "read_measured", "traced"]
