"""A queue sorted by integer keys: who waits in policy order, and which deadline is next."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from leftfold.fsm.request import Request

Key = tuple[int, ...]


class SortedQueue:
    """Requests under unique integer keys, smallest first; adding and removing are O(log n) comparisons."""

    __slots__ = ("_keys", "_requests")

    def __init__(self) -> None:
        self._keys: list[Key] = []
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def items(self) -> Iterator[tuple[Key, Request]]:
        """Keys with their requests, smallest first."""
        return zip(self._keys, self._requests, strict=True)

    @property
    def first_key(self) -> Key | None:
        return self._keys[0] if self._keys else None

    def upto(self, most: int) -> list[Request]:
        """Requests whose key begins with at most `most`."""
        return self._requests[: bisect_left(self._keys, (most + 1,))]

    def add(self, key: Key, request: Request) -> None:
        at = bisect_left(self._keys, key)
        self._keys.insert(at, key)
        self._requests.insert(at, request)

    def remove(self, key: Key) -> None:
        """Raises `KeyError` for a key that is not there."""
        at = bisect_left(self._keys, key)
        if at == len(self._keys) or self._keys[at] != key:
            raise KeyError(key)
        del self._keys[at]
        del self._requests[at]
