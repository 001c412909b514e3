"""Many requests at once: tokens per second; with a shared prefix also when the prefix is in the cache already."""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from leftfold.bench import serve
from leftfold.bench.presets import PRESETS, add_engine_arguments
from leftfold.commands.common import OK, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `leftfold bench throughput`."""
    add_engine_arguments(parser, "BC")
    serve.add_peers(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print; exit code 0. Each round has other prompts; what a cache holds of them is said."""
    from leftfold.bench.local import LocalEngine, rates

    if args.vs:  # over HTTP then, for all alike
        return serve.run(argparse.Namespace(**vars(args), url=None))
    preset = PRESETS[args.preset]
    cold, primed = [], []
    with LocalEngine(args, preset) as engine:
        engine.ask(preset.prompts(engine.vocabulary, seed=0)[:4], 4, "warm")
        for number in range(1, args.rounds + 1):
            prompts = preset.prompts(engine.vocabulary, seed=number)
            count = sum(map(len, prompts))
            cold.append(rates(engine.ask(prompts, preset.output, f"cold{number}"), count))
            if preset.shared:
                again = preset.primed(engine.vocabulary, seed=number)
                primed.append(rates(engine.ask(again, preset.output, f"primed{number}"), count))
    found: dict[str, Any] = {"preset": args.preset, "model": args.model, "rounds": args.rounds, **_medians(cold)}
    if primed:
        found["primed"] = _medians(primed)
    if args.json:
        print_json(found)
    else:
        for name, part in (("", found), (" with its prefix cached", found.get("primed"))):
            if part:
                told = f"{part['output_throughput']} output tokens/s, {part['total_token_throughput']} in and out"
                print(f"{args.preset}{name}: {told}, {part['duration']} s")
    return OK


def _medians(rounds: list[dict[str, Any]]) -> dict[str, float]:
    return {name: round(statistics.median(one[name] for one in rounds), 3) for name in rounds[0]}
