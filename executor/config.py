"""The shape of a Llama-family model, read from a Hugging Face config.json or from GGUF metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from leftfold.executor.errors import ModelError
from leftfold.executor.fields import Fields

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
GGUF_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
MOST_LAYERS = 10_000
_LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What the model code needs to know; sizes in elements. `windows`: per layer, how far back a token sees, or None.

    `rope_scaling`: None or {"type": "linear" | "llama3", …}, see `kernels.rotary.inverse_frequencies`.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    max_positions: int
    tied_embeddings: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "max_positions",
        ):
            if getattr(self, name) < 1:
                raise ModelError(f"model configuration has {name} = {getattr(self, name)}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key-value heads")
        if self.head_dim < 2 or self.head_dim % 2:
            raise ModelError(f"head size {self.head_dim} cannot be rotated; it must be even")


def from_hugging_face(config: Mapping[str, Any]) -> ModelConfig:
    """The configuration in a config.json. Raises `ModelError` for what is missing, malformed or not supported."""
    fields = Fields(config, "config.json")
    family = _family(fields)
    act = fields.text("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise ModelError(f"activation {act!r} is not supported; the Llama family uses silu")
    if quantization := fields.part("quantization_config"):
        method = quantization.text("quant_method", "unknown")
        raise ModelError(f"weights quantized by {method!r} are not supported; use full weights or a GGUF file")
    theta, scaling = _rope(fields)
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    layers = fields.count("num_hidden_layers", most=MOST_LAYERS)
    return ModelConfig(
        family=family,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=fields.count("num_key_value_heads", heads),
        head_dim=fields.count("head_dim", hidden // heads),
        rms_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_positions=fields.count("max_position_embeddings"),
        tied_embeddings=fields.flag("tie_word_embeddings"),
        qk_norm=family == "qwen3",
        windows=_windows(fields, family, layers),
        eos_token_ids=fields.ids("eos_token_id"),
    )


def _family(fields: Fields) -> str:
    named = fields.texts("architectures")
    for name in named:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    kind = fields.text("model_type", "")
    if not named and kind in GGUF_ARCHITECTURES:
        return kind
    found = ", ".join(named) or kind or "nothing"
    raise ModelError(f"config.json names {found} as architecture; supported: {', '.join(ARCHITECTURES)}")


def _rope(fields: Fields) -> tuple[float, Mapping[str, Any] | None]:
    """Base and scaling, from the older pair of keys or from the newer `rope_parameters`."""
    parameters = fields.part("rope_parameters") or fields.part("rope_scaling") or Fields({}, "rope_parameters")
    theta = parameters.number("rope_theta", fields.number("rope_theta", 10000.0))
    kind = parameters.text("rope_type", parameters.text("type", "default"))
    if fields.number("partial_rotary_factor", parameters.number("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError("heads that are rotated in part only (partial_rotary_factor) are not supported")
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, {"type": "linear", "factor": parameters.number("factor")}
    if kind == "llama3":
        scaling = {key: parameters.number(key) for key in _LLAMA3_KEYS}
        if scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
            raise ModelError(f"rope scaling llama3 has low_freq_factor not below high_freq_factor: {scaling}")
        return theta, {"type": "llama3"} | scaling
    raise ModelError(f"rope scaling type {kind!r} is not supported; supported: default, linear, llama3")


def _windows(fields: Fields, family: str, layers: int) -> tuple[int | None, ...]:
    """Mistral slides on every layer, Qwen only where switched on and only from layer `max_window_layers` up."""
    window = fields.count("sliding_window", 0, least=0)
    if not window or family == "llama" or (family != "mistral" and not fields.flag("use_sliding_window")):
        return (None,) * layers
    kinds = fields.texts("layer_types")
    if kinds and len(kinds) != layers:
        raise ModelError(f"config.json has {len(kinds)} layer_types for {layers} layers")
    if kinds:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    first = 0 if family == "mistral" else fields.count("max_window_layers", layers, least=0)
    return tuple(window if layer >= first else None for layer in range(layers))


def from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> ModelConfig:
    """The configuration in GGUF metadata. `tensors`: name to shape (rows first). Raises `ModelError`."""
    fields = Fields(metadata, "GGUF metadata")
    family = fields.text("general.architecture", "")
    if family not in GGUF_ARCHITECTURES:
        raise ModelError(f"GGUF architecture {family!r} is not supported; supported: {', '.join(GGUF_ARCHITECTURES)}")
    heads, hidden = fields.count(f"{family}.attention.head_count"), fields.count(f"{family}.embedding_length")
    layers = fields.count(f"{family}.block_count", most=MOST_LAYERS)
    head_dim = fields.count(f"{family}.attention.key_length", hidden // heads)
    rotated = fields.count(f"{family}.rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise ModelError(f"GGUF rotates {rotated} of {head_dim} elements per head: not supported")
    if len(tensors.get("token_embd.weight", ())) != 2:
        raise ModelError("GGUF file lacks the tensor 'token_embd.weight'")
    window = fields.count(f"{family}.attention.sliding_window", 0, least=0) or None
    return ModelConfig(
        family=family,
        vocab_size=tensors["token_embd.weight"][0],
        hidden_size=hidden,
        intermediate_size=fields.count(f"{family}.feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=fields.count(f"{family}.attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_eps=fields.number(f"{family}.attention.layer_norm_rms_epsilon"),
        rope_theta=fields.number(f"{family}.rope.freq_base", 10000.0),
        rope_scaling=_gguf_scaling(fields, family),
        max_positions=fields.count(f"{family}.context_length"),
        tied_embeddings="output.weight" not in tensors,
        qk_norm=family == "qwen3",
        windows=(window,) * layers,
        eos_token_ids=fields.ids("tokenizer.ggml.eos_token_id"),
    )


def _gguf_scaling(fields: Fields, family: str) -> Mapping[str, Any] | None:
    kind = fields.text(f"{family}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return {"type": "linear", "factor": fields.number(f"{family}.rope.scaling.factor")}
    raise ModelError(f"rope scaling type {kind!r} is not supported; supported: none, linear")
