"""Matrix product with a weight, such that a row's result does not depend on how many rows there are.

A GEMM library picks its algorithm by shape, and with it the order of a row's sums. So every implementation here
lets the library see only a few row counts, and proves at load (`invariant`) that they all agree bitwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from leftfold.kernels.registry import REGISTRY

Linear = Callable[[torch.Tensor], torch.Tensor]

TILE = 16
BLOCKS = (4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


@REGISTRY.register("linear", "reference")
def tiled_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """A function of x [rows, in] that returns x · weightᵀ + bias; `weight` [out, in], `bias` [out].

    `F.linear` always sees exactly 16 rows (the last tile is padded): one shape, hence one order of sums.
    """

    def apply(x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        padded = F.pad(x, (0, 0, 0, -rows % TILE))
        tiles = [F.linear(tile, weight, bias) for tile in padded.split(TILE)]
        return (tiles[0] if len(tiles) == 1 else torch.cat(tiles))[:rows]

    return apply


def _has_onednn(shape: Mapping[str, int]) -> bool:
    return bool(torch.backends.mkldnn.is_available()) and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@REGISTRY.register("linear", "onednn", devices=("cpu",), dtypes=("float32", "bfloat16"), fits=_has_onednn)
def packed_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """As `tiled_linear`, with the weight packed once by oneDNN: twice as fast for few rows, as fast for many.

    oneDNN sums a row in the same order from 2 rows up, whatever their number; at 1 row it takes another kernel.
    So a call sees the next of `BLOCKS` rows (also because each row count compiles its own kernel). Where the proof
    fails, which no machine has shown yet, the reference is used instead.
    """
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)

    def product(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")

    widest = BLOCKS[-1] if weight.shape[0] <= 16384 else 64
    apply = _in_blocks(product, widest)
    if not invariant(product, weight.shape, weight.dtype, tuple(size for size in BLOCKS if size <= widest)):
        return tiled_linear(weight, bias)
    return apply


def _in_blocks(product: Linear, widest: int) -> Linear:
    size_for = [next(size for size in BLOCKS if size >= rows) for rows in range(widest + 1)]

    def apply(x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        if rows > widest:
            return torch.cat([apply(block) for block in x.split(widest)])
        size = size_for[rows]
        if size == rows:
            return product(x.contiguous())
        return product(F.pad(x, (0, 0, 0, size - rows)))[:rows]

    return apply


_PROVEN: dict[tuple[object, ...], bool] = {}


def invariant(product: Linear, shape: torch.Size, dtype: torch.dtype, sizes: tuple[int, ...]) -> bool:
    """Whether `product` gives each row the same bits for every row count in `sizes` (asked once per weight shape)."""
    key = (shape, dtype, sizes, torch.get_num_threads())
    if key not in _PROVEN:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(sizes[-1], shape[1], generator=generator).to(dtype)
        whole = product(x)
        _PROVEN[key] = all(torch.equal(product(x[:size].contiguous()), whole[:size]) for size in sizes) and all(
            torch.equal(product(x[first : first + sizes[0]].contiguous()), whole[first : first + sizes[0]])
            for first in (sizes[0], sizes[-1] - sizes[0])
        )
    return _PROVEN[key]
