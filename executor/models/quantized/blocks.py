"""Memory on large pages: what is read all over at every step costs fewer look-ups of addresses there."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

PAGE = 1 << 21
_MADV_HUGEPAGE = 14


def block_of(size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Zeros: memory that begins at a large page, and that the system is asked to put on large pages."""
    room = np.zeros(size + PAGE, dtype=np.uint8)
    first = -room.ctypes.data % PAGE
    block = room[first : first + size]
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is not None and os.uname().sysname == "Linux":  # elsewhere the number means something else
        advise(ctypes.c_void_p(block.ctypes.data), ctypes.c_size_t(size), _MADV_HUGEPAGE)
    return block


def zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros in such memory."""
    block = block_of(math.prod(shape) * dtype.itemsize)
    return torch.from_numpy(block).view(dtype).view(*shape)
