"""The shape of a Llama-family model, read from a Hugging Face config.json or from GGUF metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from leftfold.executor.errors import ModelError

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
GGUF_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
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
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise ModelError(f"model configuration has {name} = {getattr(self, name)}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key-value heads")
        if self.head_dim < 2 or self.head_dim % 2:
            raise ModelError(f"head size {self.head_dim} cannot be rotated; it must be even")


def from_hugging_face(config: Mapping[str, Any]) -> ModelConfig:
    """The configuration in a config.json. Raises `ModelError` for what is missing or not supported."""
    family = _family(config)
    act = config.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise ModelError(f"activation {act!r} is not supported; the Llama family uses silu")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise ModelError(f"weights quantized by {method!r} are not supported; use full weights or a GGUF file")
    theta, scaling = _rope(config)
    try:
        hidden, heads, layers = (config[key] for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
        return ModelConfig(
            family=family,
            vocab_size=config["vocab_size"],
            hidden_size=hidden,
            intermediate_size=config["intermediate_size"],
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            rms_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            max_positions=config["max_position_embeddings"],
            tied_embeddings=config.get("tie_word_embeddings", False),
            qk_norm=family == "qwen3",
            windows=_windows(config, family, layers),
            eos_token_ids=_ids(config.get("eos_token_id")),
        )
    except KeyError as missing:
        raise ModelError(f"config.json lacks {missing.args[0]!r}") from None


def _family(config: Mapping[str, Any]) -> str:
    named = config.get("architectures") or []
    for name in named:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    if not named and config.get("model_type") in GGUF_ARCHITECTURES:
        return str(config["model_type"])
    found = ", ".join(named) or config.get("model_type") or "nothing"
    raise ModelError(f"config.json names {found} as architecture; supported: {', '.join(ARCHITECTURES)}")


def _rope(config: Mapping[str, Any]) -> tuple[float, Mapping[str, Any] | None]:
    """Base and scaling, from the older pair of keys or from the newer `rope_parameters`."""
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if float(config.get("partial_rotary_factor") or parameters.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelError("heads that are rotated in part only (partial_rotary_factor) are not supported")
    try:
        if kind == "default":
            return theta, None
        if kind == "linear":
            return theta, {"type": "linear", "factor": float(parameters["factor"])}
        if kind == "llama3":
            return theta, {"type": "llama3"} | {key: parameters[key] for key in _LLAMA3_KEYS}
    except KeyError as missing:
        raise ModelError(f"rope scaling {kind!r} lacks {missing.args[0]!r}") from None
    raise ModelError(f"rope scaling type {kind!r} is not supported; supported: default, linear, llama3")


def _windows(config: Mapping[str, Any], family: str, layers: int) -> tuple[int | None, ...]:
    """Mistral slides on every layer, Qwen only where switched on and only from layer `max_window_layers` up."""
    window = config.get("sliding_window")
    if not window or family == "llama" or (family != "mistral" and not config.get("use_sliding_window")):
        return (None,) * layers
    kinds = config.get("layer_types")
    if kinds:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    first = 0 if family == "mistral" else config.get("max_window_layers", layers)
    return tuple(window if layer >= first else None for layer in range(layers))


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (int(value),)


def from_gguf(fields: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> ModelConfig:
    """The configuration in GGUF metadata. `tensors`: name to shape (rows first). Raises `ModelError`."""
    family = fields.get("general.architecture")
    if family not in GGUF_ARCHITECTURES:
        raise ModelError(f"GGUF architecture {family!r} is not supported; supported: {', '.join(GGUF_ARCHITECTURES)}")

    def get(key: str, default: Any = None) -> Any:
        value = fields.get(f"{family}.{key}", default)
        if value is None:
            raise ModelError(f"GGUF metadata lacks '{family}.{key}'")
        return value

    heads, hidden, layers = get("attention.head_count"), get("embedding_length"), get("block_count")
    head_dim = get("attention.key_length", hidden // heads)
    if get("rope.dimension_count", head_dim) != head_dim:
        raise ModelError(f"GGUF rotates {get('rope.dimension_count')} of {head_dim} elements per head: not supported")
    if "token_embd.weight" not in tensors:
        raise ModelError("GGUF file lacks the tensor 'token_embd.weight'")
    window = fields.get(f"{family}.attention.sliding_window") or None
    eos = fields.get("tokenizer.ggml.eos_token_id")
    return ModelConfig(
        family=family,
        vocab_size=tensors["token_embd.weight"][0],
        hidden_size=hidden,
        intermediate_size=get("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=get("attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_eps=float(get("attention.layer_norm_rms_epsilon")),
        rope_theta=float(get("rope.freq_base", 10000.0)),
        rope_scaling=_gguf_scaling(fields, family),
        max_positions=get("context_length"),
        tied_embeddings="output.weight" not in tensors,
        qk_norm=family == "qwen3",
        windows=(window,) * layers,
        eos_token_ids=_ids(eos),
    )


def _gguf_scaling(fields: Mapping[str, Any], family: str) -> Mapping[str, Any] | None:
    kind = fields.get(f"{family}.rope.scaling.type") or "none"
    if kind == "none":
        return None
    if kind == "linear":
        return {"type": "linear", "factor": float(fields[f"{family}.rope.scaling.factor"])}
    raise ModelError(f"rope scaling type {kind!r} is not supported; supported: none, linear")
