"""The Llama family on a CPU with 8-bit weights, 16-bit activations and 8-bit keys and values.

A step is one call into native code, or the same arithmetic in PyTorch (`kernels.cpu.reference`) where none can be
compiled; both give the same bits.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path

import torch

from leftfold.executor.config import ModelConfig
from leftfold.executor.errors import ModelError
from leftfold.executor.models.llama import StepInput
from leftfold.executor.models.quantized.limits import unsupported
from leftfold.executor.models.quantized.memory import QuantizedMemory
from leftfold.executor.models.quantized.native_run import NativeRun
from leftfold.executor.models.quantized.reference_run import ReferenceRun
from leftfold.executor.models.quantized.weights import Weights, weights_of
from leftfold.executor.weights import LoadedModel
from leftfold.kernels.cpu import native
from leftfold.kernels.rotary import inverse_frequencies, rotary_table

logger = logging.getLogger("leftfold.executor")


class QuantizedLlama:
    """`forward` gives hidden states, `logits` the scores of those that sample; rows never influence each other."""

    def __init__(self, config: ModelConfig, weights: Weights, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self.config = config
        self.weights = weights
        self.nbytes = weights.nbytes
        self.cos, self.sin = cos.contiguous(), sin.contiguous()
        self.score_scale = config.head_dim**-0.5 * math.log2(math.e)
        self._run: NativeRun | ReferenceRun
        try:
            self._run = NativeRun(self, native.Engine(torch.get_num_threads()))
        except native.NativeError as error:
            logger.warning("slow but exact PyTorch code runs the model, since %s", error)
            self._run = ReferenceRun(self)

    def use(self, variant: str) -> None:
        """Run by a variant of the native code, or by "reference"; for tests, which compare their bits."""
        engine = None if variant == "reference" else native.Engine(torch.get_num_threads(), variant)
        self._run = ReferenceRun(self) if engine is None else NativeRun(self, engine)

    def forward(self, step: StepInput, memory: QuantizedMemory) -> torch.Tensor:
        """Compute all tokens of a step, writing their keys and values: [tokens, hidden_size], normed."""
        return self._run.forward(step, memory)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores over the vocabulary [rows, vocab_size] (float32) of hidden states [rows, hidden_size].

        They may lie where the next call puts its own.
        """
        return self._run.scores(hidden)

    def best(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each row of contiguous `logits`: the token of the largest score (the lowest of equals, int64), and it."""
        return self._run.best(logits)


def build(model: LoadedModel, max_len: int, cache: Path | None = None, bits: int = 8) -> QuantizedLlama:
    """Quantize a model's weights to 8 or 4 `bits`, or take them from `cache`, a folder.

    Raises `ModelError` if it cannot run so.
    """
    config = model.config
    if reason := unsupported(config, max_len):
        raise ModelError(f"this model cannot be quantized, since {reason}: give --quantization none")
    speeds = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    if model.has("rope_freqs"):
        speeds = speeds / model.expect("rope_freqs", config.head_dim // 2)
    return QuantizedLlama(config, weights_of(model, cache, bits), *rotary_table(speeds, max_len))
