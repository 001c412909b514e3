"""What can go wrong at the front door."""

from __future__ import annotations


class EngineError(Exception):
    """The engine cannot start or go on; the message says what to do."""


class ConfigurationError(EngineError):
    """Options that cannot be met (a log of another model, too little KV memory, an unknown setting)."""


class EngineFault(EngineError):
    """The reducer failed, which only a programmer's error does. `seq`: the record that showed it."""

    def __init__(self, message: str, seq: int) -> None:
        super().__init__(message)
        self.seq = seq
