"""The same requests one by one and all at once: every token must be the same.

Greedy and seeded requests, some with penalties, a third of them with a prefix in common, are answered one after the
other without a cache; then all together, in rounds with random limits of a step, of chunks and of running requests,
with page pools so small that rows are preempted, with the prefix cache and without it, and with several page sizes.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from leftfold.commands.common import FINDING, OK, UsageError, natural, positive, print_json, threads
from leftfold.events import Admit, SamplingParams

FIRST = 3
"""Ids below are left out of prompts."""
LONGEST = 192
"""Positions that the longest request takes."""

Asked = tuple[list[int], SamplingParams]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `leftfold bench determinism`."""
    parser.add_argument("--model", default="smollm2", help="what `serve` takes as MODEL (default %(default)s)")
    parser.add_argument("--requests", type=positive, default=500, help="how many (default %(default)s)")
    parser.add_argument("--rounds", type=positive, default=4, help="crowds, each with other limits (%(default)s)")
    parser.add_argument("--seed", type=natural, default=0, help="of requests and limits (default %(default)s)")
    parser.add_argument("--threads", type=threads, default=2, help="threads of the executor (default %(default)s)")
    parser.add_argument(
        "--quantization", choices=("auto", "none", "int8", "int4"), default="auto", help="as of `serve`"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Compare and print; exit code 1 if a request got other tokens in a crowd than alone."""
    from leftfold.errors import EngineError
    from leftfold.executor.errors import ExecutorError
    from leftfold.hub import HubError

    common = {
        "model": args.model, "threads": args.threads, "quantization": args.quantization, "max_model_len": LONGEST,
    }  # fmt: skip
    try:
        vocabulary = vocabulary_of(common)
        asked = requests(args.requests, vocabulary, args.seed)
        expected, _ = answers(
            asked, {**common, "max_model_len": LONGEST, "kv_tokens": 256, "prefix_cache": False}, True
        )
        rounds = []
        for limits in crowds(args.rounds, args.seed):
            tokens, preemptions = answers(asked, {**common, **limits})
            differing = [index for index, (one, other) in enumerate(zip(expected, tokens, strict=True)) if one != other]
            rounds.append({**limits, "preemptions": preemptions, "differing": differing})
    except (EngineError, ExecutorError, HubError) as error:
        raise UsageError(str(error)) from None
    differing = sorted({index for one in rounds for index in one["differing"]})
    found = {
        "model": args.model, "requests": len(asked), "identical": len(asked) - len(differing),
        "tokens": sum(map(len, expected)), "rounds": rounds,
    }  # fmt: skip
    if args.json:
        print_json(found)
    else:
        print(f"{found['identical']} of {len(asked)} requests got the same tokens alone and in {len(rounds)} crowds")
        for one in rounds:
            told = ", ".join(f"{name} {value}" for name, value in one.items() if name != "differing")
            print(f"  {len(one['differing'])} differ with {told}")
    return FINDING if differing else OK


def requests(count: int, vocabulary: int, seed: int = 0) -> list[Asked]:
    """Prompts and parameters, the same for the same seed; none takes more than `LONGEST` positions."""
    random = np.random.default_rng(seed)
    shared = random.integers(FIRST, vocabulary, 40).tolist()
    found = []
    for index in range(count):
        own = random.integers(FIRST, vocabulary, random.integers(2, 100)).tolist()
        drawn: dict[str, Any] = {"temperature": 0.9, "seed": index, "top_p": 0.9} if index % 2 else {"temperature": 0.0}
        if index % 5 == 0:
            drawn |= {"repetition_penalty": 1.1, "frequency_penalty": 0.2}
        params = SamplingParams(max_tokens=int(random.integers(4, 32)), ignore_eos=True, **drawn)
        found.append(((shared if index % 3 == 0 else []) + own, params))
    return found


def crowds(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Limits of each round; every second has a pool for a few requests only."""
    random = np.random.default_rng(seed + 1)
    found: list[dict[str, Any]] = []
    for number in range(count):
        running = int(random.integers(8, 65))
        found.append({
            "kv_tokens": int(random.integers(400, 1200)) if number % 2 == 0 else 64 * LONGEST,
            "max_num_seqs": running,
            "max_num_batched_tokens": running + int(random.integers(1, 256)),
            "max_chunk_tokens": int(random.integers(1, 80)),
            "page_size": int(random.choice((5, 8, 16, 32))),
            "prefix_cache": bool(number % 4 < 2),
        })  # fmt: skip
    return found


def answers(asked: Sequence[Asked], options: Mapping[str, Any], alone: bool = False) -> tuple[list[list[int]], int]:
    """Tokens of each request, and how many preemptions it took; `alone`: one after the other. Raises EngineError."""
    from leftfold.attaching import Delivery
    from leftfold.builder import build_engine
    from leftfold.errors import EngineError
    from leftfold.options import EngineOptions

    tokens: list[list[int]] = [[] for _ in asked]
    left = dict.fromkeys(range(len(asked)))
    failed: list[str] = []

    def submit(index: int) -> None:
        prompt, params = asked[index]
        engine.submit(Admit, rid=str(index), prompt=prompt, params=params)

    def deliver(delivery: Delivery) -> None:
        for output in delivery.outputs:
            tokens[int(output.rid)].extend(output.tokens)
            if output.error is not None:
                failed.append(f"request {output.rid}: {output.error}")
            if output.finish_reason is not None:
                del left[int(output.rid)]
                if alone and left:
                    submit(next(iter(left)))
        if not left or failed:
            engine.stop()

    engine = build_engine(EngineOptions(durability="off", device="cpu", **options), deliver)
    engine.start()
    for index in list(left)[: 1 if alone else None]:
        submit(index)
    engine.run()
    if failed:
        raise EngineError(failed[0])
    return tokens, int(engine.stats()["preemptions"])


def vocabulary_of(options: Mapping[str, Any]) -> int:
    """How many token ids a model knows. Raises HubError and what opening its files does."""
    from leftfold.executor.weights import load
    from leftfold.hub import resolve

    return load(resolve(options["model"]).path).config.vocab_size
