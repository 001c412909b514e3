"""The Llama family on a CPU with 8-bit weights, 16-bit activations and 8-bit keys and values.

A step is one call into native code, or the same arithmetic in PyTorch (`kernels.cpu.reference`) where none can be
compiled; both give the same bits.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from leftfold.executor.config import ModelConfig
from leftfold.executor.errors import ModelError
from leftfold.executor.models import converted
from leftfold.executor.models.llama import StepInput
from leftfold.executor.weights import LoadedModel
from leftfold.kernels.cpu import native, reference
from leftfold.kernels.cpu.packing import Packed, pack, take_turns
from leftfold.kernels.rotary import inverse_frequencies, rotary_table

logger = logging.getLogger("leftfold.executor")

BLOCK = 16
"""Tokens per block of K/V."""
FORMAT = 1
"""Of converted weights: another one for another way to quantize or to pack."""
LINEARS = ("qkv", "output", "gate_up", "down")
NORMS = ("attention_norm", "q_norm", "k_norm", "mlp_norm")
LONGEST = 65536
"""Positions up to which sums over a context are exact."""


def unsupported(config: ModelConfig, max_len: int) -> str:
    """Why a model cannot run quantized; empty if it can."""
    for name in ("hidden_size", "intermediate_size", "head_dim"):
        if getattr(config, name) % BLOCK:
            return f"its {name} {getattr(config, name)} is not a multiple of {BLOCK}"
    if config.head_dim > 256:
        return f"its head size {config.head_dim} is beyond 256"
    if config.num_heads // config.num_kv_heads > 16:
        return f"{config.num_heads // config.num_kv_heads} of its heads share a KV head, more than 16"
    if max_len > LONGEST:
        return f"rows may reach {max_len} positions, more than {LONGEST}"
    return ""


def weight_bytes(config: ModelConfig) -> int:
    """Bytes that the weights will take, without norms and biases."""
    heads = config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
    layer = config.hidden_size * (heads + 3 * config.intermediate_size)
    ends = 1 if config.tied_embeddings else 2
    return ends * config.vocab_size * config.hidden_size + config.num_layers * layer


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


class QuantizedMemory:
    """Keys and values of all layers in 8 bits, a scale per token and head, laid out as `src/attention.h` says."""

    def __init__(self, config: ModelConfig, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.blocks = -(-page_size // BLOCK)
        dim, each = config.head_dim, (config.num_layers, num_pages, config.num_kv_heads, self.blocks)
        self.keys = torch.zeros(*each, dim // 4, BLOCK, 4, dtype=torch.uint8)
        self.values = torch.zeros(*each, BLOCK // 4, dim, 4, dtype=torch.int8)
        self.key_scales, self.value_scales = torch.zeros(*each, BLOCK), torch.zeros(*each, BLOCK)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.keys, self.key_scales, self.values, self.value_scales

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self.tensors)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy whole pages, all reads before all writes."""
        for memory in self.tensors:
            memory[:, target] = memory[:, source]

    def clear(self) -> None:
        for memory in self.tensors:
            memory.zero_()

    def write(self, layer: int, places: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Quantize and store `keys`, `values` [tokens, kv_heads, head_dim]; `places`: page · page_size + offset.

        Rows that are not finite are stored as zeros: their page may go to somebody else.
        """
        page, offset = places // self.page_size, places % self.page_size
        block, lane = offset // BLOCK, offset % BLOCK
        k, k_scale = reference.quantize(keys, 127.0, 0.0)
        v, v_scale = reference.quantize(values, 127.0, 0.0)
        tokens, heads, dim = k.shape
        self.keys[layer, page, :, block, :, lane] = (k + 128).to(torch.uint8).reshape(tokens, heads, dim // 4, 4)
        self.values[layer, page, :, block, lane // 4, :, lane % 4] = v.to(torch.int8)
        self.key_scales[layer, page, :, block, lane] = k_scale
        self.value_scales[layer, page, :, block, lane] = v_scale

    def read(self, layer: int, pages: torch.Tensor, end: int) -> tuple[torch.Tensor, ...]:
        """The first `end` positions on `pages`: whole numbers [kv_heads, end, head_dim] and scales [kv_heads, end] of
        the keys, then of the values."""
        held = pages[: -(-end // self.page_size)]
        order = torch.arange(end)
        at = order // self.page_size * self.blocks * BLOCK + order % self.page_size
        heads = self.keys.shape[2]
        keys = self.keys[layer, held].permute(1, 0, 2, 4, 3, 5).reshape(heads, -1, 4 * self.keys.shape[4])
        values = self.values[layer, held].permute(1, 0, 2, 3, 5, 4).reshape(heads, -1, self.values.shape[5])
        scales = (s[layer, held].transpose(0, 1).reshape(heads, -1) for s in (self.key_scales, self.value_scales))
        k_scale, v_scale = scales
        return keys[:, at].to(torch.int16) - 128, k_scale[:, at], values[:, at], v_scale[:, at]

    @staticmethod
    def bytes_per_page(config: ModelConfig, page_size: int) -> int:
        places = -(-page_size // BLOCK) * BLOCK
        return 2 * config.num_layers * config.num_kv_heads * places * (config.head_dim + 4)


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
        """Scores over the vocabulary [rows, vocab_size] (float32) of hidden states [rows, hidden_size]."""
        return self._run.scores(hidden)

    def best(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each row of contiguous `logits`: the token of the largest score (the lowest of equals, int64), and it."""
        return self._run.best(logits)


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

    def forward(self, step: StepInput, memory: QuantizedMemory) -> torch.Tensor:
        if memory is not self._memory:
            self._point_at(memory)
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
        out = torch.empty(len(hidden), self._model.config.vocab_size)
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


class ReferenceRun:
    """The same arithmetic in PyTorch; holds the weights as float32 beside the packed ones."""

    def __init__(self, model: QuantizedLlama) -> None:
        self._model = model
        self._linears: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {}

    def forward(self, step: StepInput, memory: QuantizedMemory) -> torch.Tensor:
        model, config = self._model, self._model.config
        norm = lambda x, weight: reference.rms_norm(x, weight, config.rms_eps)  # noqa: E731
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


def build(model: LoadedModel, max_len: int, cache: Path | None = None) -> QuantizedLlama:
    """Quantize a model's weights, or take them from `cache`, a folder. Raises `ModelError` if it cannot run so."""
    config = model.config
    if reason := unsupported(config, max_len):
        raise ModelError(f"this model cannot be quantized, since {reason}: give --quantization none")
    speeds = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    if model.has("rope_freqs"):
        speeds = speeds / model.expect("rope_freqs", config.head_dim // 2)
    return QuantizedLlama(config, _weights(model, cache), *rotary_table(speeds, max_len))


def _weights(model: LoadedModel, cache: Path | None) -> Weights:
    file, kept = None, None
    if cache is not None and (files := model.files()):
        file = cache / f"{converted.digest_of(files, FORMAT)}.int8"
        kept = converted.load(file)
    if kept is not None:
        try:
            return _from_tensors(kept, model.config)
        except (KeyError, ValueError) as error:
            logger.warning("%s is not used: it lacks %s", file, error)
    tensors = converted.together(_as_tensors(_read(model)))
    if file is not None:
        converted.save(file, tensors)
    return _from_tensors(tensors, model.config)


def _as_tensors(weights: Weights) -> dict[str, torch.Tensor]:
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
    """The opposite of `_as_tensors`. Raises KeyError or ValueError for tensors that are not this model's."""
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


def _read(model: LoadedModel) -> Weights:
    config = model.config
    embedding = pack(model.expect("model.embed_tokens.weight", config.vocab_size, config.hidden_size).float())
    head = embedding
    if not config.tied_embeddings and model.has("lm_head.weight"):
        head = pack(*_fused(model, ["lm_head"], [config.vocab_size], config.hidden_size))
    return Weights(
        embedding=embedding,
        head=head,
        norm=_vector(model, "model.norm.weight", config.hidden_size),
        layers=tuple(_read_layer(model, index) for index in range(config.num_layers)),
    )


def _read_layer(model: LoadedModel, index: int) -> Layer:
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
        qkv=pack(*qkv),
        output=pack(*_fused(model, [f"{at}self_attn.o_proj"], [hidden], q_size)),
        gate_up=pack(gate_up[0], gate_up[1]),
        down=pack(*_fused(model, [f"{at}mlp.down_proj"], [hidden], inner)),
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
