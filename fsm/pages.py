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

Entry = tuple[int, bytes, bytes | None]

MANY = 16
"""So many whole pages are copied by column; a few cost less one by one."""


_LEAD = 16
"""Unused entries before the first page, so that there is a place before it; 64 bytes, so pages lie as without them."""


class PagePool:
    """Pages `0 … num_pages - 1` of one cache group on one tier.

    `behind`, `cells`: the token mirror as one array and by item, a token under the place behind its own (counted from 0
    over all pages); `raw`: the mirror as bytes. `free` is in the order pages are granted, `cached` from the least
    recently released. `journal`: what became findable (page, key, parent's key), ceased to (-1, key, None) or was all
    forgotten (None) since it was last taken; None when nobody listens.
    """

    __slots__ = (
        "_buffer", "behind", "cached", "cells", "free", "journal", "keys", "page_size", "published", "published_ever",
        "raw", "refs", "tokens",
    )  # fmt: skip

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self._mirror(np.zeros(_LEAD + num_pages * page_size, np.int32))
        self.refs = [0] * num_pages
        self.keys: list[bytes | None] = [None] * num_pages
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_pages))
        self.cached: OrderedDict[int, None] = OrderedDict()
        self.published: dict[bytes, int] = {}
        self.published_ever = 0
        self.journal: list[Entry | None] | None = None

    def _mirror(self, buffer: TokenArray) -> None:
        """Mirror tokens in `buffer`; views are derived."""
        self._buffer = buffer
        self.behind = buffer[_LEAD - 1 :]
        self.cells = self.behind.data
        self.tokens = buffer[_LEAD:].reshape(-1, self.page_size)
        self.raw = buffer[_LEAD:].data.cast("B")

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
        free, cached, keys = self.free, self.cached, self.keys
        for page in pages:
            del cached[page]
            self._withdraw(keys[page])
            keys[page] = None
            free[page] = None

    def _withdraw(self, key: bytes | None) -> None:
        if key is not None:
            del self.published[key]
            if self.journal is not None:
                self.journal.append((-1, key, None))

    def grant(self, pages: Iterable[int]) -> None:
        """Free or cached pages get their one owner; what a cached one held is dropped."""
        free, cached, refs, keys, published = self.free, self.cached, self.refs, self.keys, self.published
        if self.journal is not None:
            self.journal += [(-1, key, None) for page in pages if (key := keys[page]) is not None]
        for page in pages:
            refs[page] = 1
            key = keys[page]
            if key is None:
                del free[page]
            else:
                keys[page] = None
                del cached[page], published[key]

    def share(self, page: int) -> None:
        """One more holder of a page that the prefix cache found."""
        if self.refs[page] == 0:
            del self.cached[page]
        self.refs[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """A holder lets go of its pages, the last one first, so that leaves are evicted before their parents."""
        refs, keys, free, cached = self.refs, self.keys, self.free, self.cached
        for page in reversed(pages):
            left = refs[page] = refs[page] - 1
            if left == 0:
                (free if keys[page] is None else cached)[page] = None
            elif left < 0:
                raise InvariantViolation(f"page {page} was released more often than it was held")

    def store(self, pages: Sequence[int], start: int, tokens: TokenArray) -> None:
        """Mirror `tokens`, at least one, at positions from `start` of a row that holds `pages`: page by page, or many
        whole ones.
        """
        raw, data, width = self.raw, tokens.tobytes(), self.page_size * 4
        number, within = divmod(start * 4, width)
        at, end = pages[number] * width + within, len(data)
        done = width - within  # bytes: first what goes into the page where it begins
        piece = data[:done]
        raw[at : at + len(piece)] = piece
        if end - done >= MANY * width:
            whole = (end - done) // width
            middle = tokens[done // 4 : done // 4 + whole * self.page_size]
            self.tokens[pages[number + 1 : number + 1 + whole]] = middle.reshape(whole, -1)
            number += whole
            done += whole * width
        while done < end:
            number += 1
            at, piece = pages[number] * width, data[done : done + width]
            raw[at : at + len(piece)] = piece
            done += width

    def publish(self, full: Iterable[tuple[int, bytes, bytes | None]]) -> None:
        """Make full pages findable: (page, key, key of the page before or None). Where a key is already published its
        page stays private to its row.
        """
        published, keys, journal, before = self.published, self.keys, self.journal, len(self.published)
        for page, key, parent in full:
            if key not in published:
                published[key] = page
                keys[page] = key
                if journal is not None:
                    journal.append((page, key, parent))
        self.published_ever += len(published) - before

    def forget(self) -> None:
        """Nothing is findable any more; what is held stays with its holders."""
        self.free.update(self.cached)
        self.cached.clear()
        if self.published and self.journal is not None:
            self.journal.append(None)
        self.published.clear()
        self.keys = [None] * len(self.keys)

    def copy(self) -> PagePool:
        """An independent copy."""
        other = PagePool(0, self.page_size)
        other._mirror(self._buffer.copy())
        other.published_ever = self.published_ever
        other.refs = self.refs.copy()
        other.journal = None if self.journal is None else self.journal.copy()
        other.keys = self.keys.copy()
        other.free = self.free.copy()
        other.cached = self.cached.copy()
        other.published = self.published.copy()
        return other
