"""Snapshots: taken from a fold, written beside the log, and where a fold begins instead of at the first record."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

from leftfold.events import (
    CodecError,
    LogError,
    Record,
    Snapshot,
    SnapshotBad,
    SnapshotPassedOver,
    Started,
    decode,
    save_snapshot,
)
from leftfold.events.codec import plain
from leftfold.fsm import LAWS, SnapshotInvalid, State
from leftfold.fsm import snapshot as states
from leftfold.replay.errors import NotStarted
from leftfold.replay.fold import Fold, check_policy


class Log(Protocol):
    """What a fold needs of a log: an `EventLog`, a `LogReader`, or whatever passes these on."""

    @property
    def first_seq(self) -> int: ...

    def __iter__(self) -> Iterator[Record]: ...

    def snapshots(self) -> list[int]: ...

    def snapshot(self, seq: int) -> Snapshot: ...

    def after(self, snapshot: Snapshot) -> Iterator[Record]: ...


def is_log(records: Iterable[Record] | Log) -> TypeGuard[Log]:
    """Whether these are a log's records, and not just some."""
    return hasattr(records, "snapshots")


@dataclass(frozen=True, slots=True)
class Capture:
    """A fold as it was after record `seq`, independent of what comes: encode and save it in whatever thread.

    `chain` below is the checksum of record `seq`, which `EventLog.mark` gives right after that record was appended.
    """

    seq: int
    t: int
    first: Started
    last: Started
    state: State

    def encode(self, chain: int) -> bytes:
        """The snapshot's file."""
        body = {
            "t": self.t, "laws": LAWS, "first": plain(self.first), "last": plain(self.last),
            "state": states.encode(self.state),
        }  # fmt: skip
        return Snapshot(self.seq, chain, self.state.digest(), body).encode()

    def save(self, directory: str | os.PathLike[str], chain: int) -> str:
        """Write it, durable when this returns; the log must be durable up to `seq` before. Raises `OSError`."""
        return save_snapshot(directory, self.seq, self.encode(chain))


def capture(fold: Fold) -> Capture:
    """What is to be saved of `fold`, in the thread that folds: this copies the state. Raises `NotStarted`."""
    if fold.state is None or fold.first is None or fold.last is None:
        raise NotStarted("nothing was folded yet that a snapshot could hold")
    return Capture(fold.seq, fold.t, fold.first, fold.last, fold.state.copy())


def restore(snapshot: Snapshot) -> Fold:
    """The fold that a snapshot was taken of. Raises `SnapshotBad` for a state that has not its digest, `UnknownPolicy`
    for one with a policy of a user's own that is not loaded.
    """
    body = snapshot.body
    where = f"the snapshot of record {snapshot.seq}"
    try:
        if body["laws"] > LAWS:
            raise SnapshotBad(f"{where} needs laws {body['laws']}; this version knows up to {LAWS}")
        check_policy(where, body["state"]["config"])
        state = states.decode(body["state"])
        first, last, t = _started(body["first"]), _started(body["last"]), int(body["t"])
    except (SnapshotInvalid, CodecError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise SnapshotBad(f"{where} cannot be taken: {error}") from error
    if state.digest() != snapshot.digest:
        raise SnapshotBad(f"{where} has digest {snapshot.digest}, its state has {state.digest()}")
    return Fold(state=state, seq=snapshot.seq, t=t, first=first, last=last)


def _started(raw: Mapping[str, Any]) -> Started:
    event = decode(raw)
    if not isinstance(event, Started):
        raise ValueError(f"a {type(event).__name__} stands where a Started must be")
    return event


def begin(log: Log, at: int | None = None) -> tuple[Fold, Iterator[Record]]:
    """A fold as far as the newest good snapshot has it (up to `at`), and the records that are still to be taken.

    Snapshots that cannot be used are passed over with a `SnapshotPassedOver` warning; without any the fold begins at
    the first record. Reading the records raises a `LogError`. Raises `NotStarted` where the log's beginning was removed
    and no snapshot stands in for it, and `UnknownPolicy`: what goes before such a snapshot has its policy, too.
    """
    for seq in log.snapshots():
        if at is not None and seq > at:
            continue
        try:
            snapshot = log.snapshot(seq)
            fold, records = restore(snapshot), log.after(snapshot)
        except SnapshotBad as error:
            warnings.warn(f"passed over: {error}", SnapshotPassedOver, stacklevel=2)
            continue
        return fold, records
    if log.first_seq > 1:
        upto = "" if at is None else f" up to record {at}"
        raise NotStarted(f"the log begins at record {log.first_seq}, and no good snapshot{upto} goes before it")
    return Fold(), iter(log)


def fold_to(log: Log, at: int | None = None) -> Fold:
    """The fold after record `at` (None: the last). Warns and raises as `begin` does."""
    fold, records = begin(log, at)
    for record in records:
        if at is not None and record.seq > at:
            break
        fold.take(record.seq, record.event)
    if fold.state is None:
        raise NotStarted("the log holds no Started" + ("" if at is None else f" up to seq {at}"))
    return fold


def whole(log: Log) -> tuple[Fold, Iterator[Record]]:
    """A fold from the first record on, or from the oldest good snapshot where the log's beginning was removed.

    Warns and raises as `begin` does.
    """
    if log.first_seq == 1:
        return Fold(), iter(log)
    oldest = min(_usable(log), default=None)
    return begin(log, oldest)


def _usable(log: Log) -> Iterator[int]:
    for seq in log.snapshots():
        try:
            snapshot = log.snapshot(seq)
            restore(snapshot)
            log.after(snapshot)
        except LogError:
            continue
        yield seq


__all__ = ["Capture", "Log", "begin", "capture", "fold_to", "is_log", "restore", "whole"]
