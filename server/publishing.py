"""What the engine's process says to the server after each event: how the engine stands, outputs, answers to calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from leftfold.attaching import Delivery, by_choice
from leftfold.server.wire import Answered, Outputs, Status, output_row


class Publisher:
    """Sends every event's visible effects; called in the engine's thread.

    A change of gate or sleep is said before the answer to the call that made it, and outputs before that, too: who has
    the answer finds its effect everywhere.
    """

    def __init__(self, send: Callable[[Any], None]) -> None:
        self._send = send
        self._engine: Any = None
        self._said: Status | None = None

    def watch(self, engine: Any) -> None:
        """Say how this engine stands, now and whenever that changes."""
        self._engine = engine
        self._say_status()

    def __call__(self, effects: Delivery) -> None:
        self._say_status()
        beside = by_choice(effects.attachments)
        rows = [output_row(row, beside.pop((row.rid, row.epoch, row.choice), ())) for row in effects.outputs]
        if rows:
            self._send(Outputs(rows))
        for ack in effects.acks:
            if ack.call:  # else nobody waits
                self._send(Answered(ack.call, ack.ok, ack.info))

    def _say_status(self) -> None:
        state = None if self._engine is None else self._engine.state
        if state is None:
            return
        status = Status(state.gate.value, list(state.asleep), self._engine.refusing)
        if status != self._said:
            self._said = status
            self._send(status)
