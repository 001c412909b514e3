"""Tensors in one block of memory on large pages, and kept in a file, so that a second start converts nothing.

A file is one line of JSON (`tensors`: name to dtype, shape and place; `size` and `sha256` of the data) and, from the
next multiple of 64 bytes on, the data. What does not match its checksum is not used.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from leftfold.executor.models.quantized.blocks import block_of

logger = logging.getLogger("leftfold.executor")

ALIGNED = 64
_DTYPES = {"int8": torch.int8, "uint8": torch.uint8, "int32": torch.int32, "float32": torch.float32}


def together(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of all, one after the other in one block of memory."""
    places, size = _places(tensors)
    block = block_of(size)
    views = _views(block, places)
    for name, view in views.items():
        view.copy_(tensors[name])
    return views


def save(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Keep tensors that `together` made; says so and goes on where that cannot be."""
    places, size = _places(tensors)
    block = _whole(tensors, size)
    head = {"tensors": places, "size": size, "sha256": hashlib.sha256(block).hexdigest()}
    line = json.dumps(head).encode() + b"\n"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, prefix=".part-", delete=False) as part:
            try:
                part.write(line + b"\0" * (-len(line) % ALIGNED))
                part.write(block)
                part.flush()
                os.replace(part.name, file)
            except OSError:
                os.unlink(part.name)  # or it would take up a disk that is full
                raise
    except OSError as error:
        logger.warning("the converted weights cannot be kept in %s: %s", file.parent, error)


def load(file: Path) -> dict[str, torch.Tensor] | None:
    """The tensors of a file; None where there is none, or one that is damaged, which is said."""
    try:
        with file.open("rb") as opened:
            line = opened.readline()
            head: dict[str, Any] = json.loads(line)
            opened.seek(len(line) + -len(line) % ALIGNED)
            block = block_of(int(head["size"]))
            count = opened.readinto(memoryview(block))
        if count != len(block) or hashlib.sha256(block).hexdigest() != head["sha256"]:
            raise ValueError("its checksum does not match")
        return _views(block, head["tensors"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, MemoryError) as error:
        logger.warning("%s is not used: %s", file, error)
        return None


def digest_of(paths: Iterable[Path], *settings: object) -> str:
    """A name for what is made from files with these settings: of their whole contents."""
    digest = hashlib.sha256(repr(settings).encode())
    for path in paths:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:32]


def _places(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, Any], int]:
    places: dict[str, Any] = {}
    at = 0
    for name, tensor in tensors.items():
        places[name] = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), at]
        at += tensor.nbytes + -tensor.nbytes % ALIGNED
    return places, at


def _views(block: np.ndarray[Any, np.dtype[np.uint8]], places: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    whole = torch.from_numpy(block)
    views = {}
    for name, (dtype, shape, at) in places.items():
        kind = _DTYPES[dtype]
        views[name] = whole[at : at + math.prod(shape) * kind.itemsize].view(kind).view(shape)
    return views


def _whole(tensors: Mapping[str, torch.Tensor], size: int) -> memoryview:
    """The block that `tensors` lie in."""
    first = next(iter(tensors.values()))
    return memoryview((ctypes.c_uint8 * size).from_address(first.data_ptr())).cast("B")
