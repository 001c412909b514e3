"""Reads the metadata of a GGUF file (and none of its tensors), quickly and with every length checked.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from leftfold.text.errors import GgufError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class _Cursor:
    """A position in the mapped file; reading past its end is an error, never a short answer."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def unpack(self, fmt: str, count: int = 1) -> tuple[Any, ...]:
        layout = "<" + fmt if count == 1 else f"<{count}{fmt}"
        return struct.unpack(layout, self._take(struct.calcsize(layout)))

    def string(self) -> str:
        (length,) = self.unpack("Q")
        return bytes(self._take(length)).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.unpack(_SCALARS[kind])[0]
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        raise GgufError(f"unknown value type {kind} at byte {self.at}")

    def _array(self) -> list[Any]:
        kind, count = self.unpack("IQ")
        if kind in _SCALARS:
            return list(self.unpack(_SCALARS[kind], count)) if count else []
        if kind != _STRING:
            raise GgufError(f"array of value type {kind} at byte {self.at}")
        return [self.string() for _ in range(self._plausible(count))]

    def _plausible(self, count: int) -> int:
        if count * 8 > len(self.data) - self.at:
            raise GgufError(f"array of {count} strings at byte {self.at} goes past the end of the file")
        return count

    def _take(self, size: int) -> bytes:
        if size > len(self.data) - self.at:
            raise GgufError(
                f"it is truncated: {size} bytes wanted at byte {self.at}, but the file has {len(self.data)} bytes"
            )
        piece = self.data[self.at : self.at + size]
        self.at += size
        return piece


def read_metadata(path: Path) -> dict[str, Any]:
    """The key-value pairs of a GGUF file. Raises GgufError with one line that names the file and what is wrong."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(_Cursor(data))
    except (OSError, ValueError, GgufError) as error:
        raise GgufError(f"cannot read {path}: {error}") from error


def _read(cursor: _Cursor) -> dict[str, Any]:
    if cursor.unpack("4s")[0] != b"GGUF":
        raise GgufError("it does not begin with GGUF, so it is not a GGUF file")
    version, _tensors, pairs = cursor.unpack("IQQ")
    if version not in (2, 3):
        raise GgufError(f"GGUF version {version}; versions 2 and 3 are understood")
    metadata: dict[str, Any] = {}
    for _ in range(pairs):
        key = cursor.string()
        (kind,) = cursor.unpack("I")
        metadata[key] = cursor.value(kind)
    return metadata
