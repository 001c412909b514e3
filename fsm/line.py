"""Who waits, by rank and by arrival, and how often the one who has waited longest was overtaken."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator

from leftfold.fsm.queue import SortedQueue
from leftfold.fsm.request import Request


class Line:
    """Requests in line. `keys`: one for each, so empty when nobody waits. `tokens`: of all of them. `overtakers`:
    arrivals, ascending, of those that joined past others. `ranked` False: ranks are arrivals, and one queue serves as
    both.
    """

    __slots__ = ("_by_arrival", "_by_rank", "keys", "overtakers", "tokens")

    def __init__(self, ranked: bool) -> None:
        self._by_arrival = SortedQueue()
        self._by_rank = SortedQueue() if ranked else self._by_arrival
        self.keys = self._by_arrival.keys
        self.overtakers: list[int] = []
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._by_rank)

    def __iter__(self) -> Iterator[Request]:
        """By rank."""
        return iter(self._by_rank)

    def by_arrival(self) -> Iterator[Request]:
        """Those that have waited longest first."""
        return iter(self._by_arrival)

    @property
    def oldest(self) -> Request:
        """The one that came first of all."""
        return next(iter(self._by_arrival))

    def overtaken(self, request: Request, beside: int = 0) -> int:
        """How often later ones joined while `request` waited, `beside` more in this plan."""
        return len(self.overtakers) - bisect_right(self.overtakers, request.arrival) + beside

    def add(self, request: Request) -> None:
        self._by_arrival.add((request.arrival,), request)
        if self._by_rank is not self._by_arrival:
            self._by_rank.add(request.rank, request)
        self.tokens += len(request.tokens)

    def remove(self, request: Request) -> None:
        """Raises `KeyError` for one that is not in line."""
        self._by_arrival.remove((request.arrival,))
        if self._by_rank is not self._by_arrival:
            self._by_rank.remove(request.rank)
        self.tokens -= len(request.tokens)

    def joined(self, request: Request) -> None:
        """`request` has left the line for a seat: whoever came before it and still waits was overtaken."""
        if self.overtakers:
            self.forget()
        if self.keys and self.keys[0][0] < request.arrival:
            insort(self.overtakers, request.arrival)

    def forget(self) -> None:
        """Drop what nobody who waits needs any more."""
        if not self:
            self.overtakers = []
        elif self.overtakers and self.overtakers[0] < self.oldest.arrival:
            del self.overtakers[: bisect_right(self.overtakers, self.oldest.arrival)]
