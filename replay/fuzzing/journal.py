"""The real event log on a simulated disk, and what it must say when it is opened again.

The journal keeps an account of its own: the records as they were encoded, and how many of them a sync has confirmed.
"""

from __future__ import annotations

import errno
import warnings
from collections.abc import Sequence
from dataclasses import MISSING, fields
from itertools import pairwise
from typing import Any

import orjson

from leftfold.events import (
    Admit,
    EventLog,
    LogBroken,
    LogDamaged,
    LogError,
    SamplingParams,
    SnapshotPassedOver,
    Started,
    TimeReversed,
    TornTail,
    decode,
    encode,
)
from leftfold.events.framing import REST, frame, header
from leftfold.events.stores import segment_name, segment_number
from leftfold.events.types import Event
from leftfold.fsm import Config, State
from leftfold.replay.errors import ReplayError
from leftfold.replay.fold import Fold
from leftfold.replay.fold import fold as fold_all
from leftfold.replay.fuzzing.disk import DiskStore, SimDisk, contents
from leftfold.replay.fuzzing.errors import Violation
from leftfold.replay.snapshots import begin, capture

KEPT = 3
"""Snapshots that are kept."""


class Journal:
    """`bodies`: every record as encoded; `confirmed`: how many of them a sync, or an opening, has made safe.

    `sync_every`: records after which the journal syncs by itself (0: only when told). `stuck`: the disk is full.
    `hurt`: the log goes on, but records that a snapshot stands in for cannot be read any more.
    """

    def __init__(self, disk: SimDisk, segment_bytes: int, sync_every: int) -> None:
        self.disk = disk
        self.segment_bytes = segment_bytes
        self.sync_every = sync_every
        self.bodies: list[bytes] = []
        self.confirmed = 0
        self.stuck = False
        self.hurt = False
        self.log = EventLog(store=DiskStore(disk), segment_bytes=segment_bytes)

    # While all is well

    def append(self, event: Event) -> None:
        """Log an event. Raises `LogBroken` after a failed sync; a full disk only makes it wait."""
        seq = self.log.append(event)
        self.bodies.append(encode(event, seq))
        if self.sync_every and seq % self.sync_every == 0:
            self.sync()

    def flush(self) -> None:
        """Hand over what waits, as far as the disk has room."""
        try:
            self.log.flush()
            self.stuck = False
        except OSError as error:
            self._full(error)

    def sync(self) -> None:
        """Make safe what waits, as far as the disk has room. Raises `OSError` for a failed sync."""
        try:
            upto = self.log.sync()
        except OSError as error:
            self._full(error)
            return
        self.stuck = False
        if upto != len(self.bodies):
            raise Violation("log", f"a sync confirms {upto} records, {len(self.bodies)} were appended")
        if not self.disk.lies:
            self.confirmed = upto

    def save(self, state: State, first: Started, last: Started) -> None:
        """Save the state after the record appended last, beside the log, which is made safe before."""
        self.sync()
        if self.stuck:
            return
        seq, chain = self.log.mark
        fold = Fold(state=state, seq=seq, t=self.log.last_t, first=first, last=last)
        self.disk.snapshots[seq] = bytearray(capture(fold).encode(chain))
        for old in sorted(self.disk.snapshots)[:-KEPT]:
            del self.disk.snapshots[old]

    def _full(self, error: OSError) -> None:
        if error.errno != errno.ENOSPC:
            raise error
        self.stuck = True

    def go_back(self, event: Event) -> None:
        """An event that is older than the log is refused, and leaves no trace."""
        before = self.log.next_seq
        try:
            self.log.append(event)
        except TimeReversed:
            if self.log.next_seq == before:
                return
        raise Violation("log", f"an event of t {event.t} was taken after one of t {self.log.last_t}")

    def fail_sync(self) -> None:
        """A sync that fails is told, and nothing is taken any more."""
        self.disk.fail_sync = True
        try:
            self.log.sync()
        except OSError as error:
            if error.errno == errno.ENOSPC:
                return  # the disk was full before it came to the sync
        else:
            raise Violation("log", "a sync that failed was not told")
        for call in (self.log.sync, self.log.flush, lambda: self.log.append(Started(t=self.log.last_t))):
            try:
                call()
            except LogBroken:
                continue
            raise Violation("log", "after a sync that failed the log goes on")

    # After the process died

    def reopen(self, *, harmed: bool, cut: bool, read_error: int | None = None, gone: bool = False) -> int:
        """Open what is on the disk, and say how many records it has.

        `harmed`: bytes at rest are not what was written, so an error that names the damage is in order: the operator
        then cuts the log there. `gone`: the harm is that a file is gone. `cut`: whole records may be gone without a
        trace, because the disk dropped its end.
        Raises `Violation` if the log is not the beginning of what was logged, or leaves anything out in silence.
        """
        if read_error is not None:
            self._read_error(read_error)
        there = self._whole_records()
        try:
            told = self._open()
        except LogError as error:
            if not harmed:
                raise Violation(
                    "log-refused", f"the log cannot be opened, though nothing harmed it: {error}"
                ) from error
            if gone:
                self._names_what_is_missing(error)
            self._repair(error)
            told = True
        kept = self.log.next_seq - 1
        if self.log.first_seq > 1:
            self.hurt = True
        else:
            try:
                self._compare(kept)
            except LogError as error:  # the opening had no need to look there
                self.hurt = True
                if not harmed:
                    raise Violation("log-refused", f"nothing harmed the log, which opens, and says: {error}") from error
                if gone:
                    self._names_what_is_missing(error)
        if kept < self.confirmed and not harmed and not cut:
            raise Violation("log-lost", f"{self.confirmed} records were made durable, {kept} are left")
        if kept < there and not told and not self.hurt:
            raise Violation("log-silent", f"{there} whole records are on the disk, {kept} are read, and nobody says so")
        del self.bodies[kept:]
        self.confirmed, self.stuck = kept, False
        return kept

    def _names_what_is_missing(self, error: LogError) -> None:
        """Of segments that are not there the first is named, and nothing behind it."""
        names = sorted(self.disk.files)
        gaps = [name for name, after in pairwise(names) if segment_number(after) != segment_number(name) + 1]
        if gaps and isinstance(error, LogDamaged):
            missing = segment_name(segment_number(gaps[0]) + 1)
            if error.segment > missing:
                raise Violation("log-silent", f"{missing} is missing, and the log says: {error}")

    def recover(self) -> Fold:
        """What a start makes of the log: the newest good snapshot, and the records after it.

        A log that is `hurt` may say so here, by name; its beginning then comes from elsewhere.
        """
        if not self.hurt:
            fold, whole = self._fold(), fold_all(self.log)
            if whole.state is None or fold.state is None or whole.state.digest() != fold.state.digest():
                raise Violation("snapshot", f"a snapshot and its tail are not the whole log, up to record {fold.seq}")
            return fold
        spared: Fold | None = None
        try:
            spared = self._fold()
        except (LogError, ReplayError):
            pass
        self.hurt = False
        self.rewrite(self.bodies)
        self.disk.snapshots.clear()
        self.reopen(harmed=False, cut=False)
        whole = self.recover()
        assert whole.state is not None
        if spared is not None and spared.state is not None and spared.state.digest() != whole.state.digest():
            raise Violation("snapshot", "a snapshot stood in for what was damaged, and is not what was there")
        return whole

    def _fold(self) -> Fold:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SnapshotPassedOver)
            fold, records = begin(self.log)
            for record in records:
                if encode(record.event, record.seq) != self._canonical(record.seq):
                    raise Violation("log-changed", f"record {record.seq} is read as {record.event}")
                fold.take(record.seq, record.event)
        return fold

    def _canonical(self, seq: int) -> bytes:
        """A record as this version would have written it."""
        return encode(decode(orjson.loads(self.bodies[seq - 1])), seq)

    def _whole_records(self) -> int:
        """Lines on the disk that end, without the segments' headers."""
        contents = [file.content for file in self.disk.files.values()]
        return sum(content.count(b"\n") for content in contents) - sum(b"\n" in content for content in contents)

    def _open(self) -> bool:
        """Whether a torn tail was told of, by a warning and by name."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tail = self._tail()
            self.log = EventLog(store=DiskStore(self.disk), segment_bytes=self.segment_bytes)
        told = any(issubclass(warning.category, TornTail) for warning in caught)
        if told != (self.log.dropped is not None) or (tail and not told):
            raise Violation("log-silent", f"{tail} bytes of a torn record: warned {told}, named {self.log.dropped}")
        return told

    def _tail(self) -> int:
        """Bytes after the last newline of the last segment."""
        if not self.disk.files:
            return 0
        content = self.disk.files[max(self.disk.files)].content
        return len(content) - (content.rfind(b"\n") + 1)

    def _read_error(self, at: int) -> None:
        """A sector that cannot be read is told by name; nothing is taken for shorter than it is."""
        sizes = self.disk.sizes()
        name = [*sizes][at % len(sizes)] if sizes else ""
        if not sizes or not sizes[name]:
            return
        self.disk.bad_read = (name, at % sizes[name])
        before = contents(self.disk)
        try:
            self._open()
        except LogError:
            if contents(self.disk) != before:
                raise Violation("log-refused", f"{name} could not be read, and the log was changed") from None
        else:
            if self.disk.bad_read is None:
                raise Violation("log-silent", f"{name} cannot be read, and the log opens")
        self.disk.bad_read = None

    def _repair(self, error: LogError) -> None:
        """What an operator does with a damaged log: cut it where it says, drop what comes after, until it opens."""
        while True:
            before = contents(self.disk)
            self._cut(error)
            if contents(self.disk) == before:
                raise Violation("log-refused", f"cut at the place that {error} names, the log says so again") from error
            try:
                self._open()
            except LogError as again:  # an earlier segment, which was not looked at before
                error = again
            else:
                return

    def _cut(self, error: LogError) -> None:
        files = self.disk.files
        if not isinstance(error, LogDamaged):
            files.clear()
            return
        for name in [name for name in files if name > error.segment]:
            del files[name]
        if error.segment in files:
            content = files[error.segment].content
            del content[error.offset :]
            if not content:
                del files[error.segment]

    def _compare(self, kept: int) -> None:
        """What is read must be the beginning of what was logged, byte by byte."""
        count = 0
        for record in self.log:
            if count >= kept or encode(record.event, record.seq) != self._canonical(record.seq):
                raise Violation("log-changed", f"record {record.seq} is read as {record.event}")
            count += 1
        if count != kept:
            raise Violation("log-silent", f"{kept} records are there, {count} are read")
        lines = [line for name in sorted(self.disk.files) for line in self.disk.files[name].content.splitlines()]
        raw = [b"{" + line[REST:] for line in lines if not line.startswith(b'"type":"segment"', REST)]
        if raw != self.bodies[:kept]:
            raise Violation("log-changed", "the bytes of the log are not those that were logged")

    def age(self) -> None:
        """The log becomes what another version would have written: what is at its default is said, or left out."""
        self.rewrite([aged(body) for body in self.bodies])

    def rewrite(self, bodies: Sequence[bytes]) -> None:
        """All records anew, in one segment: what a copy brings back. Snapshots are of another log then."""
        self.bodies = [*bodies]
        line, crc = header(1, 0)
        content = bytearray(line)
        for body in bodies:
            line, crc = frame(body, crc)
            content += line
        self.disk.files.clear()
        store = DiskStore(self.disk)
        store.start(1)
        store.write(memoryview(content))
        store.sync()


def aged(body: bytes) -> bytes:
    """A record with its fields' defaults written out; a configuration without those that say nothing."""
    raw: dict[str, Any] = orjson.loads(body)
    event = decode(raw)
    for each in fields(event):
        if each.init and each.name not in raw and each.name not in ("params", "plan"):
            default = each.default_factory() if each.default_factory is not MISSING else each.default
            raw[each.name] = list(default) if isinstance(default, tuple) else default
    if isinstance(raw.get("config"), dict):
        plain = {each.name: each.default for each in fields(Config) if each.default is not MISSING}
        raw["config"] = {key: value for key, value in raw["config"].items() if key not in plain or value != plain[key]}
    if isinstance(event, Admit) and "params" in raw:
        written = {each.name: getattr(event.params, each.name) for each in fields(SamplingParams) if each.init}
        raw["params"] = {key: list(value) if isinstance(value, tuple) else value for key, value in written.items()}
    return orjson.dumps(raw)


def opening(config: Config) -> Started:
    """The record that a run's log begins with; on a fresh state it changes nothing."""
    return Started(t=0, config=config.as_dict())
