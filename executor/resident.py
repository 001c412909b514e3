"""Weights and K/V memory of an executor: placed on its device, given back in its sleep, exchanged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from leftfold.executor.config import ModelConfig
from leftfold.executor.errors import ModelError, PlanError
from leftfold.executor.memory import give_back
from leftfold.executor.models import quantized
from leftfold.executor.models.llama import KVMemory, Llama
from leftfold.executor.models.quantized import QuantizedLlama, QuantizedMemory
from leftfold.executor.weights import LoadedModel, load
from leftfold.kernels.registry import Kernels

SHAPE = (
    "family", "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
    "qk_norm", "windows",
)  # fmt: skip
"""What new weights must have in common with the old ones."""


AnyModel = Llama | QuantizedLlama
AnyMemory = KVMemory | QuantizedMemory


class Resident:
    """`model` and `memory`; using one that sleeps is a `PlanError`. `dtype`: of both, unless `quantization` is in
    `quantized.BITS`; `max_len`: of rows; `cache`: a folder for converted weights.

    Nothing of the model's files stays open, so a wake reads them again from where they were.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        kernels: Kernels,
        *,
        dtype: torch.dtype,
        device: str,
        max_len: int,
        num_pages: int,
        page_size: int,
        quantization: str = "none",
        cache: Path | None = None,
    ) -> None:
        self.config: ModelConfig = loaded.config
        self._cache = cache
        self.quantization = quantization
        self.source = loaded.source
        self._kernels, self._dtype, self._device, self._max_len = kernels, dtype, device, max_len
        self._num_pages, self._page_size = num_pages, page_size
        self._model: AnyModel | None = self._build(loaded)
        self._memory: AnyMemory | None = self._allocate()

    @property
    def model(self) -> AnyModel:
        if self._model is None:
            raise PlanError("the weights are asleep: wake them before any row runs")
        return self._model

    @property
    def memory(self) -> AnyMemory:
        if self._memory is None:
            raise PlanError("the KV memory is asleep: wake it before any row runs")
        return self._memory

    @property
    def asleep(self) -> tuple[str, ...]:
        """What sleeps now, of "weights" and "kv"."""
        parts = {"weights": self._model, "kv": self._memory}
        return tuple(tag for tag, part in parts.items() if part is None)

    def sleep(self, tags: Sequence[str]) -> dict[str, Any]:
        """Give back the memory of `tags`; sleeping twice is fine. Says how many bytes of tensors were let go."""
        freed = 0
        if "weights" in tags and self._model is not None:
            if self.source is None:
                raise ModelError("this model was not opened from a file, so it could not be loaded again")
            freed += self._model.nbytes
            self._model = None
        if "kv" in tags and self._memory is not None:
            freed += self._memory.nbytes
            self._memory = None
        give_back()
        return {"freed_bytes": freed}

    def wake(self, tags: Sequence[str]) -> dict[str, Any]:
        """Load and allocate what sleeps of `tags`; K/V comes back empty. What fails sleeps on."""
        if "weights" in tags and self._model is None:
            assert self.source is not None
            self._model = self._build(self._opened(self.source))
            give_back()
        if "kv" in tags and self._memory is None:
            self._memory = self._allocate()
        return {"asleep": list(self.asleep)}

    def clear(self) -> None:
        """Wake everything, with empty K/V."""
        if self._memory is not None:
            with torch.inference_mode():
                self._memory.clear()
        self.wake(("weights", "kv"))

    def update(self, source: str | Path) -> dict[str, Any]:
        """Take the weights of another checkpoint of the same shape; raises with the old ones in their place.

        The new ones are whole before the old ones go, so for a while both are there. Weights that sleep sleep on,
        and wake as the new ones.
        """
        loaded = self._opened(source)
        model = self._build(loaded)
        if self._model is not None:
            self._model = model
        self.config, self.source = loaded.config, loaded.source
        del model, loaded
        give_back()
        return {"source": str(self.source)}

    def _opened(self, source: str | Path) -> LoadedModel:
        loaded = load(source)
        for name in SHAPE:
            old, new = getattr(self.config, name), getattr(loaded.config, name)
            if old != new:
                raise ModelError(f"the weights at {source} have {name} = {new!r}; this engine's model has {old!r}")
        reach = loaded.config.max_positions
        if reach < self._max_len:
            raise ModelError(f"the weights at {source} reach {reach} positions; rows here reach {self._max_len}")
        return loaded

    def _build(self, loaded: LoadedModel) -> AnyModel:
        with torch.inference_mode():
            if self.quantization in quantized.BITS:
                model = quantized.build(loaded, self._max_len, self._cache, quantized.BITS[self.quantization])
                give_back()  # what the weights were made from
                return model
            return Llama(loaded, self._kernels, self._dtype, self._device, self._max_len)

    def _allocate(self) -> AnyMemory:
        with torch.inference_mode():
            if self.quantization in quantized.BITS:
                return QuantizedMemory(self.config, self._num_pages, self._page_size)
            return KVMemory(self.config, self._num_pages, self._page_size, self._dtype, self._device)
