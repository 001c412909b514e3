"""Rotary position embedding (Su et al., 2021) on half-split heads, and its tables with scaled frequencies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from leftfold.kernels.registry import REGISTRY


def inverse_frequencies(head_dim: int, theta: float, scaling: Mapping[str, Any] | None = None) -> torch.Tensor:
    """The rotation speeds [head_dim / 2] (float32, radians per position).

    `scaling`: None; {"type": "linear", "factor"}; {"type": "llama3", "factor", "low_freq_factor",
    "high_freq_factor", "original_max_position_embeddings"} (Llama 3.1's rule: long wavelengths are stretched by
    `factor`, short ones kept, those between interpolated). Raises `ValueError` for any other type.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    speeds = 1.0 / (theta**exponents)
    if scaling is None:
        return speeds
    if scaling["type"] == "linear":
        return speeds / float(scaling["factor"])
    if scaling["type"] == "llama3":
        return _stretch_long_waves(speeds, scaling)
    raise ValueError(f"rope scaling type {scaling['type']!r} is unknown; there are: linear, llama3")


def _stretch_long_waves(speeds: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    factor, low, high = (float(scaling[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original = float(scaling["original_max_position_embeddings"])
    wavelengths = 2 * math.pi / speeds
    share = (original / wavelengths - low) / (high - low)
    between = (1 - share) * speeds / factor + share * speeds
    stretched = torch.where(wavelengths > original / low, speeds / factor, speeds)
    inside = (wavelengths <= original / low) & (wavelengths >= original / high)
    return torch.where(inside, between, stretched)


def rotary_table(speeds: torch.Tensor, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [positions, head_dim] (float32), each half repeated, for positions 0 … positions - 1."""
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * speeds[None, :]
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


@REGISTRY.register("rotary", "reference")
def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate `x` [tokens, heads, head_dim] by `cos`, `sin` [tokens, head_dim] (float32); the dtype of `x` is kept."""
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (wide * cos[:, None, :] + turned * sin[:, None, :]).to(x.dtype)
