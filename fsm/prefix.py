"""Prefix keys: the one key function of cached pages.

A page's key is BLAKE2b-128 over its namespace (a tagged tuple), its parent's key and its own tokens: the namespace is
hashed into the root that the first page has for a parent, so each key covers the whole of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from leftfold.events.digest import canonical
from leftfold.events.plan import TokenArray


def namespace(
    *, generation: int, adapter: str = "", adapter_generation: int = 0, salt: str = "", media: Sequence[Any] = ()
) -> bytes:
    """The root key of a namespace; every part is tagged, so that no two tuples have the same encoding."""
    parts = [
        ["generation", generation],
        ["adapter", adapter, adapter_generation],
        ["salt", salt],
        ["media", list(media)],
    ]
    return blake2b(canonical(parts), digest_size=16).digest()


def page_key(parent: bytes, tokens: bytes | memoryview) -> bytes:
    """The key of a full page: `parent` is the key of the page before it (or the root), `tokens` its int32 ids."""
    return blake2b(parent + tokens, digest_size=16).digest()


def matching(held: TokenArray, tokens: TokenArray) -> int:
    """How many of the found pages (`held`, one a row) really hold these tokens: equal keys are not taken on trust."""
    wrong = (held != tokens[: held.size].reshape(held.shape)).any(axis=1)
    return int(wrong.argmax()) if wrong.any() else len(held)


def extend_keys(keys: list[bytes], root: bytes, tokens: TokenArray, pages: int, page_size: int) -> None:
    """Extend `keys` in place to cover the first `pages` full pages of `tokens` (int32)."""
    done = len(keys)
    if done >= pages:
        return
    parent = keys[-1] if keys else root
    raw = tokens[done * page_size : pages * page_size].tobytes()
    width = page_size * tokens.itemsize
    for at in range(0, (pages - done) * width, width):
        parent = page_key(parent, raw[at : at + width])
        keys.append(parent)
