"""Walk through a log: each record with what it led to, from the first that can be folded on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from leftfold.events import Record
from leftfold.fsm import Effects, State
from leftfold.replay.fold import Fold
from leftfold.replay.snapshots import is_log, whole


class Stage(NamedTuple):
    """A record, what it led to, and the state after it (the reducer's own: look, and do not keep)."""

    record: Record
    effects: Effects
    state: State


def opened(records: Iterable[Record]) -> tuple[Fold, Iterator[Record]]:
    """A fold to begin with, and the records that it is to take. Raises what `snapshots.whole` raises."""
    return whole(records) if is_log(records) else (Fold(), iter(records))


def walk(records: Iterable[Record], upto: int | None = None) -> Iterator[Stage]:
    """Every record up to and including sequence number `upto`. Raises `ReplayError`, and a `LogError` for damage."""
    fold, rest = opened(records)
    for record in rest:
        if upto is not None and record.seq > upto:
            return
        effects = fold.take(record.seq, record.event)
        assert fold.state is not None
        yield Stage(record, effects, fold.state)


__all__ = ["Stage", "opened", "walk"]
