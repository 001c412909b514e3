"""Weights as 8-bit whole numbers with one scale per output channel, in the tiles that `src/linear.h` describes, or in
4 bits that become such (`nibbles`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from leftfold.kernels.cpu import nibbles

OUTPUTS, INPUTS = 16, 64
"""A tile: outputs × inputs."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A linear's weights. `weight` int8 [blocks, depth/64, 16, 16, 4], or uint8 [blocks, depth/32, 320] for 4 bits;
    `scale` float32, `offset` int32, `bias` float32 or None, each [blocks · 16]; `outputs`, `inputs`: without padding.
    `blocks` is even."""

    weight: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor
    bias: torch.Tensor | None
    outputs: int
    inputs: int

    @property
    def blocks(self) -> int:
        return self.weight.shape[0]

    @property
    def bits(self) -> int:
        return 4 if self.weight.dtype == torch.uint8 else 8

    @property
    def depth(self) -> int:
        return self.weight.shape[1] * (INPUTS if self.bits == 8 else nibbles.GROUP)

    @property
    def nbytes(self) -> int:
        tensors = (self.weight, self.scale, self.offset, self.bias)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def plain(self) -> torch.Tensor:
        """The weights as whole numbers of 8 bits: int8 [outputs, inputs]."""
        if self.bits == 4:
            rows = nibbles.unpack(self.weight)
        else:
            rows = self.weight.permute(0, 3, 1, 2, 4).reshape(self.blocks * OUTPUTS, self.depth)
        return rows[: self.outputs, : self.inputs]


def pack(weight: torch.Tensor, bias: torch.Tensor | None = None, bits: int = 8) -> Packed:
    """Quantize `weight` [outputs, inputs] (float32): each row over its largest magnitude, to -127 … 127, to nearest;
    in 4 `bits`, every 32 inputs of a row to sixteen values of these.

    A row with a value that is not finite gets a scale that is no number, so that whoever uses it finds out.
    """
    outputs, inputs = weight.shape
    most = weight.abs().amax(1, keepdim=True)
    finite = torch.isfinite(most)
    used = torch.where(finite, weight, 0.0)
    units = used * torch.where(finite & (most > 1e-30), 127.0 / most, 0.0)
    scale = torch.where(finite, torch.where(most > 1e-30, most / 127.0, 0.0), float("nan"))[:, 0]
    more, deeper = -outputs % (2 * OUTPUTS), -inputs % INPUTS
    if bits == 4:
        tiles = nibbles.pack(F.pad(units, (0, 0, 0, more)), inputs + deeper)
        sums = nibbles.unpack(tiles)[:, :inputs].sum(1, dtype=torch.int32)
    else:
        padded = F.pad(torch.round(units).to(torch.int8), (0, deeper, 0, more))
        tiles = padded.view(-1, OUTPUTS, padded.shape[1] // INPUTS, INPUTS // 4, 4).permute(0, 2, 3, 1, 4).contiguous()
        sums = padded.sum(1, dtype=torch.int32)
    return Packed(
        weight=tiles,
        scale=F.pad(scale, (0, more)).contiguous(),
        offset=(sums * 128).contiguous(),
        bias=None if bias is None else F.pad(bias.float(), (0, more)).contiguous(),
        outputs=outputs,
        inputs=inputs,
    )


def take_turns(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Rows of two tensors of one shape, sixteen of the first, sixteen of the second, and so on."""
    parts = [part.view(-1, OUTPUTS, *part.shape[1:]) for part in (first, second)]
    return torch.stack(parts, dim=1).reshape(2 * len(first), *first.shape[1:])
