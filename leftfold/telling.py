"""What events led to leaves the engine in their order, and no sooner than the log allows."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from leftfold.attaching import Delivery, delivery
from leftfold.fsm import Ack, Effects, FinishReason, Output, State
from leftfold.keeping import Keeper

SERVE, STOP = "serve", "stop"

Key = tuple[str, int, int]


class Telling:
    """Holds deliveries back until their events are safe, and knows what a failing log means for them.

    `on_failure`: with "stop", nothing is admitted while the log fails; what runs goes on, and with a log that is not
    strict it is told. With "serve" everything goes on and is told. A strict log that has ended can keep no promise any
    more, so that with "stop" everybody who waits is told an error (`strand`).
    """

    def __init__(self, log: Keeper, on_failure: str = STOP) -> None:
        if on_failure not in (STOP, SERVE):
            raise ValueError(f"on_failure is {on_failure!r}, must be {STOP!r} or {SERVE!r}")
        self._log = log
        self._serves = on_failure == SERVE
        self._held: deque[tuple[int, Delivery]] = deque()
        self._free: list[Delivery] = []
        self._said = ""
        self._over = False

    @property
    def refusing(self) -> str:
        """Why nothing new is admitted, "" where it is."""
        failure = self._log.failure
        return "" if failure is None or self._serves else f"the log cannot be written: {failure.reason}"

    @property
    def stranded(self) -> bool:
        """Whether nothing that is computed can ever be told."""
        failure = self._log.failure
        return failure is not None and failure.lasting and self._log.strict and not self._serves

    def hold(self, seq: int, told: Delivery) -> None:
        """What event `seq` led to."""
        if not self._over:
            self._held.append((seq, told))

    def tell(self, effects: Effects) -> None:
        """What no event in the log led to, and nothing need wait for."""
        self._free.append(delivery(effects))

    def leaving(self) -> list[Delivery]:
        """What may leave now, in order; each comes once."""
        if self.refusing != self._said:  # with the next delivery everybody hears how the engine stands
            self._said = self.refusing
            self.tell(Effects(None, (), (), (), None))
        leaving, self._free = self._free, []
        safe, held = self._log.safe, self._held
        unbound = self._log.failure is not None and (self._serves or not self._log.strict)
        while held and (unbound or held[0][0] <= safe):
            leaving.append(held.popleft()[1])
        return leaving

    def strand(self, state: State) -> None:
        """Nothing that is held back will ever be told: whoever waits for it, or for more, hears an error instead.

        The log keeps their requests as they were at its end, and the next start goes on with them. Once is enough.
        """
        if self._over:
            return
        self._over = True
        error = {"code": "failed", "text": self.refusing}
        waiting: dict[Key, int] = {}  # the position that would have come next
        calls: list[str] = []
        while self._held:
            _, told = self._held.popleft()
            calls += [ack.call for ack in told.acks]
            for output in told.outputs:
                waiting.setdefault((output.rid, output.epoch, output.choice), output.position)
        for key, request in state.live.items():
            waiting.setdefault(key, state.known(request))
        calls += [*(control.event.call for control in state.controls), *state.pause_calls, *state.closing_calls]
        acks = [Ack(call, False, self.refusing) for call in calls if call]
        self.tell(Effects(None, _errors(waiting, error), acks, (), None))


def _errors(waiting: dict[Key, int], error: dict[str, str]) -> Sequence[Output]:
    return [Output(*key, at, (), FinishReason.ERROR, error, None, "") for key, at in waiting.items()]


__all__ = ["SERVE", "STOP", "Telling"]
