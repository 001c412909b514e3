"""The page pool: who holds which page, what it holds, and which pages the prefix cache can find.

Every page is free, cached (unheld, findable) or held (counted by `refs`). `tokens[page, offset]` mirrors the token
ids whose K/V the page holds, so a prefix hit is compared token by token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from leftfold.events.plan import TokenArray
from leftfold.fsm.errors import InvariantViolation


class PagePool:
    """Pages `0 … num_pages - 1` of one cache group on one tier.

    `raw`: the token mirror as bytes. `free` is in the order pages are granted, `cached` from the least recently
    released.
    """

    __slots__ = ("cached", "flat", "free", "keys", "page_size", "published", "raw", "refs", "tokens")

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.tokens = np.zeros((num_pages, page_size), np.int32)
        self.flat = self.tokens.reshape(-1)
        self.raw = memoryview(self.flat.data).cast("B")
        self.refs = [0] * num_pages
        self.keys: list[bytes | None] = [None] * num_pages
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_pages))
        self.cached: OrderedDict[int, None] = OrderedDict()
        self.published: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self.refs)

    @property
    def usable(self) -> int:
        """Pages that can be granted."""
        return len(self.free) + len(self.cached)

    @property
    def held(self) -> int:
        """Pages that somebody holds."""
        return len(self.refs) - self.usable

    def evict(self, pages: Iterable[int]) -> None:
        """Drop the content of cached pages: they are free afterwards."""
        free, cached, keys, published = self.free, self.cached, self.keys, self.published
        for page in pages:
            del cached[page]
            del published[keys[page]]  # type: ignore[arg-type]  # a cached page has a key
            keys[page] = None
            free[page] = None

    def grant(self, pages: Iterable[int]) -> None:
        """Free or cached pages get their one owner; what a cached one held is dropped."""
        free, cached, refs, keys, published = self.free, self.cached, self.refs, self.keys, self.published
        for page in pages:
            key = keys[page]
            if key is None:
                del free[page]
            else:
                del cached[page]
                del published[key]
                keys[page] = None
            refs[page] = 1

    def share(self, page: int) -> None:
        """One more holder of a page that the prefix cache found."""
        if self.refs[page] == 0:
            del self.cached[page]
        self.refs[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """A holder lets go of its pages, the last one first, so that leaves are evicted before their parents."""
        refs, keys = self.refs, self.keys
        for page in reversed(pages):
            left = refs[page] = refs[page] - 1
            if left == 0:
                (self.free if keys[page] is None else self.cached)[page] = None
            elif left < 0:
                raise InvariantViolation(f"page {page} was released more often than it was held")

    def store(self, pages: Sequence[int], start: int, tokens: TokenArray) -> None:
        """Mirror `tokens` at positions from `start` of a row that holds `pages`: whole pages at once."""
        size, at, end = self.page_size, start, start + len(tokens)
        while at < end:
            number, within = divmod(at, size)
            whole = 0 if within else (end - at) // size
            taken = whole * size or min(size - within, end - at)
            piece = tokens[at - start : at - start + taken]
            if whole:
                self.tokens[pages[number : number + whole]] = piece.reshape(whole, size)
            else:
                self.tokens[pages[number], within : within + taken] = piece
            at += taken

    def publish(self, full: Iterable[tuple[int, bytes]]) -> None:
        """Make full pages findable by key; one whose key is already published stays private to its row."""
        published, keys = self.published, self.keys
        for page, key in full:
            if key not in published:
                published[key] = page
                keys[page] = key

    def clear(self) -> None:
        """Forget all content; nothing may be held."""
        self.evict(list(self.cached))

    def copy(self) -> PagePool:
        """An independent copy; views are derived again."""
        other = object.__new__(PagePool)
        other.page_size = self.page_size
        other.tokens = self.tokens.copy()
        other.flat = other.tokens.reshape(-1)
        other.raw = memoryview(other.flat.data).cast("B")
        other.refs = self.refs.copy()
        other.keys = self.keys.copy()
        other.free = self.free.copy()
        other.cached = self.cached.copy()
        other.published = self.published.copy()
        return other
