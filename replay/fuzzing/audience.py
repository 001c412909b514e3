"""All clients of one run: who hears what, who must end now, and when the next of their deadlines expires."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from leftfold.events.plan import as_list
from leftfold.fsm import Effects, FinishReason, Output
from leftfold.fsm.effects import Outputs, TokenBatch
from leftfold.replay.fuzzing.clients import Client, Key
from leftfold.replay.fuzzing.errors import Violation


class Audience:
    """`live`: clients without a terminal output; `ended`: the newest terminal output of each (rid, epoch, choice).

    Whoever is named by `must_end` before an event has to end with it, for that reason; nobody else may, but by a token.
    """

    def __init__(self) -> None:
        self.live: dict[Key, Client] = {}
        self.ended: dict[Key, Output] = {}
        self._must: dict[Key, tuple[FinishReason, int | None]] = {}
        self.hurried = False  # whether any client ever had a deadline

    def add(self, client: Client) -> None:
        self.live[client.key] = client
        self.hurried = self.hurried or client.due() > 0

    def of(self, rid: str, epoch: int, choice: int | None = None) -> list[Client]:
        """Live clients of one request."""
        return [
            client
            for key, client in self.live.items()
            if key[0] == rid and key[1] == epoch and choice in (None, key[2])
        ]

    def must_end(self, client: Client, reason: FinishReason, keep: int | None = None) -> None:
        """The next event ends `client`; `keep`: output tokens that count, if not all."""
        self._must[client.key] = (reason, keep)

    def save(self) -> list[tuple[Client, tuple[Any, ...]]]:
        """Who lives, and what each has heard; for `restore`."""
        return [(client, client.save()) for client in self.live.values()]

    def restore(self, saved: Sequence[tuple[Client, tuple[Any, ...]]]) -> None:
        """Only what was heard when `saved` was made has been heard."""
        self._must.clear()
        self.live.clear()
        for client, known in saved:
            client.restore(known)
            self.live[client.key] = client

    def hear(self, effects: Effects, version: str) -> None:
        """Tell every client what the effects hold for it; `version`: of the weights. Raises `Violation`."""
        outputs = effects.outputs
        for part in outputs.parts if isinstance(outputs, Outputs) else outputs:
            if part.version != version:
                raise Violation("version", f"{[*effects.outputs]}, but the weights are {version!r}")
            if isinstance(part, Output):
                self._hear_output(part)
            elif part.ended:
                for output in part:
                    self._hear_output(output)
            else:
                self._hear_batch(part)
        if self._must:
            raise Violation("not-ended", f"{list(self._must)} had to end")

    def _hear_batch(self, batch: TokenBatch) -> None:
        """Tokens that end nobody, as columns: that is most of them, and rows would take their time."""
        live = self.live
        for seat, position, token in zip(batch.seats, as_list(batch.positions), as_list(batch.tokens), strict=True):
            client = live.get(seat.request.key)
            if client is None:
                raise Violation("after-end", f"{seat.request.key} is over, or was never admitted, and hears {token}")
            reason = client.hear_token(position, token)
            if reason is not None:
                raise Violation("finish-reason", f"{client.key} goes on after token {client.heard}, expected {reason}")

    def _hear_output(self, output: Output) -> None:
        key = (output.rid, output.epoch, output.choice)
        client = self.live.get(key)
        if client is None:
            raise Violation("after-end", f"{key} is over, or was never admitted, and hears {output}")
        if output.tokens:
            (token,) = output.tokens
            reason = client.hear_token(output.position, token)
            if output.finish_reason != reason:
                told = output.finish_reason
                raise Violation("finish-reason", f"{key} got {told} with token {client.heard}, expected {reason}")
            if reason is None:
                return
            client.check_usage(output, client.heard)
        else:
            self._hear_end(client, output)
        self.ended[key] = output
        del self.live[key]

    def _hear_end(self, client: Client, output: Output) -> None:
        """A terminal output without tokens."""
        reason, keep = self._must.pop(client.key, (None, None))
        if output.finish_reason is None or reason is not output.finish_reason:
            raise Violation("unasked-end", f"{client.key} ended with {output.finish_reason} ({output.error})")
        if output.position != client.known:
            raise Violation("order", f"{client.key} ended at {output.position}, expected {client.known}")
        if (output.error is not None) != (output.finish_reason is FinishReason.ERROR):
            raise Violation("error", f"{client.key} ended with {output.finish_reason} and {output.error}")
        client.check_usage(output, client.heard if keep is None else min(keep, client.heard))

    def due(self) -> int:
        """When the next deadline expires (absolute µs, 0: never)."""
        return min([due for client in self.live.values() if (due := client.due())], default=0)

    def expect_deadlines(self, t: int) -> None:
        """A `Tick` at `t` must end everybody whose time is over."""
        for client in self.live.values():
            if 0 < client.due() <= t:
                self.must_end(client, FinishReason.DEADLINE)
