"""The left fold: records in, state out. Recorded plans are applied as they stand; nothing is decided here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from leftfold.events import Event, Record, Started
from leftfold.fsm import LAWS, POLICIES, Config, ConfigError, Effects, State, step
from leftfold.replay.errors import NotStarted, ReducerFault, SettingsError, UnknownPolicy


@dataclass(slots=True)
class Fold:
    """A state and how far it is folded.

    `override`: settings that replace those of every `Started` that carries some (the first must). `seq`, `t`: of the
    last record taken. `first`, `last`: the first and the newest `Started`. `state` is None until the first.
    """

    override: Mapping[str, Any] = field(default_factory=dict)
    state: State | None = None
    seq: int = 0
    t: int = 0
    first: Started | None = None
    last: Started | None = None

    def take(self, seq: int, event: Event) -> Effects:
        """Apply one record. Raises `NotStarted`, or `ReducerFault` with the record's number."""
        if self.seq == 0 and seq > 1:
            raise NotStarted(f"the log begins at record {seq}: what went before can only come from a snapshot")
        if isinstance(event, Started):
            event = self._begin(seq, event)
        if self.state is None:
            raise NotStarted(f"seq {seq} is a {type(event).__name__}, but no Started comes before it")
        self.seq, self.t = seq, event.t
        try:
            return step(self.state, event)
        except Exception as error:  # nothing raises out of `step` but a programmer's error: name its record
            raise ReducerFault(seq, event, error) from error

    def _begin(self, seq: int, event: Started) -> Started:
        if event.laws > LAWS:
            raise NotStarted(f"the Started at seq {seq} needs laws {event.laws}; this version knows up to {LAWS}")
        if event.config is not None:
            event = self._configured(seq, event, event.config)
        elif self.state is None:
            raise NotStarted(f"the Started at seq {seq} carries no config: nothing says with which limits to fold")
        if self.first is None:
            self.first = event
        self.last = event
        return event

    def _configured(self, seq: int, event: Started, config: Mapping[str, Any]) -> Started:
        if self.override:
            config = {**config, **self.override}
            event = replace(event, config=config)
        check_policy(f"the Started at seq {seq}", config)
        try:
            usable = Config.from_dict(config)
            if self.state is None:
                self.state = State(usable)
        except (ConfigError, MemoryError, OverflowError, ValueError) as error:  # a pool that no machine can hold, too
            kind = SettingsError if self.override else NotStarted
            raise kind(f"the config of the Started at seq {seq} is not usable: {error}") from error
        return event


def check_policy(where: str, config: Mapping[str, Any]) -> None:
    """Raises `UnknownPolicy` for a config with a policy of a user's own that is not loaded."""
    policy = config.get("policy")
    if isinstance(policy, str) and ":" in policy and policy not in POLICIES:
        raise UnknownPolicy(where, policy)


def fold(records: Iterable[Record], at: int | None = None) -> Fold:
    """Fold `records` up to and including sequence number `at` (None: all of them)."""
    folded = Fold()
    for record in records:
        if at is not None and record.seq > at:
            break
        folded.take(record.seq, record.event)
    if folded.state is None:
        raise NotStarted("the log holds no Started" + ("" if at is None else f" up to seq {at}"))
    return folded


__all__ = ["Fold", "check_policy", "fold"]
