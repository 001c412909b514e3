"""Which models can run quantized, and what they take."""

from __future__ import annotations

from leftfold.executor.config import ModelConfig

BITS = {"int8": 8, "int4": 4}
"""Ways to quantize, and the bits of a weight. (In a group of 32, 4 bits take 5 with what the group has of its own.)"""
BLOCK = 16
"""Tokens per block of K/V; what sizes of a model must be multiples of."""
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


def weight_bytes(config: ModelConfig, bits: int) -> int:
    """Bytes that weights of 8 or 4 bits will take, without norms and biases."""
    heads = config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
    layer = config.hidden_size * (heads + 3 * config.intermediate_size)
    ends = 1 if config.tied_embeddings else 2
    return ends * config.vocab_size * config.hidden_size + config.num_layers * layer * (8 if bits == 8 else 5) // 8
