"""Weights in 4 bits: groups of 16 outputs × 32 inputs, whose bytes `src/nibbles.h` describes.

In a group each output has sixteen values, evenly spaced whole numbers of 8 bits but for rounding. A file whose weights
are in 4 bits already, in groups of 32 or of a multiple, has such values itself, and loses nothing but that rounding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

OUTPUTS, GROUP = 16, 32
FEWEST, MOST = 8, 15
"""Steps between the smallest and the largest value of a group: whichever number fits best. (In a file of 4 bits with a
scale but no offset, a group need not have all sixteen.)"""


def pack(units: torch.Tensor, depth: int) -> torch.Tensor:
    """`units` [outputs, inputs], float32 in -127 … 127: uint8 [outputs/16, depth/32, 320].

    `outputs` is a multiple of 16; `depth`, one of 32, may be beyond `inputs`.
    """
    padded = F.pad(units, (0, depth - units.shape[1]), mode="replicate")
    real = (torch.arange(depth) < units.shape[1]).view(-1, GROUP)
    groups = padded.view(len(units), -1, GROUP)
    low, step, index = _fitted(groups, real)
    m = torch.round(step * 256.0)
    b = torch.floor(low + 0.5)
    fraction = low + 0.5 - b
    c = torch.where(m > 0, torch.floor(fraction * 65536.0 / m.clamp(min=1.0)).clamp(max=255.0), 0.0)
    up = _fits_better(m, c, index, units=low - b, step=step)  # of tiny steps, whose c is at its end
    b, c = torch.where(up, b + 1.0, b), torch.where(up, 0.0, c)
    own = torch.stack((m % 256.0, torch.floor(m / 256.0), c, b % 256.0), dim=-1).to(torch.uint8)
    blocks, count = len(units) // OUTPUTS, len(real)
    halves = own.view(blocks, OUTPUTS, count, 2, 2).permute(0, 2, 3, 1, 4).reshape(blocks, count, 64)
    return torch.cat((_nibbles(index.view(blocks, OUTPUTS, count, GROUP)), halves), dim=-1)


def _fits_better(
    m: torch.Tensor, c: torch.Tensor, index: torch.Tensor, units: torch.Tensor, step: torch.Tensor
) -> torch.Tensor:
    """Where with a b that is one more, and no c, no weight of a group is as far off; `units + index · step`, less b."""
    wanted = units[..., None] + index * step[..., None]
    below = torch.floor((256.0 * index + c[..., None]) * m[..., None] / 65536.0) - wanted
    above = torch.floor(index * m[..., None] / 256.0) + 1.0 - wanted
    return above.abs().amax(-1) < below.abs().amax(-1)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The weights of `pack`'s groups: int8 [outputs, inputs]."""
    blocks, depth, _ = packed.shape
    two = packed[..., :256].view(blocks, depth, 4, OUTPUTS, 2, 2).to(torch.int32).flip(-1)
    index = torch.stack((two & 15, two >> 4), dim=3)  # [blocks, depth, 4, 2, outputs, 2, 2]
    index = index.permute(0, 4, 1, 2, 3, 5, 6).reshape(blocks, OUTPUTS, depth, GROUP)
    own = packed[..., 256:].view(blocks, depth, 2, OUTPUTS, 2).to(torch.int32).permute(2, 4, 0, 3, 1)[..., None]
    m, c, b = own[0, 0] + 256 * own[0, 1], own[1, 0], own[1, 1].to(torch.uint8).view(torch.int8)
    weights = (((256 * index + c) * m) >> 16) + b
    return weights.to(torch.int8).view(blocks * OUTPUTS, depth * GROUP)


def _fitted(groups: torch.Tensor, real: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each group its smallest value and step [outputs, groups], and how many steps from there [outputs, groups, 32].

    `real` [groups, 32]: which of them count.
    """
    low, high = groups.amin(-1), groups.amax(-1)
    from_low = groups - low[..., None]
    best: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    for count in range(MOST, FEWEST - 1, -1):
        step = (high - low) / count
        index = torch.round(from_low / step.clamp(min=1e-30)[..., None])
        error = (index * step[..., None] - from_low).square().mul(real).sum(-1)
        if best is None:
            best = error, step, index
        else:
            better = error < best[0]
            best = (
                torch.where(better, error, best[0]),
                torch.where(better, step, best[1]),
                torch.where(better[..., None], index, best[2]),
            )
    assert best is not None
    return low, best[1], best[2].to(torch.uint8)


def _nibbles(index: torch.Tensor) -> torch.Tensor:
    """`index` [blocks, 16, groups, 32] as the first 256 bytes of each group."""
    blocks, outputs, depth, _ = index.shape
    parts = index.view(blocks, outputs, depth, 4, 2, 2, 2).permute(0, 2, 3, 4, 1, 5, 6).flip(-1)
    return (parts[:, :, :, 0] | parts[:, :, :, 1] << 4).reshape(blocks, depth, 256)
