"""Tiny random models of the Llama family, saved by transformers as safetensors; made anew for each test run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

SHAPE: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 96,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama-tied-llama3-rope": ("Llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}),
    "llama-linear-rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}, "head_dim": 64},
    ),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral-window": ("Mistral", {"sliding_window": 24, "head_dim": 128}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
}


def make(kind: str, folder: Path, *, shard: str = "5GB") -> transformers.PreTrainedModel:
    """Save a random model of `kind` into `folder` and return it, in float32 and evaluation mode.

    Norms and biases are random as well: at their initial ones and zeros a mistake there would not show.
    """
    family, fields = KINDS[kind]
    config = getattr(transformers, f"{family}Config")(**(SHAPE | fields))
    config._attn_implementation = "eager"
    torch.manual_seed(len(kind))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                weight.add_(torch.randn_like(weight) * 0.3)
            else:
                weight.mul_(6.0)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def edit_config(folder: Path, **fields: Any) -> None:
    """Change fields of a saved config.json; a value of None removes the field."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
