"""Workloads of `bench latency`, `throughput` and `serve`: seeded random prompts of fixed lengths, greedy, no early end.

A: one stream, 128 tokens in, 128 out. B: 64 requests at once, at most 32 running, 32 to 256 tokens in, 64 out. C: 32
requests, 512 tokens in common and 16 of their own, 32 out. D: 32 HTTP streams, as B's prompts, 64 out.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np

from leftfold.commands.common import positive, threads

FIRST = 100
"""Ids below are left out of prompts: a model's special tokens are among them."""
OTHERS = 1000
"""Seeds so much higher give the prompts that share a prefix with earlier ones."""


@dataclass(frozen=True, slots=True)
class Preset:
    """`requests` that run `running` at a time; prompts of `shortest` to `longest` tokens after `shared` common ones."""

    requests: int
    running: int
    shortest: int
    longest: int
    shared: int
    output: int

    @property
    def reach(self) -> int:
        """Positions that the longest request takes."""
        return self.shared + self.longest + self.output

    def prompts(self, vocabulary: int, seed: int = 0) -> list[list[int]]:
        """Token ids of each request; the same for the same seed."""
        random = np.random.default_rng(seed)
        low = min(FIRST, vocabulary // 2)
        shared = random.integers(low, vocabulary, self.shared).tolist()
        lengths = random.integers(self.shortest, self.longest + 1, self.requests).tolist()
        return [shared + random.integers(low, vocabulary, length).tolist() for length in lengths]

    def primed(self, vocabulary: int, seed: int = 0) -> list[list[int]]:
        """As many other prompts with the prefix of `prompts(vocabulary, seed)`: whoever has served those has it."""
        before = self.prompts(vocabulary, seed)[0][: self.shared]
        return [before + prompt[self.shared :] for prompt in self.prompts(vocabulary, seed + OTHERS)]


PRESETS = {
    "A": Preset(requests=1, running=1, shortest=128, longest=128, shared=0, output=128),
    "B": Preset(requests=64, running=32, shortest=32, longest=256, shared=0, output=64),
    "C": Preset(requests=32, running=32, shortest=16, longest=16, shared=512, output=32),
    "D": Preset(requests=32, running=32, shortest=32, longest=256, shared=0, output=64),
}


def add_engine_arguments(parser: argparse.ArgumentParser, presets: str) -> None:
    """What the benchmarks share that run a model."""
    parser.add_argument("--preset", choices=list(presets), default=presets[0], help="the workload (%(default)s)")
    parser.add_argument("--model", default="smollm2", help="what `serve` takes as MODEL (default %(default)s)")
    parser.add_argument("--threads", type=threads, default=2, help="threads of the executor (default %(default)s)")
    parser.add_argument("--rounds", type=positive, default=3, help="measured rounds; medians are told (%(default)s)")
    parser.add_argument(
        "--quantization", choices=("auto", "none", "int8", "int4"), default="auto", help="as of `serve`"
    )
    parser.add_argument("--max-num-batched-tokens", type=positive, default=None, help="as of `serve`")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
