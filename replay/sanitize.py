"""A copy of a log that may be shared: no text, no token id that tells anything, and the same plans.

The log is folded twice while it is read: as it is, which says what stands before each sampled token, and as it becomes,
which gives the digests that results attest to. See docs/decisions/0010-sanitized-logs.md.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import islice
from typing import Any

import numpy as np

from leftfold.events import (
    Abort,
    Admit,
    Control,
    Event,
    EventLog,
    ForwardDone,
    LogReader,
    Plan,
    Reconfigure,
    SamplingParams,
    Started,
    Tick,
    TransferDone,
)
from leftfold.events.keyed import KEY_BYTES, MAX_TOKEN, Texts, TokenCipher
from leftfold.fsm import Effects, State
from leftfold.fsm.controls import operation
from leftfold.replay.errors import ReplayError
from leftfold.replay.fold import Fold

Key = tuple[str, int, int]

_KEPT_REASONS = ("stop_string",)
"""Reasons of an `Abort` that decide how the request ends."""
_KEPT_ERROR = ("retry", "apart", "rows")
"""What decides in the error of a step; the rest is told."""
_KEPT_WANTS = ("logprobs", "logprobs_from")
_KEPT_DIGESTS = 64
"""So many plans later a result still has the digest that its plan had."""


class SanitizeError(ReplayError):
    """A log that cannot be made shareable; nothing of it was written."""


def sanitize(log: LogReader, out: str | os.PathLike[str], key: bytes | None = None) -> int:
    """Write the copy into the folder `out`; how many events it has. `key` None: a fresh one, which nobody keeps.

    Raises `SanitizeError` for a log whose beginning is not there, `LogError`, `OSError`.
    """
    if log.first_seq > 1:
        raise SanitizeError(f"the log begins at record {log.first_seq}: only one that is whole can be sanitized")
    end = 0

    def surveyed() -> Iterator[Event]:
        nonlocal end
        for end, event in log:  # noqa: B007  # the log may grow while it is copied, by ids that were not surveyed
            yield event

    stops, bounds = survey(surveyed())
    keyed = Sanitizer(key or secrets.token_bytes(KEY_BYTES), stops, bounds)
    with EventLog.open(out) as copy:
        for seq, event in islice(log, end):
            copy.append(keyed.take(seq, event))
        return len(copy)


def survey(events: Iterable[Event]) -> tuple[list[int], list[int]]:
    """All stop ids, and all vocabulary sizes, that a log speaks of."""
    stops: set[int] = set()
    bounds: set[int] = set()
    for event in events:
        if isinstance(event, Admit) and isinstance(event.params.stop_token_ids, list | tuple):
            stops.update(token for token in event.params.stop_token_ids if type(token) is int)
        told = event.config if isinstance(event, Started) else event.set if isinstance(event, Reconfigure) else None
        if told and type(told.get("vocab_size")) is int:
            bounds.add(told["vocab_size"])
    return sorted(stops), sorted(bounds)


class Sanitizer:
    """Takes records in order and gives what stands for them."""

    def __init__(self, key: bytes, stops: Sequence[int] = (), bounds: Sequence[int] = ()) -> None:
        self._texts = Texts(key)
        self._cipher = TokenCipher(key, stops, bounds)
        self._before: dict[Key, bytes] = {}  # what stands before the next token of each live choice
        self._behind = self._cipher.start  # what stands behind the prompt of the newest `Admit`
        self._was, self._is = Fold(), Fold()
        self._digests: dict[int, tuple[str, str]] = {}  # of the newest plans, as they were and as they are
        self._folds = True

    def take(self, seq: int, event: Event) -> Event:
        """What stands for record `seq`."""
        found = self._replaced(event)
        if self._folds:
            try:
                was = self._was.take(seq, event)
                effects = self._is.take(seq, found)
            except ReplayError:  # whoever replays the copy meets the same; what follows is only read
                self._folds = False
            else:
                self._note(event, was, effects)
        return found

    # What a fold says

    def _note(self, event: Event, was: Effects, effects: Effects) -> None:
        if isinstance(event, Started):
            self._digests.clear()
        if was.plan is not None and effects.plan is not None:
            self._digests[was.plan.step] = (was.plan.digest, effects.plan.digest)
            if len(self._digests) > _KEPT_DIGESTS:
                del self._digests[next(iter(self._digests))]
        if isinstance(event, Admit):
            self._admitted(event)
        for output in was.outputs:
            key = (output.rid, output.epoch, output.choice)
            if output.finish_reason is not None:
                self._before.pop(key, None)
            else:
                for token in output.tokens:
                    before = self._before.get(key, self._cipher.start)
                    self._before[key] = self._cipher.advance(before, int(token))

    def _admitted(self, event: Admit) -> None:
        state = self._was.state
        new = [] if state is None else [one.key for one in state.by_rid.get(event.rid, ())]
        fresh = [key for key in new if key not in self._before]
        self._before.update(dict.fromkeys(fresh, self._behind))

    def _sampled(self, done: ForwardDone) -> list[bytes] | None:
        """What stands before each token of a result, where it is one of the oldest step in flight."""
        state: State | None = self._was.state
        if state is None or not state.in_flight or state.in_flight[0].step != done.step or not self._folds:
            return None
        rows = state.in_flight[0].rows
        seats = [*rows.decode.seats, *(chunk.seat for chunk in rows.chunks if chunk.samples)]
        return [self._before.get(seat.request.key, self._cipher.start) for seat in seats]

    # What stands for an event

    def _replaced(self, event: Event) -> Event:
        if isinstance(event, Tick):
            return event if event.plan is None else replace(event, plan=self._plan(event.plan))
        changed = {field.name: self._field(field.metadata, getattr(event, field.name)) for field in fields(event)}
        if isinstance(event, Admit):
            changed |= self._admit(event)
        elif isinstance(event, Abort):
            changed["reason"] = event.reason if event.reason in _KEPT_REASONS else self._texts.text(event.reason)
        elif isinstance(event, ForwardDone):
            changed |= self._done(event)
        elif isinstance(event, TransferDone):
            changed["tokens"] = self._tokens(event.tokens)[0]
        return replace(event, **changed)

    def _field(self, declared: Mapping[str, str], value: Any) -> Any:
        return self._texts.scrub(value) if declared.get("text") in ("content", "name") else value

    def _admit(self, event: Admit) -> dict[str, Any]:
        numbers = {name: self._number(getattr(event, name)) for name in ("priority", "deadline", "queue_deadline")}
        want = event.want
        if isinstance(want, Mapping):
            want = {name if name in _KEPT_WANTS else self._texts.text(name): self._number(want[name]) for name in want}
        known = event.cache if event.cache in ("use", "read", "off") else self._texts.scrub(event.cache)
        prompt, self._behind = self._tokens(event.prompt)
        return {**numbers, "prompt": prompt, "params": self._params(event.params), "want": want, "cache": known}

    def _params(self, params: SamplingParams) -> SamplingParams:
        changed = {name: self._number(getattr(params, name)) for name in ("max_tokens", "min_tokens", "n")}
        changed |= {name: self._texts.scrub(getattr(params, name)) for name in ("grammar", "processors")}
        stops = params.stop_token_ids
        listed = isinstance(stops, list | tuple)
        changed["stop_token_ids"] = [self._number(stop) for stop in stops] if listed else self._texts.scrub(stops)
        if params.logit_bias is not None:
            permute, start = self._cipher.permute, self._cipher.start
            changed["logit_bias"] = {permute(start, token): bias for token, bias in params.logit_bias.items()}
        return replace(params, **changed)

    def _number(self, value: Any) -> Any:
        return value if value is None or isinstance(value, int) else self._texts.scrub(value)

    def _tokens(self, raw: Any, before: Sequence[bytes] | None = None) -> tuple[Any, bytes]:
        """Ids as they follow each other, or each after its own `before`; what holds none stays as wrong as it is."""
        start = self._cipher.start
        ids = _ids(raw)
        if ids is None:
            return self._wrong(raw), start
        if before is not None and len(before) == len(ids):
            return [self._cipher.permute(*one) for one in zip(before, ids, strict=True)], start
        return self._cipher.sequence(start, ids)

    def _wrong(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            value = value.tolist()
        if isinstance(value, list | tuple):
            return [self._wrong(item) for item in value]
        if type(value) is int:
            return min(max(value, -1), MAX_TOKEN + 1) if not 0 <= value <= MAX_TOKEN else 0
        return "x" * len(value) if isinstance(value, str) else self._texts.scrub(value)

    def _done(self, done: ForwardDone) -> dict[str, Any]:
        before = None if done.counts is not None else self._sampled(done)
        tokens = self._counted(done) if done.counts is not None else self._tokens(done.tokens, before)[0]
        was, now = self._digests.get(done.step, ("", ""))
        digest = done.digest
        if digest is not None:
            digest = now if digest == was else self._texts.text(digest)
        listed = {name: self._numbers(getattr(done, name)) for name in ("counts", "ended")}
        return {"tokens": tokens, "digest": digest, "error": self._error(done.error), "scores": (), **listed}

    def _error(self, error: Any) -> Any:
        """What decides stays; what is told is keyed."""
        if not isinstance(error, Mapping):
            return self._texts.scrub(error)
        found = {name: self._numbers(error[name]) for name in _KEPT_ERROR if name in error}
        if "text" in error:
            found["text"] = self._texts.scrub(error["text"])
        return found

    def _numbers(self, value: Any) -> Any:
        if isinstance(value, list | tuple | np.ndarray):
            return [self._number(item) for item in (value.tolist() if isinstance(value, np.ndarray) else value)]
        return self._number(value)

    def _counted(self, done: ForwardDone) -> Any:
        """Tokens of rows that got several: each row's follow each other."""
        ids, before, counts = _ids(done.tokens), self._sampled(done), _ids(done.counts)
        if ids is None or before is None or counts is None or len(before) != len(counts) or sum(counts) != len(ids):
            return self._tokens(done.tokens)[0]
        found: list[int] = []
        for start, count in zip(before, counts, strict=True):
            found += self._cipher.sequence(start, ids[len(found) : len(found) + count])[0]
        return found

    def _plan(self, plan: Plan) -> Plan:
        text = self._texts.text
        joins = [row._replace(rid=text(row.rid)) for row in plan.join]
        ends = [row._replace(rid=text(row.rid)) for row in plan.ends]
        return replace(plan, join=joins, ends=ends, ops=[self._operation(op) for op in plan.ops])

    def _operation(self, op: Any) -> Any:
        """An operation says again what its call said; every other holds names."""
        if isinstance(op, Control):
            state = self._is.state
            planned = operation(state) if self._folds and state is not None else None
            if planned is not None and planned.op == op.op:
                return planned
            return replace(op, args=self._texts.scrub(op.args))
        named = {field.name for field in fields(op)} & {"rid", "key", "peer"}
        return replace(op, **{name: self._texts.scrub(getattr(op, name)) for name in named})


def _ids(raw: Any) -> list[int] | None:
    """Token ids as the reducer reads them, None for what holds anything else."""
    try:
        found = np.asarray(raw)
    except (TypeError, ValueError, OverflowError):
        return None
    if not found.size and found.ndim == 1 and not isinstance(raw, str):
        return []
    if found.ndim != 1 or found.dtype.kind not in "iu":
        return None
    listed: list[int] = found.tolist()
    return listed if min(listed) >= 0 and max(listed) <= MAX_TOKEN else None


__all__ = ["SanitizeError", "Sanitizer", "sanitize", "survey"]
