"""Store new keys and values into the paged KV memory."""

from __future__ import annotations

import torch

from leftfold.kernels.registry import REGISTRY


@REGISTRY.register("kv_write", "reference")
def kv_write(memory: torch.Tensor, new: torch.Tensor, places: torch.Tensor) -> None:
    """Write `new` [tokens, kv_heads, head_dim] into `memory` [kv_heads, pages, page_size, head_dim].

    `places` [tokens] (int64): page · page_size + offset, no two alike. Values that are not finite are made finite:
    a masked position still takes part in a product with weight 0, and 0 · inf would reach the page's next owner.
    """
    heads, pages, page_size, head_dim = memory.shape
    flat = memory.view(heads, pages * page_size, head_dim)
    flat.index_copy_(1, places, torch.nan_to_num(new.transpose(0, 1)).to(memory.dtype))
