"""Memory that is free in the process goes back to the system, and how much of it the process holds."""

from __future__ import annotations

import ctypes
import gc
import os
import sys


def give_back() -> None:
    """Collect cycles, then let the allocators return what nothing uses: PyTorch's on CUDA, glibc's elsewhere."""
    gc.collect()
    torch = sys.modules.get("torch")  # a process without it has nothing there
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone has it, and alone needs it
    if trim is not None:
        trim(0)


def resident_bytes() -> int:
    """What the process holds of main memory (Linux; elsewhere OSError)."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
