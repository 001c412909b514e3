"""The operator's desk: control calls, and an account of the engine machine that is kept apart from the reducer's."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from leftfold.events import (
    Adapter,
    Call,
    Control,
    FlushCache,
    Pause,
    Plan,
    Reconfigure,
    Resume,
    Session,
    Shutdown,
    Sleep,
    UpdateWeights,
    Wake,
)
from leftfold.fsm import Ack, Config, ConfigError, Gate
from leftfold.replay.fuzzing.clients import Client
from leftfold.replay.fuzzing.errors import Violation

STRICTER = ("wait", "keep", "abort")
FIXED = ("num_pages", "page_size", "max_model_len", "vocab_size", "prefix_cache")
VERBS: Mapping[type, str] = {Sleep: "sleep", Wake: "wake", UpdateWeights: "update_weights"}
SHUT = (Gate.CLOSING, Gate.STOPPED)


@dataclass(slots=True)
class Queued:
    """A call in the queue; `op`: its operation, once a plan has it."""

    event: Any
    op: int | None = None

    @property
    def barrier(self) -> bool:
        return not isinstance(self.event, (Call, FlushCache))


class Desk:
    """Says which answers each event must bring, and who may run.

    `before`: requests admitted before the pause that drains; `due`: (call, ok) that the event at hand must bring, in
    this order; `answered`: calls that are over.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.gate = Gate.RUNNING
        self.present = True
        self.mode = ""
        self.before = 0
        self.pauses: list[str] = []
        self.queue: deque[Queued] = deque()
        self.asleep: list[str] = []
        self.version = ""
        self.closing: list[str] = []
        self.closing_at = 0
        self.frozen = False
        self.due: list[tuple[str, bool]] = []
        self.posted = 0
        self.answered: dict[str, Ack] = {}
        self.flushed = False  # what was cached is not to be found after the event at hand
        self.taken = False  # an operation whose end nobody waits for any more may have taken all K/V
        self.changes = 0  # of limits with the event at hand

    def save(self) -> dict[str, Any]:
        """The whole account, for `restore`."""
        return {
            **vars(self), "pauses": self.pauses.copy(), "queue": [replace(queued) for queued in self.queue],
            "closing": self.closing.copy(), "due": self.due.copy(), "answered": self.answered.copy(),
        }  # fmt: skip

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go back to the account that `saved` is of."""
        vars(self).update(saved)
        self.pauses, self.closing, self.due = [*self.pauses], [*self.closing], [*self.due]
        self.queue, self.answered = deque(replace(queued) for queued in self.queue), dict(self.answered)

    # What may happen

    def passes(self) -> bool:
        """Whether any rows may be planned."""
        if not self.present or self.asleep or (self.queue and self.queue[0].barrier):
            return False
        if self.gate is Gate.DRAINING:
            return self.mode == "wait"
        return self.gate is Gate.RUNNING or (self.gate is Gate.CLOSING and not self.frozen)

    def may_run(self, client: Client) -> bool:
        """Whether the gate lets this client's request run."""
        return self.gate is not Gate.DRAINING or client.serial < self.before

    def ready(self, flights: int) -> bool:
        """Whether the head of the queue must get its operation with the next `Tick`."""
        if not self.queue or self.queue[0].op is not None or not self.present or self.gate is Gate.STOPPED:
            return False
        return not flights if self.queue[0].barrier else flights <= self.config.pipeline_depth

    def takes_rows(self) -> bool:
        """Whether the operation at the head of the queue takes the K/V of all rows with it."""
        event = self.queue[0].event
        return (isinstance(event, Sleep) and "kv" in event.tags) or (
            isinstance(event, UpdateWeights) and event.live == "recompute"
        )

    @property
    def may_have_taken(self) -> bool:
        """Whether an operation that takes all K/V has been asked for, and was done or not."""
        return self.taken or (bool(self.queue) and self.queue[0].op is not None and self.takes_rows())

    # Events, before they are folded

    def post(self, event: Any, serial: int) -> None:
        """A control call arrives; `serial`: requests admitted so far."""
        self.posted += 1
        call = event.call
        if isinstance(event, (Session, Adapter)):
            self.due.append((call, False))
        elif isinstance(event, Pause):
            self._pause(event, serial)
        elif isinstance(event, Resume):
            self._resume(call)
        elif isinstance(event, Shutdown):
            self._shutdown(event)
        elif self.gate is Gate.STOPPED or (self.gate is Gate.CLOSING and not isinstance(event, Wake)) or _odd(event):
            self.due.append((call, False))
        else:
            self.queue.append(Queued(event))

    def _pause(self, event: Pause, serial: int) -> None:
        if event.mode not in STRICTER or self.gate in SHUT:
            self.due.append((event.call, False))
            return
        if self.gate is Gate.RUNNING:
            self.gate, self.mode, self.before = Gate.DRAINING, event.mode, serial
        elif STRICTER.index(event.mode) > STRICTER.index(self.mode):
            self.mode = event.mode
        if self.gate is Gate.PAUSED:
            self.due.append((event.call, True))
        else:
            self.pauses.append(event.call)

    def _resume(self, call: str) -> None:
        if self.gate in SHUT or self.asleep:
            self.due.append((call, False))
            return
        self.gate = Gate.RUNNING
        self._answer_pauses(False)
        self.due.append((call, True))

    def _answer_pauses(self, ok: bool) -> None:
        self.due += [(call, ok) for call in self.pauses]
        self.pauses = []

    def _shutdown(self, event: Shutdown) -> None:
        if self.gate is Gate.STOPPED:
            self.due.append((event.call, True))
            return
        self.closing.append(event.call)
        due = event.t + event.deadline if event.deadline else 0
        if self.gate is Gate.CLOSING:
            self.closing_at = min(due or self.closing_at, self.closing_at or due)  # the earlier one
            return
        self.frozen = self.gate is Gate.PAUSED
        self.gate, self.closing_at = Gate.CLOSING, due
        self._answer_pauses(False)

    def tick(self, plan: Plan, t: int, flights: int) -> None:
        """A plan starts what it starts. Raises `Violation` for an operation out of turn."""
        for op in plan.ops:
            head = self.queue[0] if self.queue else None
            if not isinstance(op, Control) or head is None or head.op is not None or (head.barrier and flights):
                raise Violation("control", f"{op} is planned, the queue is {list(self.queue)}, {flights} in flight")
            if op.verb != VERBS.get(type(head.event), getattr(head.event, "verb", None)):
                raise Violation("control", f"{op} is planned for {head.event}")
            head.op = op.op
        if self.closing_at and t >= self.closing_at:
            self._stop()

    def _stop(self) -> None:
        self.taken = self.may_have_taken
        self.due += [(queued.event.call, False) for queued in self.queue]
        self.queue.clear()
        self.due += [(call, True) for call in self.closing]
        self.gate, self.closing, self.closing_at, self.frozen = Gate.STOPPED, [], 0, False

    def done(self, op: int, ok: bool) -> Any:
        """An operation ends; the event whose effect happens with it, if one does."""
        if not self.queue or self.queue[0].op != op:
            return None
        event = self.queue.popleft().event
        self.due.append((event.call, ok))
        if not ok:
            return None
        if isinstance(event, Sleep):
            self.asleep = sorted({*self.asleep, *event.tags})
            self.flushed = "kv" in event.tags
        elif isinstance(event, Wake):
            self.asleep = [tag for tag in self.asleep if tag not in event.tags]
        elif isinstance(event, UpdateWeights):
            self.version, self.flushed = event.version, True
        return event

    def failed(self, ops: Iterable[int]) -> None:
        """Steps that started these operations are void."""
        if self.queue and self.queue[0].op in [*ops]:
            self.due.append((self.queue.popleft().event.call, False))

    def lost(self) -> None:
        """The executor is gone, with the operation it had."""
        self.present = False
        if self.queue and self.queue[0].op is not None:
            self.taken = self.taken or self.takes_rows()
            self.due.append((self.queue.popleft().event.call, False))

    def started(self, config: Config, within: bool) -> None:
        """An executor is ready; `within`: it began anew inside its process, with the weights it had."""
        self.lost()
        self.present, self.taken, self.asleep, self.config = True, False, [], config
        if within:
            return
        self.version = ""
        if self.gate is Gate.CLOSING:
            self.due += [(call, False) for call in self.closing]
        if self.gate in SHUT:
            self.gate = Gate.RUNNING
        self.closing, self.closing_at, self.frozen = [], 0, False

    # After the fold

    def settle(self, flights: int, clients: Mapping[Any, Client]) -> None:
        """What takes effect as soon as it may; `clients`: who lives now."""
        while self.queue and (answer := self._at_once(self.queue[0].event, flights)) is not None:
            self.due.append((self.queue.popleft().event.call, answer))
        if flights:
            return
        if self.gate is Gate.DRAINING:
            if self.mode == "keep" or all(client.serial >= self.before for client in clients.values()):
                self.gate = Gate.PAUSED
                self._answer_pauses(True)
        elif self.gate is Gate.CLOSING and not (self.queue and self.queue[0].op is not None):
            if self.frozen or not clients or (self.asleep and not self.queue):
                self._stop()

    def _at_once(self, event: Any, flights: int) -> bool | None:
        """The answer of a call that needs no operation, None if it has to wait or needs one."""
        if isinstance(event, FlushCache):
            self.flushed = True
            return True
        if isinstance(event, Wake) and "kv" in event.tags and "weights" in self.asleep and "weights" not in event.tags:
            return False
        if not isinstance(event, Reconfigure) or flights:
            return None
        try:
            if any(name in FIXED for name in event.set):
                return False
            self.config = replace(self.config, **event.set)
            self.changes += 1
        except (ConfigError, TypeError):
            return False
        return True

    def check(self, acks: Sequence[Ack], gate: Gate) -> None:
        """The answers of one event. Raises `Violation`."""
        if [(ack.call, ack.ok) for ack in acks] != self.due:
            raise Violation("ack", f"answered {acks}, expected {self.due}")
        for ack in acks:
            if ack.call in self.answered:
                raise Violation("ack", f"{ack} comes after {self.answered[ack.call]}")
            self.answered[ack.call] = ack
        self.due = []
        if gate is not self.gate:
            raise Violation("gate", f"the gate is {gate}, expected {self.gate}")


def _odd(event: Any) -> bool:
    if isinstance(event, (Sleep, Wake)):
        return not event.tags or not set(event.tags) <= {"weights", "kv"}
    return isinstance(event, UpdateWeights) and (event.live not in ("recompute", "keep") or not event.version)
