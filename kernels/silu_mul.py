"""SiLU(gate) * up, the gated activation of the Llama family."""

from __future__ import annotations

import torch

from leftfold.kernels.registry import REGISTRY


@REGISTRY.register("silu_mul", "reference")
def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`gate_up` [tokens, 2 · size], the gate first: returns [tokens, size] in the same dtype.

    Composed of `exp` and a division on purpose: PyTorch's fused `silu` (and `sigmoid`) computes the last elements
    of a vectorised loop by another formula, so a value would depend on where in memory it lies, hence on the batch.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate / (1.0 + (-gate).exp()) * up).to(gate_up.dtype)
