"""A quantized model run by native code: its structures, and the calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from leftfold.executor.errors import ModelError
from leftfold.executor.models.llama import StepInput
from leftfold.executor.models.quantized.blocks import zeros
from leftfold.executor.models.quantized.memory import QuantizedMemory
from leftfold.executor.models.quantized.weights import Layer
from leftfold.kernels.cpu import native

if TYPE_CHECKING:
    from leftfold.executor.models.quantized.model import QuantizedLlama


class NativeRun:
    """The model's structures for native code, and the calls."""

    def __init__(self, model: QuantizedLlama, engine: native.Engine) -> None:
        self._engine, self._model = engine, model
        config, weights = model.config, model.weights
        self._layers = (native.LayerStruct * config.num_layers)(*map(_layer_struct, weights.layers))
        self._struct = native.ModelStruct(
            layers=config.num_layers, hidden=config.hidden_size, inner=config.intermediate_size,
            heads=config.num_heads, kv_heads=config.num_kv_heads, head_dim=config.head_dim,
            eps=config.rms_eps, score_scale=model.score_scale, layer=self._layers, norm=weights.norm.data_ptr(),
            cos=model.cos.data_ptr(), sin=model.sin.data_ptr(), embedding=native.LinearStruct.of(weights.embedding),
            head=native.LinearStruct.of(weights.head),
        )  # fmt: skip
        self._memory: QuantizedMemory | None = None
        self._scores = torch.empty(0)

    def forward(self, step: StepInput, memory: QuantizedMemory) -> torch.Tensor:
        if memory is not self._memory:
            self._point_at(memory)
        memory.used = True
        ids, layout = step.tokens, step.layout
        if not 0 <= int(ids.min()) <= int(ids.max()) < self._model.config.vocab_size:
            raise ModelError(f"token ids {int(ids.min())} to {int(ids.max())} are not all in the vocabulary")
        hidden = torch.empty(len(step.tokens), self._model.config.hidden_size)
        columns = [torch.from_numpy(column).contiguous() for column in (layout.starts, layout.lengths, layout.pages)]
        starts, lengths, pages = columns
        self._engine.forward(
            self._struct,
            native.StepStruct(
                tokens=len(step.tokens), rows=len(starts), ids=ids.data_ptr(),
                positions=step.positions.data_ptr(), places=step.places.data_ptr(), starts=starts.data_ptr(),
                lengths=lengths.data_ptr(), pages=pages.data_ptr(), widest=pages.shape[1], memory=self._places,
                hidden=hidden.data_ptr(),
            ),
        )  # fmt: skip
        return hidden

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        if len(hidden) > len(self._scores):  # fresh memory would be cleared first
            self._scores = zeros((len(hidden), self._model.config.vocab_size), torch.float32)
        out = self._scores[: len(hidden)]
        self._engine.scores(self._struct, hidden.contiguous(), out)
        return out

    def best(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, scores = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits))
        self._engine.best(logits, tokens, scores)
        return tokens, scores

    def _point_at(self, memory: QuantizedMemory) -> None:
        layers = self._model.config.num_layers
        self._places = (native.MemoryStruct * layers)(
            *(native.MemoryStruct(*(part[layer].data_ptr() for part in memory.tensors)) for layer in range(layers))
        )
        self._struct.page_size, self._struct.blocks = memory.page_size, memory.blocks
        self._memory = memory


def _layer_struct(layer: Layer) -> native.LayerStruct:
    linears = (native.LinearStruct.of(part) for part in (layer.qkv, layer.output, layer.gate_up, layer.down))
    norms = (layer.attention_norm, layer.q_norm, layer.k_norm, layer.mlp_norm)
    return native.LayerStruct(*map(native.pointer, norms), *linears, layer.window)
