"""A quantized model run by PyTorch, bit for bit as native code does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from leftfold.executor.models.llama import StepInput
from leftfold.executor.models.quantized.limits import BLOCK
from leftfold.executor.models.quantized.memory import QuantizedMemory
from leftfold.kernels.cpu import reference
from leftfold.kernels.cpu.packing import Packed

if TYPE_CHECKING:
    from leftfold.executor.models.quantized.model import QuantizedLlama


class ReferenceRun:
    """The same arithmetic in PyTorch; holds the weights as float32 beside the packed ones."""

    def __init__(self, model: QuantizedLlama) -> None:
        self._model = model
        self._linears: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {}

    def forward(self, step: StepInput, memory: QuantizedMemory) -> torch.Tensor:
        model, config = self._model, self._model.config
        norm = partial(reference.rms_norm, eps=config.rms_eps)
        embedding = model.weights.embedding
        x = embedding.plain()[step.tokens].float() * embedding.scale[step.tokens, None]
        cos, sin = model.cos[step.positions], model.sin[step.positions]
        sizes = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        for index, layer in enumerate(model.weights.layers):
            fused = self._linear(layer.qkv)(norm(x, layer.attention_norm)).view(len(x), -1, config.head_dim)
            q, k, v = fused.split(sizes, dim=1)
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k = norm(q, layer.q_norm), norm(k, layer.k_norm)
            memory.write(index, step.places, reference.rotate(k, cos, sin), v)
            seen = self._attend(reference.rotate(q, cos, sin), index, layer.window, step, memory)
            x = x + self._linear(layer.output)(seen.flatten(1))
            turns = self._linear(layer.gate_up)(norm(x, layer.mlp_norm)).view(len(x), -1, 2, BLOCK)
            acted = reference.silu_mul(turns[:, :, 0].flatten(1), turns[:, :, 1].flatten(1))
            x = x + self._linear(layer.down)(acted)
        return norm(x, model.weights.norm)

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._linear(self._model.weights.head)(hidden)

    def best(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return logits.argmax(-1), logits.amax(-1)

    def _attend(
        self, query: torch.Tensor, index: int, window: int, step: StepInput, memory: QuantizedMemory
    ) -> torch.Tensor:
        layout, done, out = step.layout, 0, []
        for start, length, pages in zip(layout.starts.tolist(), layout.lengths.tolist(), layout.pages, strict=True):
            k, k_scale, v, v_scale = memory.read(index, torch.from_numpy(pages), start + length)
            own = query[done : done + length]
            out.append(reference.attend(own, k, k_scale, v, v_scale, start, self._model.score_scale, window))
            done += length
        return torch.cat(out)

    def _linear(self, packed: Packed) -> Callable[[torch.Tensor], torch.Tensor]:
        if id(packed) not in self._linears:
            weight, scale = packed.plain().float(), packed.scale[: packed.outputs]
            bias = None if packed.bias is None else packed.bias[: packed.outputs]
            self._linears[id(packed)] = lambda x: reference.linear(x, weight, scale, bias)
        return self._linears[id(packed)]
