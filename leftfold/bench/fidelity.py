"""How far a simulation is from what it simulates: times to first token, per token and to the end, on held-out data.

Two comparisons. A measured run of another engine (--measured, --meta): a cost model is fitted to the times of every
second request, and predicts those of the others; and the same for the first half in time and the second. This engine on
this machine: a model is fitted to the steps of a run under one configuration, and predicts a run under another, with
other requests. Nothing of what is predicted goes into the fit but when requests came and how long their answers were.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from leftfold.commands.common import FINDING, OK, UsageError, print_json, seconds, threads

if TYPE_CHECKING:
    from leftfold.replay.simulating.figures import Service

BAR = 5.0
"""Percent that a mean may be off."""

FITTED = {"max_num_seqs": 16, "max_num_batched_tokens": 128, "kv_tokens": 8192}
HELD_OUT = {"max_num_seqs": 6, "max_num_batched_tokens": 64, "kv_tokens": 4096}
RATE = {"fitted": 8.0, "held_out": 7.0}
"""Requests per second, so that rows share steps and none waits for long."""
TURNS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `leftfold bench fidelity`."""
    parser.add_argument("--measured", metavar="FILE", help="a measured run's *_requests.jsonl")
    parser.add_argument("--meta", metavar="FILE", help="and its *_meta.json")
    parser.add_argument("--model", default="smollm2", help="what this engine serves, or none (default %(default)s)")
    parser.add_argument("--seconds", type=seconds, default=20.0, help="for each configuration (default %(default)s)")
    parser.add_argument("--threads", type=threads, default=2, help="of its executor (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print each comparison; 0 when every mean is within the bar, else 1."""
    if (args.measured is None) != (args.meta is None):
        raise UsageError("--measured and --meta go together")
    found: dict[str, Any] = {"bar_percent": BAR}
    if args.measured is not None:
        found["measured"] = of_measured(args.measured, args.meta)
    if args.model != "none":
        with tempfile.TemporaryDirectory() as folder:
            found["engine"] = of_engine(args.model, args.seconds, args.threads, Path(folder))
    if len(found) == 1:
        raise UsageError("nothing to compare: give --measured and --meta, or a --model")
    comparisons = [*found.get("measured", {}).values(), *([found["engine"]] if "engine" in found else [])]
    found["within_bar"] = all(abs(off) <= BAR for one in comparisons for off in one["off_percent"].values())
    print_json(found) if args.json else print(_described(found))
    return OK if found["within_bar"] else FINDING


NAMES = ("ttft_ms", "tpot_ms", "e2e_ms")


def means(services: Sequence[Service]) -> dict[str, float]:
    """Means of the three times, in ms."""
    tpots = [service.tpot for service in services if service.tokens > 1]
    values = ([service.ttft for service in services], tpots, [service.e2e for service in services])
    return {name: round(float(np.mean(value)), 3) for name, value in zip(NAMES, values, strict=True)}


def compared(real: Sequence[Service], simulated: Sequence[Service], cost: Any) -> dict[str, Any]:
    """Both means and how far they are apart, in percent of the real one."""
    one, other = means(real), means(simulated)
    off = {name: round(100 * (other[name] / one[name] - 1), 2) for name in NAMES}
    return {"requests": len(real), "real": one, "simulated": other, "off_percent": off, "cost": cost.as_dict()}


def of_measured(requests: str, meta: str) -> dict[str, Any]:
    """Two ways to halve the requests of a measured run."""
    from leftfold.replay.simulating import TraceError
    from leftfold.replay.simulating.measured import calibrate, read_measured, traced

    try:
        measured = read_measured(requests, meta)
    except TraceError as error:
        raise UsageError(str(error)) from error
    count = len(measured.jobs)
    found = {}
    for name, fitted in (("every second", range(0, count, 2)), ("first half", range(count // 2))):
        cost = calibrate(measured, fitted)
        served, _ = traced(measured, cost)
        others = [index for index in range(count) if index not in fitted]
        simulated = [served.meter.services[measured.jobs[index].rid, 0, 0] for index in others]
        found[name] = compared([measured.services[index] for index in others], simulated, cost)
    return found


def of_engine(model: str, length: float, threads: int, folder: Path) -> dict[str, Any]:
    """This engine under two configurations, in turns, so that a machine that slows down slows both."""
    from leftfold.events import EventLog
    from leftfold.replay.simulating import simulate
    from leftfold.replay.simulating.fit import fit, samples_of
    from leftfold.replay.simulating.whatif import recording

    engines = {
        name: Served(model, {**limits, "threads": threads}, folder / name, number)
        for number, (name, limits) in enumerate((("fitted", FITTED), ("held_out", HELD_OUT)))
    }
    for _ in range(TURNS):
        for name, engine in engines.items():
            engine.serve(RATE[name], length / TURNS)
    for engine in engines.values():
        engine.close()
    cost = fit(samples_of(EventLog.read(folder / "fitted")), f"the steps of {model} on this machine under {FITTED}")
    recorded = recording(EventLog.read(folder / "held_out"))
    served = simulate(recorded.jobs, recorded.config, cost, tape=recorded.tape)
    simulated = list(served.meter.services.values())
    return {**compared(recorded.figures.answered, simulated, cost), "fitted": FITTED, "held_out": HELD_OUT}


class Served:
    """This engine under one configuration, its log in `log_dir`; asked from the calling thread."""

    def __init__(self, model: str, options: dict[str, Any], log_dir: Path, seed: int) -> None:
        from leftfold.builder import build_engine
        from leftfold.options import EngineOptions

        options = {"max_model_len": 512, **options}
        self._rng = np.random.default_rng(seed)
        self._left, self._asked, self._done = 0, 0, threading.Event()
        self._engine = build_engine(EngineOptions(model=model, log_dir=str(log_dir), **options), self._heard)
        self._engine.start()
        self._thread = threading.Thread(target=self._engine.run, daemon=True)
        self._thread.start()

    def _heard(self, delivery: Any) -> None:
        self._left -= sum(output.finish_reason is not None for output in delivery.outputs)
        if self._left <= 0:
            self._done.set()

    def serve(self, rate: float, length: float) -> None:
        """Requests that come for about `length` seconds, to the end of the last."""
        from leftfold.events import Admit, SamplingParams

        count, rng = max(4, round(rate * length)), self._rng
        self._left = count
        self._done.clear()
        for gap in rng.exponential(1 / rate, count):
            time.sleep(gap)
            prompt = rng.integers(1000, 40_000, int(rng.integers(16, 96))).tolist()
            params = SamplingParams(max_tokens=int(rng.integers(8, 40)), temperature=0.0)
            self._engine.submit(Admit, rid=f"r{self._asked}", prompt=prompt, params=params)
            self._asked += 1
        self._done.wait(10 * length + 60)

    def close(self) -> None:
        """Stop; the log is whole afterwards."""
        self._engine.stop()
        self._thread.join(30)


def _described(found: dict[str, Any]) -> str:
    lines = [f"{'':<34}" + "".join(f"{name[:4].strip('_').upper():>26}" for name in NAMES)]
    comparisons = {**found.get("measured", {}), **({"this engine": found["engine"]} if "engine" in found else {})}
    for name, one in comparisons.items():
        text = f"{name} ({one['requests']} requests)"
        real, simulated, off = one["real"], one["simulated"], one["off_percent"]
        cells = "".join(f"{real[key]:>10.1f} {simulated[key]:>8.1f} {off[key]:>+6.2f}%" for key in NAMES)
        lines.append(f"{text:<34}{cells}")
    for one in comparisons.values():
        quality = ", ".join(f"{key} {value}" for key, value in one["cost"]["quality"].items())
        lines.append(f"fit: {one['cost']['source']} ({quality})")
    lines.append(f"real, simulated, off by; {'all' if found['within_bar'] else 'not all'} within {BAR:.0f} %")
    return "\n".join(lines)
