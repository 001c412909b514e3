"""A queue sorted by integer keys: who waits in policy order, and which deadline is next."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from leftfold.fsm.request import Request

Key = tuple[int, ...]


class SortedQueue:
    """Requests under unique integer keys, smallest first (`keys`); adding and removing are O(log n) comparisons."""

    __slots__ = ("keys", "_requests")

    def __init__(self) -> None:
        self.keys: list[Key] = []
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def items(self) -> Iterator[tuple[Key, Request]]:
        """Keys with their requests, smallest first."""
        return zip(self.keys, self._requests, strict=True)

    def upto(self, most: int) -> list[Request]:
        """Requests whose key begins with at most `most`."""
        return self._requests[: bisect_left(self.keys, (most + 1,))]

    def add(self, key: Key, request: Request) -> None:
        at = bisect_left(self.keys, key)
        self.keys.insert(at, key)
        self._requests.insert(at, request)

    def remove(self, key: Key) -> None:
        """Raises `KeyError` for a key that is not there."""
        at = bisect_left(self.keys, key)
        if at == len(self.keys) or self.keys[at] != key:
            raise KeyError(key)
        del self.keys[at]
        del self._requests[at]
