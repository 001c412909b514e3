"""The Llama family (Llama, SmolLM2, Mistral, Qwen2, Qwen3) over paged keys and values, driven by `ModelConfig`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from leftfold.executor.config import ModelConfig
from leftfold.executor.weights import LoadedModel
from leftfold.kernels.attention import PagedLayout
from leftfold.kernels.linear import Linear
from leftfold.kernels.registry import Kernels
from leftfold.kernels.rotary import inverse_frequencies, rotary_table


@dataclass(frozen=True, slots=True)
class Layer:
    """One block's weights; `qkv` and `gate_up` are fused along their output."""

    attention_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class StepInput:
    """The tokens of a step, flat in row order: ids, absolute positions and places in KV memory, each [tokens] int64."""

    tokens: torch.Tensor
    positions: torch.Tensor
    places: torch.Tensor
    layout: PagedLayout


class KVMemory:
    """Keys and values of all layers, each [kv_heads, pages, page_size, head_dim]; zeroed, so never NaN."""

    def __init__(self, config: ModelConfig, num_pages: int, page_size: int, dtype: torch.dtype, device: str) -> None:
        shape = (config.num_kv_heads, num_pages, page_size, config.head_dim)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy whole pages, all reads before all writes."""
        for memory in (*self.keys, *self.values):
            memory[:, target] = memory[:, source]

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in (*self.keys, *self.values))

    def clear(self) -> None:
        for memory in (*self.keys, *self.values):
            memory.zero_()

    @staticmethod
    def bytes_per_page(config: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
        return 2 * config.num_layers * config.num_kv_heads * page_size * config.head_dim * dtype.itemsize


class Llama:
    """`forward` gives hidden states, `logits` the scores of those that sample; rows never influence each other."""

    def __init__(self, model: LoadedModel, kernels: Kernels, dtype: torch.dtype, device: str, max_len: int) -> None:
        self.config = model.config
        self.nbytes = 0
        """Bytes of the weights (a head tied to the embedding counts twice: most products pack their own copy)."""
        self._model, self._kernels, self._dtype, self._device = model, kernels, dtype, device
        config = self.config
        self.embedding = self._weight("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.norm = self._weight("model.norm.weight", config.hidden_size)
        if config.tied_embeddings or not model.has("lm_head.weight"):
            self.head = self._prepare(self.embedding, None)
            self.nbytes += self.embedding.nbytes
        else:
            self.head = self._linear(["lm_head"], [config.vocab_size], config.hidden_size)
        self.layers = [self._layer(f"model.layers.{index}.") for index in range(config.num_layers)]
        self.cos, self.sin = self._rotation(max_len)
        self._attention = kernels.get("attention", head_dim=config.head_dim)
        self._kv_write, self._silu_mul = kernels.get("kv_write"), kernels.get("silu_mul")
        self._rms_norm, self._rotary = kernels.get("rms_norm"), kernels.get("rotary")
        del self._model, self._kernels  # with them go the mappings of the model's files

    def forward(self, step: StepInput, memory: KVMemory) -> torch.Tensor:
        """Compute all tokens of a step, writing their keys and values: [tokens, hidden_size], normed."""
        config, eps = self.config, self.config.rms_eps
        cos, sin = self.cos[step.positions], self.sin[step.positions]
        x = self.embedding[step.tokens]
        for layer, keys, values, window in zip(self.layers, memory.keys, memory.values, config.windows, strict=True):
            q, k, v = self._project(layer, self._rms_norm(x, layer.attention_norm, eps))
            self._kv_write(keys, self._rotary(k, cos, sin), step.places)
            self._kv_write(values, v, step.places)
            seen = self._attention(
                self._rotary(q, cos, sin), keys, values, step.layout, config.head_dim**-0.5, window=window
            )
            x = x + layer.output(seen.flatten(1))
            x = x + layer.down(self._silu_mul(layer.gate_up(self._rms_norm(x, layer.mlp_norm, eps))))
        return self._rms_norm(x, self.norm, eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores over the vocabulary [rows, vocab_size] (float32) of hidden states [rows, hidden_size]."""
        return self.head(hidden).float()

    def best(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each row of `logits`: the token of the largest score (the lowest of equals, int64), and the score."""
        return logits.argmax(-1), logits.amax(-1)

    def _project(self, layer: Layer, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        config = self.config
        fused = layer.qkv(x).view(len(x), -1, config.head_dim)
        q, k, v = fused.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = self._rms_norm(q, layer.q_norm, config.rms_eps)
            k = self._rms_norm(k, layer.k_norm, config.rms_eps)
        return q, k, v

    def _layer(self, at: str) -> Layer:
        config = self.config
        hidden, inner = config.hidden_size, config.intermediate_size
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv = [f"{at}self_attn.{name}_proj" for name in "qkv"]
        gate_up = [f"{at}mlp.gate_proj", f"{at}mlp.up_proj"]
        norm = (config.head_dim,)
        return Layer(
            attention_norm=self._weight(f"{at}input_layernorm.weight", hidden),
            qkv=self._linear(qkv, [q_size, kv_size, kv_size], hidden),
            q_norm=self._weight(f"{at}self_attn.q_norm.weight", *norm) if config.qk_norm else None,
            k_norm=self._weight(f"{at}self_attn.k_norm.weight", *norm) if config.qk_norm else None,
            output=self._linear([f"{at}self_attn.o_proj"], [hidden], q_size),
            mlp_norm=self._weight(f"{at}post_attention_layernorm.weight", hidden),
            gate_up=self._linear(gate_up, [inner, inner], hidden),
            down=self._linear([f"{at}mlp.down_proj"], [hidden], inner),
        )

    def _weight(self, name: str, *shape: int) -> torch.Tensor:
        weight = self._model.expect(name, *shape).to(self._device, self._dtype)
        self.nbytes += weight.nbytes
        return weight

    def _linear(self, names: list[str], outputs: list[int], inputs: int) -> Linear:
        """Fuse projections of one input into one product; those without a bias get zeros if another has one."""
        weights = [self._weight(f"{name}.weight", size, inputs) for name, size in zip(names, outputs, strict=True)]
        biased = any(self._model.has(f"{name}.bias") for name in names)
        biases = [
            self._weight(f"{name}.bias", size) if self._model.has(f"{name}.bias") else weights[0].new_zeros(size)
            for name, size in zip(names, outputs, strict=True)
        ]
        return self._prepare(torch.cat(weights), torch.cat(biases) if biased else None)

    def _prepare(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        prepare = self._kernels.get("linear", outputs=weight.shape[0], inputs=weight.shape[1])
        return prepare(weight, bias)

    def _rotation(self, max_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        config = self.config
        speeds = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        if self._model.has("rope_freqs"):
            speeds = speeds / self._model.expect("rope_freqs", config.head_dim // 2)
        cos, sin = rotary_table(speeds, max_len)
        return cos.to(self._device), sin.to(self._device)
