"""Root-mean-square layer norm (Zhang and Sennrich, 2019), one reduction per row."""

from __future__ import annotations

import torch

from leftfold.kernels.registry import REGISTRY


@REGISTRY.register("rms_norm", "reference")
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x` [..., size] over its root mean square along the last dimension, times `weight` [size].

    The mean is taken in float32; the result has the dtype of `x`. A row's result does not depend on other rows.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight
