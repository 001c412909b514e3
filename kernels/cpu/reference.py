"""The arithmetic of the quantized path in plain PyTorch: the definition, and what runs where nothing can be compiled.

Each function is a fixed sequence of IEEE single-precision operations, or exact in whole numbers, and gives the bits
that `src/` gives. Products of whole numbers go through floating-point GEMMs where every partial sum is exact.
"""

from __future__ import annotations

import numpy as np
import torch

EXACT = 512
"""Inputs per product: 255 · 127 · 512 < 2^24, so single precision holds every sum exactly, in any order."""
_POLYNOMIAL = (1.5403530e-4, 1.3333558e-3, 9.6181291e-3, 5.5504109e-2, 2.4022651e-1, 6.9314718e-1, 1.0)


def exp2(y: torch.Tensor) -> torch.Tensor:
    """2^y for y in [-125, 126]: a polynomial of degree 6 on the fraction, the exponent added as bits."""
    n = torch.round(y)
    f = y - n
    p = torch.full_like(f, _POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        p = p * f
        p = p + coefficient
    return (p.view(torch.int32) + (n.to(torch.int32) << 23)).view(torch.float32)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Over the root mean square along the last dimension (a multiple of 16), times `weight`; sums in sixteen lanes."""
    lanes = x.reshape(*x.shape[:-1], -1, 16)
    total = torch.zeros_like(lanes[..., 0, :])
    for index in range(lanes.shape[-2]):
        square = lanes[..., index, :] * lanes[..., index, :]
        total = total + square
    for width in (8, 4, 2, 1):
        total = total[..., :width] + total[..., width : 2 * width]
    # numpy's square root is the IEEE one; PyTorch's may be another library's, and off by a bit.
    root = torch.from_numpy(np.sqrt((total / float(x.shape[-1]) + eps).numpy()))
    scale = torch.ones_like(root) / root
    return (x * scale) * weight


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """SiLU(gate) · up."""
    y = gate * -1.4426950
    y = torch.where(y < -125.0, -125.0, y)
    y = torch.where(y > 126.0, 126.0, y)
    return (gate / (exp2(y) + 1.0)) * up


def quantize(x: torch.Tensor, most: float, bad: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of `x` [..., size] as whole numbers (float32) of magnitude up to `most`, and their scales [...].

    Rows of zeros, or so small that the inverse is infinite, become zeros; rows with a value that is not finite become
    zeros with the scale `bad`.
    """
    largest = x.abs().amax(-1, keepdim=True)
    finite = torch.isfinite(x).all(-1, keepdim=True)
    inverse = torch.full_like(largest, most) / largest
    usable = finite & (largest > 0) & (inverse <= 3.0e38)
    whole = torch.where(usable, torch.round(torch.where(usable, x, 0.0) * torch.where(usable, inverse, 0.0)), 0.0)
    scale = torch.where(usable, largest / most, torch.where(finite, 0.0, bad))
    return whole, scale[..., 0]


def split(whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`whole` = 256 · high + low with low in 0 … 255."""
    high = torch.floor(whole / 256.0)
    return high, whole - high * 256.0


def linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`x` [rows, inputs] (float32) with `weight` [outputs, inputs] (whole numbers in float32), `scale` [outputs].

    A row becomes whole numbers of magnitude up to 32,767 in two bytes; the sums of each byte are exact and become
    float32 once; then 256 · high + low, times (the row's scale · the output's), plus `bias`.
    """
    whole, x_scale = quantize(x, 32767.0, float("nan"))
    high, low = (_exact(part, weight) for part in split(whole))
    out = (high * 256.0 + low) * (x_scale[:, None] * scale[None, :])
    return out if bias is None else out + bias


def _exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The product of whole numbers, each sum rounded to float32 once."""
    total = None
    for at in range(0, x.shape[1], EXACT):
        part = (x[:, at : at + EXACT] @ weight[:, at : at + EXACT].T).to(torch.int32)
        total = part if total is None else total + part
    assert total is not None
    return total.float()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`x` [tokens, heads, head_dim] by `cos`, `sin` [tokens, head_dim], halves paired."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x * cos[:, None] + turned * sin[:, None]


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    key_scales: torch.Tensor,
    values: torch.Tensor,
    value_scales: torch.Tensor,
    start: int,
    score_scale: float,
    window: int,
) -> torch.Tensor:
    """One row: `query` [tokens, heads, head_dim] (rotated) at positions from `start`, over its own context.

    `keys`, `values` int8 [kv_heads, context, head_dim], scales [kv_heads, context]; `window` 0: sees all. As
    `src/attention.h` says. Returns [tokens, heads, head_dim].
    """
    tokens, heads, head_dim = query.shape
    kv_heads, context = key_scales.shape
    whole, scale = quantize(query, 16256.0, 0.0)
    scale = scale * score_scale
    grouped = whole.reshape(tokens, kv_heads, -1, head_dim).double()
    dots = torch.einsum("tkgd,kcd->tkgc", grouped, keys.double()).float()
    scores = (dots * key_scales[None, :, None]) * scale.reshape(tokens, kv_heads, -1, 1)
    at = torch.arange(start, start + tokens)[:, None]
    seen = torch.arange(context)[None, :]
    blocked = (seen > at) | (seen <= at - window) if window else seen > at
    scores = scores.masked_fill(blocked[:, None, None], float("-inf"))
    y = scores - scores.amax(-1, keepdim=True)
    weight = torch.where(y >= -125.0, exp2(y.clamp(min=-125.0)), 0.0)
    mass = torch.round(weight * 1048576.0).to(torch.int64).sum(-1).float() * (1.0 / 1048576.0)
    scaled = weight * value_scales[None, :, None]
    heavy = scaled.amax(-1)
    inverse = torch.full_like(heavy, 65535.0) / heavy
    usable = (heavy > 0) & (inverse < 3.0e38)
    whole = torch.round(scaled * torch.where(usable, inverse, 0.0)[..., None])
    high, low = (torch.einsum("tkgc,kcd->tkgd", part.double(), values.double()).float() for part in split(whole))
    factor = torch.where(usable, (heavy / 65535.0) / mass, 0.0)
    return ((high * 256.0 + low) * factor[..., None]).reshape(tokens, heads, head_dim)
