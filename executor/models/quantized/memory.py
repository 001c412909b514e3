"""Pages of 8-bit keys and values."""

from __future__ import annotations

import torch

from leftfold.executor.config import ModelConfig
from leftfold.executor.models.quantized.blocks import zeros
from leftfold.executor.models.quantized.limits import BLOCK
from leftfold.kernels.cpu import reference


class QuantizedMemory:
    """Keys and values of all layers in 8 bits, a scale per token and head, laid out as `src/attention.h` says."""

    def __init__(self, config: ModelConfig, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.used = False
        """Whether anything was written: what was not takes no memory yet, and must not for being cleared."""
        self.blocks = -(-page_size // BLOCK)
        dim, each = config.head_dim, (config.num_layers, num_pages, config.num_kv_heads, self.blocks)
        self.keys = zeros((*each, dim // 4, BLOCK, 4), torch.uint8)
        self.values = zeros((*each, BLOCK // 4, dim, 4), torch.int8)
        self.key_scales, self.value_scales = (zeros((*each, BLOCK), torch.float32) for _ in range(2))

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.keys, self.key_scales, self.values, self.value_scales

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self.tensors)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy whole pages, all reads before all writes."""
        for memory in self.tensors:
            memory[:, target] = memory[:, source]

    def clear(self) -> None:
        if self.used:
            for memory in self.tensors:
                memory.zero_()

    def write(self, layer: int, places: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Quantize and store `keys`, `values` [tokens, kv_heads, head_dim]; `places`: page · page_size + offset.

        Rows that are not finite are stored as zeros: their page may go to somebody else.
        """
        self.used = True
        page, offset = places // self.page_size, places % self.page_size
        block, lane = offset // BLOCK, offset % BLOCK
        k, k_scale = reference.quantize(keys, 127.0, 0.0)
        v, v_scale = reference.quantize(values, 127.0, 0.0)
        tokens, heads, dim = k.shape
        self.keys[layer, page, :, block, :, lane] = (k + 128).to(torch.uint8).reshape(tokens, heads, dim // 4, 4)
        self.values[layer, page, :, block, lane // 4, :, lane % 4] = v.to(torch.int8)
        self.key_scales[layer, page, :, block, lane] = k_scale
        self.value_scales[layer, page, :, block, lane] = v_scale

    def read(self, layer: int, pages: torch.Tensor, end: int) -> tuple[torch.Tensor, ...]:
        """The first `end` positions on `pages`: whole numbers [kv_heads, end, head_dim] and scales [kv_heads, end] of
        the keys, then of the values."""
        held = pages[: -(-end // self.page_size)]
        order = torch.arange(end)
        at = order // self.page_size * self.blocks * BLOCK + order % self.page_size
        heads = self.keys.shape[2]
        keys = self.keys[layer, held].permute(1, 0, 2, 4, 3, 5).reshape(heads, -1, 4 * self.keys.shape[4])
        values = self.values[layer, held].permute(1, 0, 2, 3, 5, 4).reshape(heads, -1, self.values.shape[5])
        scales = (s[layer, held].transpose(0, 1).reshape(heads, -1) for s in (self.key_scales, self.value_scales))
        k_scale, v_scale = scales
        return keys[:, at].to(torch.int16) - 128, k_scale[:, at], values[:, at], v_scale[:, at]

    @staticmethod
    def bytes_per_page(config: ModelConfig, page_size: int) -> int:
        places = -(-page_size // BLOCK) * BLOCK
        return 2 * config.num_layers * config.num_kv_heads * places * (config.head_dim + 4)
