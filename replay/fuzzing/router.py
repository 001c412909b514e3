"""A router that folds KV events: what it believes to be cached must be what can be found."""

from __future__ import annotations

from collections.abc import Sequence

from leftfold.fsm import KvCleared, KvEvent, KvRemoved, KvStored, State
from leftfold.replay.fuzzing.errors import Violation


class Router:
    """`resident`: tokens by key; `known`: keys that were ever stored; `outdated`: those of earlier generations."""

    def __init__(self) -> None:
        self.resident: dict[bytes, Sequence[int]] = {}
        self.known: set[bytes] = set()
        self.outdated: set[bytes] = set()
        self.generation = 0

    def save(self) -> tuple[dict[bytes, Sequence[int]], set[bytes], set[bytes], int]:
        """What is believed, for `restore`."""
        return self.resident.copy(), self.known.copy(), self.outdated.copy(), self.generation

    def restore(self, saved: tuple[dict[bytes, Sequence[int]], set[bytes], set[bytes], int]) -> None:
        """Believe again what was believed when `saved` was made."""
        resident, known, outdated, self.generation = saved
        self.resident, self.known, self.outdated = resident.copy(), known.copy(), outdated.copy()

    def outdate(self, generation: int) -> None:
        """The cache was flushed; what was stored before a new generation may never be stored again."""
        if generation != self.generation:
            self.generation = generation
            self.outdated |= self.known

    def hear(self, events: Sequence[KvEvent], state: State) -> None:
        """Fold what one event brought. Raises `Violation`."""
        for event in events:
            if isinstance(event, KvStored):
                self._store(event)
            elif isinstance(event, KvRemoved):
                if self.resident.pop(event.key, None) is None:
                    raise Violation("kv-events", f"{event} removes what is not resident")
            else:
                assert isinstance(event, KvCleared)
                self.resident.clear()
        if len(self.resident) != len(state.pool.published):
            raise Violation(
                "kv-events", f"{len(self.resident)} pages are told, {len(state.pool.published)} can be found"
            )

    def _store(self, event: KvStored) -> None:
        if event.key in self.resident:
            raise Violation("kv-events", f"{event} stores what is resident")
        if event.key in self.outdated:
            raise Violation("kv-events", f"{event} is of a generation that is over")
        if event.parent is not None and event.parent not in self.known:
            raise Violation("kv-events", f"{event} comes before its parent")
        self.resident[event.key] = event.tokens
        self.known.add(event.key)

    def compare(self, state: State) -> None:
        """Page by page. Raises `Violation`."""
        pool = state.pool
        found = {key: tuple(pool.tokens[page].tolist()) for key, page in pool.published.items()}
        if found != self.resident:
            raise Violation("kv-events", f"routers hold {self.resident}, the cache {found}")
