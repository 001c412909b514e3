"""Fit a cost model: to the steps of a log, or to the spans between steps that clients of a run have seen.

Least squares with non-negative coefficients (Lawson and Hanson, "Solving Least Squares Problems", 1974, algorithm
NNLS): a step cannot take less time for doing more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from leftfold.events import ForwardDone, Record, Started, Tick
from leftfold.executor.cost import FEATURES, CostModel, Work, features
from leftfold.fsm import State
from leftfold.fsm.rows import StepRows
from leftfold.replay.errors import ReplayError
from leftfold.replay.walking import walk

Matrix = npt.NDArray[np.float64]

PAUSE = 20_000
"""µs between a result and the next plan from which on the engine is taken to have idled, not to have worked."""


class FitError(ReplayError):
    """Too little to fit a model to."""


class Sample(NamedTuple):
    """A step: its work, and the µs from when it could begin to its result."""

    work: Work
    micros: int


def nnls(matrix: Matrix, target: Matrix, tries: int = 200) -> Matrix:
    """x ≥ 0 with the least |matrix · x − target|; matrix [samples, features], target [samples]."""
    scale = np.sqrt((matrix**2).sum(axis=0))
    scale[scale == 0] = 1.0
    scaled = matrix / scale
    count = scaled.shape[1]
    active = np.zeros(count, np.bool_)  # may be positive
    x = np.zeros(count)
    tolerance = 1e-10 * max(1.0, float(np.abs(scaled.T @ target).max(initial=0.0)))
    for _ in range(tries):
        gradient = scaled.T @ (target - scaled @ x)
        gradient[active] = -np.inf
        best = int(gradient.argmax())
        if active.all() or gradient[best] <= tolerance:
            break
        active[best] = True
        while True:
            trial = np.zeros(count)
            trial[active] = np.linalg.lstsq(scaled[:, active], target, rcond=None)[0]
            if (trial[active] > 0).all():
                x = trial
                break
            low = active & (trial <= 0)
            share = (x[low] / np.maximum(x[low] - trial[low], 1e-300)).min()
            x = x + share * (trial - x)
            active &= x > 1e-12
            x[~active] = 0.0
            if not active.any():
                break
    return np.asarray(x / scale)


def work_of(rows: StepRows) -> Work:
    """The work of a plan's rows."""
    work = Work(len(rows.starts), sum(rows.starts) + len(rows.starts))
    for chunk in rows.chunks:
        if chunk.length:
            work = work.chunk(chunk.start, chunk.length)
    return work


def samples_of(records: Iterable[Record]) -> list[Sample]:
    """The steps of a log that went well.

    A step begins with its plan, or where the one before it ends: while an engine has work, what it spends between a
    result and the next plan is a part of what steps cost. Where `pipeline_depth` is more than 0 a step begins when the
    one before it is done.
    """
    samples = list[Sample]()
    flying: dict[int, tuple[Work, int]] = {}
    landed, busy = 0, False
    for (_, event), effects, state in walk(records):
        if isinstance(event, Started):
            flying.clear()
        elif isinstance(event, Tick) and effects.plan is not None:
            begun = landed if flying or (busy and event.t - landed < PAUSE) else event.t
            assert isinstance(effects.plan.source, StepRows)
            flying[effects.plan.step] = (work_of(effects.plan.source), 0 if flying else begun)
        elif isinstance(event, ForwardDone) and event.step in flying:
            work, begun = flying.pop(event.step)
            if event.error is None and (work.rows or work.tokens):
                samples.append(Sample(work, event.t - (begun or landed)))
            landed, busy = event.t, _works(state)
    return samples


def _works(state: State) -> bool:
    return bool(state.row_count or len(state.waiting))


def fit(samples: Sequence[Sample], source: str) -> CostModel:
    """The model that fits `samples` best, each weighed by the inverse of its time. Raises `FitError`.

    It is scaled so that all steps together take as long as they did. `quality`: samples, r2, mean and p90 of the
    absolute error in percent, the share of the total that is off without the scaling.
    """
    if len(samples) < len(FEATURES):
        few = f"{len(samples)} of them went well, too few to fit {len(FEATURES)} coefficients to"
        raise FitError(f"{source}: {few}")
    matrix = np.array([features(sample.work) for sample in samples], np.float64)
    times = np.array([max(1, sample.micros) for sample in samples], np.float64)
    weight = 1 / np.sqrt(times)
    found = nnls(matrix * weight[:, None], times * weight)
    return model_of(found, matrix, times, source)


def model_of(found: Matrix, matrix: Matrix, times: Matrix, source: str) -> CostModel:
    """`found` as a model, with its quality on what it was fitted to."""
    predicted = matrix @ found
    total = float(times.sum() / max(predicted.sum(), 1e-9))
    predicted = predicted * total
    spread = float(((times - times.mean()) ** 2).sum())
    errors = np.abs(predicted / times - 1)
    quality: dict[str, Any] = {
        "samples": len(times),
        "r2": round(1 - float(((times - predicted) ** 2).sum()) / spread, 4) if spread else None,
        "mean_error_percent": round(100 * float(errors.mean()), 2),
        "p90_error_percent": round(100 * float(np.percentile(errors, 90)), 2),
        "total_off_percent": round(100 * (1 / total - 1), 3),
    }
    costs = {name: round(float(value) * total, 6) for name, value in zip(FEATURES, found, strict=True) if value > 1e-9}
    return CostModel(costs, source, quality)


__all__ = ["FitError", "Sample", "fit", "model_of", "nnls", "samples_of", "work_of"]
