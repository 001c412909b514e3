"""A draft of one plan's pages: an overlay over the pool that a decision may spend without writing to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from leftfold.fsm.pages import PagePool


def next_pages(pool: PagePool, count: int) -> tuple[list[int], list[int]]:
    """The next `count` pages of an untouched pool, and those of them that are cached: what a fresh draft takes."""
    pages = list(islice(pool.free, count)) if pool.free else []
    if len(pages) == count:
        return pages, []
    evicted = list(islice(pool.cached, count - len(pages)))
    return pages + evicted if pages else evicted, evicted


class Draft:
    """What is left of the pool as a plan takes shape. `evicted`: cached pages it drops, in order.

    Pages are taken in the order in which the pool would grant them after the same releases: free ones first, then
    cached ones from the least recently released.
    """

    __slots__ = (
        "_cached", "_free", "_freed", "_refs", "_revived", "_uncached", "evicted", "pool", "usable",
    )  # fmt: skip

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.usable = pool.usable
        self.evicted: list[int] = []
        self._free: Iterator[int] = iter(pool.free)
        self._cached: Iterator[int] = iter(pool.cached)
        self._freed: list[int] = []  # unheld since this draft's releases, not findable
        self._uncached: list[int] = []  # unheld since this draft's releases, findable
        self._revived: set[int] = set()
        self._refs: dict[int, int] = {}

    def gain(self, pages: Sequence[int]) -> int:
        """Pages that a release would make usable."""
        refs = self.pool.refs
        return sum(self._refs.get(page, refs[page]) == 1 for page in pages)

    def release(self, pages: Sequence[int]) -> None:
        """A holder lets go of its pages, as `PagePool.release`."""
        refs, keys = self.pool.refs, self.pool.keys
        for page in reversed(pages):
            left = self._refs[page] = self._refs.get(page, refs[page]) - 1
            if left == 0:
                (self._freed if keys[page] is None else self._uncached).append(page)
                self.usable += 1

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Pages of the longest run of `keys` that can still be found."""
        published, found = self.pool.published, []
        dropped: set[int] | None = None
        for key in keys:
            page = published.get(key)
            if page is None:
                break
            if dropped is None:
                dropped = set(self.evicted)
            if page in dropped:
                break
            found.append(page)
        return found

    def unheld(self, pages: Sequence[int]) -> int:
        """How many of `pages` nobody holds yet: sharing them takes so many from `usable`."""
        refs = self.pool.refs
        return sum(page not in self._revived and self._refs.get(page, refs[page]) == 0 for page in pages)

    def share(self, pages: Sequence[int]) -> None:
        """Found pages get a holder."""
        self.usable -= self.unheld(pages)
        refs = self.pool.refs
        for page in pages:
            held = self._refs.get(page, refs[page])
            if held == 0:
                self._revived.add(page)
            self._refs[page] = held + 1

    def take(self, count: int) -> list[int]:
        """`count` pages (at most `usable`) for new owners."""
        taken = list(islice(self._free, count))
        while len(taken) < count and self._freed:
            taken.append(self._freed.pop(0))
        if len(taken) < count and not self._revived:
            found = list(islice(self._cached, count - len(taken)))
            self.evicted += found
            taken += found
        while len(taken) < count:
            page = next(self._cached, None)
            if page is None:
                page = self._uncached.pop(0)
            if page not in self._revived:
                self.evicted.append(page)
                taken.append(page)
        self.usable -= count
        return taken
