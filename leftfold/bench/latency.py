"""One stream at a time: how long until the first token, and how fast those after it come."""

from __future__ import annotations

import argparse
import statistics

from leftfold.bench import serve
from leftfold.bench.presets import PRESETS, add_engine_arguments
from leftfold.commands.common import OK, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `leftfold bench latency`."""
    add_engine_arguments(parser, "A")
    serve.add_peers(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print; exit code 0. Each round has another prompt, so that no cache answers for it."""
    from leftfold.bench.local import LocalEngine

    if args.vs:  # over HTTP then, for all alike
        return serve.run(argparse.Namespace(**vars(args), url=None))
    preset = PRESETS[args.preset]
    with LocalEngine(args, preset) as engine:
        rounds = []
        for number in range(args.rounds + 1):  # the first one warms up
            (timeline,) = engine.ask(preset.prompts(engine.vocabulary, seed=number), preset.output, f"r{number}")
            rounds.append(timeline)
        ready = engine.ready_seconds
    measured = rounds[1:]
    found = {
        "preset": args.preset,
        "model": args.model,
        "rounds": args.rounds,
        "ready_seconds": round(ready, 3),
        "median_ttft_ms": round(statistics.median(t.ttft for t in measured) * 1e3, 2),
        "median_tpot_ms": round(statistics.median(t.tpot for t in measured) * 1e3, 3),
        "decode_throughput": round(statistics.median(1 / t.tpot for t in measured), 2),
    }
    if args.json:
        print_json(found)
    else:
        print(
            f"{args.preset}: first token after {found['median_ttft_ms']} ms, then {found['decode_throughput']} tokens/s"
            f" ({found['median_tpot_ms']} ms each); ready in {found['ready_seconds']} s"
        )
    return OK
