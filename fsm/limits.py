"""What a state may hold: the configuration, and the one demand function of pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from leftfold.fsm.policy import POLICIES

MAX_INT = 1 << 48
"""Counts and durations stay far from where 64 bits end."""

MAX_ROWS = 1 << 16

MAX_DEPTH = 2
"""Steps that may be planned before the result of the one before them is in."""

MAX_TOKEN = (1 << 31) - 1
"""Token ids are int32."""


class ConfigError(ValueError):
    """A configuration that cannot be; the message names field and value."""


@dataclass(frozen=True, slots=True)
class Config:
    """Limits of one engine. Counts are of pages, rows or tokens; `op_deadline` is in µs (0: none).

    `max_chunk_tokens` None: as many as `max_batch_tokens`. `vocab_size` None: token ids are not bounded.
    `max_queued_*` None: no limit. `growth_horizon`: admission leaves room for so many more tokens of every row that
    runs, so that it need not preempt soon after. Raises `ConfigError` for values that no engine can have.

    Derived from them: `capacity`, tokens whose K/V the whole pool holds; `chunk`, the most tokens that one row computes
    in a step; `rows`, the most rows at once, since every decoding row must fit into the token budget of a step;
    `slots`, since rows that only drain keep theirs while others join.
    """

    num_pages: int
    page_size: int
    max_running: int
    max_batch_tokens: int
    max_model_len: int
    max_chunk_tokens: int | None = None
    pipeline_depth: int = 0
    policy: str = "fcfs"
    prefix_cache: bool = True
    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None
    vocab_size: int | None = None
    op_deadline: int = 0
    growth_horizon: int = 0
    capacity: int = field(init=False, repr=False, compare=False)
    chunk: int = field(init=False, repr=False, compare=False)
    rows: int = field(init=False, repr=False, compare=False)
    slots: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("num_pages", "page_size", "max_running", "max_batch_tokens", "max_model_len"):
            _positive(name, getattr(self, name))
        for name in ("max_chunk_tokens", "max_queued_requests", "max_queued_tokens", "vocab_size"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        if self.vocab_size is not None and self.vocab_size > MAX_TOKEN + 1:
            raise ConfigError(f"vocab_size {self.vocab_size} is more than int32 token ids can tell apart")
        for name, unit in (("op_deadline", "a duration in µs"), ("growth_horizon", "a number of tokens")):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= MAX_INT:
                raise ConfigError(f"{name} {value!r} is not {unit}")
        if type(self.prefix_cache) is not bool:
            raise ConfigError(f"prefix_cache {self.prefix_cache!r} is neither true nor false")
        if self.max_running > MAX_ROWS:
            raise ConfigError(f"max_running {self.max_running} is more than {MAX_ROWS}")
        if type(self.pipeline_depth) is not int or not 0 <= self.pipeline_depth <= MAX_DEPTH:
            raise ConfigError(f"pipeline_depth {self.pipeline_depth!r} must be 0 to {MAX_DEPTH}")
        if type(self.policy) is not str or self.policy not in POLICIES:
            raise ConfigError(f"policy {self.policy!r} is unknown: choose one of {', '.join(POLICIES)}")
        derived = {
            "capacity": self.num_pages * self.page_size,
            "chunk": self.max_chunk_tokens or self.max_batch_tokens,
            "rows": min(self.max_running, self.max_batch_tokens),
            "slots": self.max_running * (self.pipeline_depth + 1),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def as_dict(self) -> dict[str, Any]:
        """As `Started.config` records it."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.init}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Config:
        """From `Started.config`; fields of later versions are refused by name."""
        known = [field.name for field in fields(cls) if field.init]
        for name in raw:
            if name not in known:
                raise ConfigError(f"unknown configuration field {name!r}: known are {', '.join(known)}")
        try:
            return cls(**raw)
        except TypeError as error:
            raise ConfigError(f"incomplete configuration: {error}") from error


def _positive(name: str, value: object) -> None:
    if type(value) is not int or not 1 <= value <= MAX_INT:
        raise ConfigError(f"{name} {value!r} is not a positive integer")


def demand(tokens: int, page_size: int) -> int:
    """Pages that hold the K/V of `tokens` tokens: used to validate, to admit and to allocate."""
    return -(-tokens // page_size)


def token_limit(prompt: int, max_tokens: int, config: Config) -> int:
    """Most tokens (prompt included) a request can reach; its last token needs no K/V."""
    return min(prompt + max_tokens, config.max_model_len, config.capacity + 1)
