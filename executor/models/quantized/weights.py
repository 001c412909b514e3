"""Weights of a quantized model: made from a model's file, or taken from the cache."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from leftfold.executor.config import ModelConfig
from leftfold.executor.models.quantized import kept
from leftfold.executor.models.quantized.limits import BLOCK
from leftfold.executor.weights import LoadedModel
from leftfold.kernels.cpu.packing import Packed, pack, take_turns

logger = logging.getLogger("leftfold.executor")

FORMAT = 2
"""Of converted weights: another one for another way to quantize or to pack."""
LINEARS = ("qkv", "output", "gate_up", "down")
NORMS = ("attention_norm", "q_norm", "k_norm", "mlp_norm")


@dataclass(frozen=True, slots=True)
class Layer:
    """One block's weights; `qkv` fused along its output, in `gate_up` sixteen outputs of each take turns."""

    attention_norm: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    qkv: Packed
    output: Packed
    gate_up: Packed
    down: Packed
    window: int


@dataclass(frozen=True, slots=True)
class Weights:
    """All of a model. `head` is the very `embedding` where they are tied."""

    embedding: Packed
    head: Packed
    norm: torch.Tensor
    layers: tuple[Layer, ...]

    @property
    def nbytes(self) -> int:
        linears = [self.embedding, *([] if self.head is self.embedding else [self.head])]
        for layer in self.layers:
            linears += (layer.qkv, layer.output, layer.gate_up, layer.down)
        return sum(linear.nbytes for linear in linears)


def weights_of(model: LoadedModel, cache: Path | None, bits: int = 8) -> Weights:
    """Quantize a model's weights, or take them from `cache`, a folder. `bits`: of the blocks' matrices; the embedding
    and the head have 8."""
    file, found = None, None
    if cache is not None and (files := model.files()):
        file = cache / f"{kept.digest_of(files, FORMAT)}.int{bits}"
        found = kept.load(file)
    if found is not None:
        try:
            return _from_tensors(found, model.config)
        except (KeyError, ValueError) as error:
            logger.warning("%s is not used: it lacks %s", file, error)
    tensors = kept.together(as_tensors(_read(model, bits)))
    if file is not None:
        kept.save(file, tensors)
    return _from_tensors(tensors, model.config)


def as_tensors(weights: Weights) -> dict[str, torch.Tensor]:
    """All tensors by name, those of a layer under its number."""
    named: dict[str, torch.Tensor] = {"norm": weights.norm}
    _add(named, "embedding", weights.embedding)
    if weights.head is not weights.embedding:
        _add(named, "head", weights.head)
    for index, layer in enumerate(weights.layers):
        for name in LINEARS:
            _add(named, f"{index}.{name}", getattr(layer, name))
        for name in NORMS:
            if (norm := getattr(layer, name)) is not None:
                named[f"{index}.{name}"] = norm
    return named


def _add(named: dict[str, torch.Tensor], at: str, packed: Packed) -> None:
    named[f"{at}.weight"], named[f"{at}.scale"], named[f"{at}.offset"] = packed.weight, packed.scale, packed.offset
    if packed.bias is not None:
        named[f"{at}.bias"] = packed.bias


def _from_tensors(named: dict[str, torch.Tensor], config: ModelConfig) -> Weights:
    """The opposite of `as_tensors`. Raises KeyError or ValueError for tensors that are not this model's."""
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    sizes = {
        "qkv": (q_size + 2 * kv_size, hidden), "output": (hidden, q_size), "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
    }  # fmt: skip

    def packed(at: str, outputs: int, inputs: int) -> Packed:
        parts = (named[f"{at}.weight"], named[f"{at}.scale"], named[f"{at}.offset"], named.get(f"{at}.bias"))
        made = Packed(*parts, outputs, inputs)
        if not (0 <= made.blocks * BLOCK - outputs < 2 * BLOCK and 0 <= made.depth - inputs < 4 * BLOCK):
            raise ValueError(f"{at} of {outputs} × {inputs}")
        return made

    embedding = packed("embedding", config.vocab_size, hidden)
    head = packed("head", config.vocab_size, hidden) if "head.weight" in named else embedding
    layers = tuple(
        Layer(
            **{name: named.get(f"{index}.{name}") for name in NORMS},
            **{name: packed(f"{index}.{name}", *size) for name, size in sizes.items()},
            window=config.windows[index] or 0,
        )
        for index in range(config.num_layers)
    )
    return Weights(embedding, head, named["norm"], layers)


def _read(model: LoadedModel, bits: int) -> Weights:
    config = model.config
    embedding = pack(model.expect("model.embed_tokens.weight", config.vocab_size, config.hidden_size).float())
    head = embedding
    if not config.tied_embeddings and model.has("lm_head.weight"):
        head = pack(*_fused(model, ["lm_head"], [config.vocab_size], config.hidden_size))
    return Weights(
        embedding=embedding,
        head=head,
        norm=_vector(model, "model.norm.weight", config.hidden_size),
        layers=tuple(_read_layer(model, index, bits) for index in range(config.num_layers)),
    )


def _read_layer(model: LoadedModel, index: int, bits: int) -> Layer:
    config, at = model.config, f"model.layers.{index}."
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_heads * dim, config.num_kv_heads * dim
    qkv = _fused(model, [f"{at}self_attn.{name}_proj" for name in "qkv"], [q_size, kv_size, kv_size], hidden)
    halves = _fused(model, [f"{at}mlp.gate_proj", f"{at}mlp.up_proj"], [inner, inner], hidden)
    gate_up = [None if part is None else take_turns(part[:inner], part[inner:]) for part in halves]
    assert gate_up[0] is not None
    return Layer(
        attention_norm=_vector(model, f"{at}input_layernorm.weight", hidden),
        q_norm=_vector(model, f"{at}self_attn.q_norm.weight", dim) if config.qk_norm else None,
        k_norm=_vector(model, f"{at}self_attn.k_norm.weight", dim) if config.qk_norm else None,
        mlp_norm=_vector(model, f"{at}post_attention_layernorm.weight", hidden),
        qkv=pack(*qkv, bits),
        output=pack(*_fused(model, [f"{at}self_attn.o_proj"], [hidden], q_size), bits),
        gate_up=pack(gate_up[0], gate_up[1], bits),
        down=pack(*_fused(model, [f"{at}mlp.down_proj"], [hidden], inner), bits),
        window=config.windows[index] or 0,
    )


def _vector(model: LoadedModel, name: str, size: int) -> torch.Tensor:
    return model.expect(name, size).float().contiguous()


def _fused(
    model: LoadedModel, names: list[str], outputs: list[int], inputs: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weights and biases of projections of one input; those without a bias get zeros if another has one."""
    pairs = list(zip(names, outputs, strict=True))
    weights = [model.expect(f"{name}.weight", size, inputs).float() for name, size in pairs]
    if not any(model.has(f"{name}.bias") for name in names):
        return torch.cat(weights), None
    biases = [
        model.expect(f"{name}.bias", size).float() if model.has(f"{name}.bias") else torch.zeros(size)
        for name, size in pairs
    ]
    return torch.cat(weights), torch.cat(biases)
