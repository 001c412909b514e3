"""A router that folds KV events: what it believes to be cached must be what can be found."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from leftfold.fsm import KvCleared, KvEvent, KvRemoved, KvStored, State
from leftfold.fsm.prefix import namespace
from leftfold.replay.fuzzing.errors import Violation


class Router:
    """`resident`: tokens by key; `known`: keys that were ever stored; `outdated`: those of earlier generations.

    `salts`: under which requests came; a first page is behind one of them, in the state's generation or that of
    `before`, where the event that published it ended this one, too.
    """

    def __init__(self) -> None:
        self.resident: dict[bytes, Sequence[int]] = {}
        self.known: set[bytes] = set()
        self.outdated: set[bytes] = set()
        self.generation = 0
        self.salts: set[str] = set()
        self.before = 0

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
                self._store(event, {self.before, state.generation})
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

    def _store(self, event: KvStored, generations: Iterable[int]) -> None:
        if event.key in self.resident:
            raise Violation("kv-events", f"{event} stores what is resident")
        if event.key in self.outdated:
            raise Violation("kv-events", f"{event} is of a generation that is over")
        if event.parent is not None and event.parent not in self.known:
            raise Violation("kv-events", f"{event} comes before its parent")
        tokens = array("i", event.tokens).tobytes()
        befores = [event.parent] if event.parent is not None else self._roots(generations)
        keys = [blake2b(before + tokens, digest_size=16).digest() for before in befores]
        if event.key not in keys:
            raise Violation("kv-events", f"{event} has another key than follows from its parent and tokens")
        self.resident[event.key] = event.tokens
        self.known.add(event.key)

    def _roots(self, generations: Iterable[int]) -> list[bytes]:
        return [namespace(generation=generation, salt=salt) for generation in generations for salt in self.salts]

    def compare(self, state: State) -> None:
        """Page by page. Raises `Violation`."""
        pool = state.pool
        found = {key: tuple(pool.tokens[page].tolist()) for key, page in pool.published.items()}
        if found != self.resident:
            raise Violation("kv-events", f"routers hold {self.resident}, the cache {found}")
