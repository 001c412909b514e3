"""The request machine: one table of (phase, trigger) -> phase, the single source of truth."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING

from leftfold.fsm.errors import InvariantViolation

if TYPE_CHECKING:
    from leftfold.fsm.request import Request


class Phase(Enum):
    """Where a request is; what it owns there is vocabulary §5."""

    HELD = "held"
    WAITING = "waiting"
    LOADING = "loading"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    SENDING = "sending"
    PREEMPTED = "preempted"
    STOPPING = "stopping"
    FINISHED = "finished"

    __hash__ = object.__hash__  # members are singletons; the default hashes the name anew at every look-up


class Trigger(Enum):
    """What moves a request. `END` means: ended by a result, an abort or a deadline."""

    REFUSE = "refused"
    ADMIT = "admitted"
    ADMIT_HELD = "admitted with needs"
    PREPARED_PART = "prepared, needs left"
    PREPARED = "prepared"
    PREPARED_TOKENS = "prepared, has tokens"
    JOIN = "plan.join"
    JOIN_LOADING = "plan.join with a transfer"
    LOADED = "loaded, prompt incomplete"
    LOADED_TOKEN = "loaded with first token"
    LOAD_FAILED = "load failed"
    LOAD_FAILED_TOKENS = "load failed, has tokens"
    CHUNK = "chunk done"
    PREFILLED = "last chunk done"
    PREFILLED_SEND = "last chunk done, prefill role"
    TOKEN = "token"
    RETRY = "step failed, retry"
    PREEMPT = "plan.preempt"
    END = "end"
    END_IN_FLIGHT = "end while in flight"
    SENT = "transfer done"
    DRAINED = "nothing names it any more"
    REQUEUE = "executor lost or started"
    REQUEUE_TOKENS = "executor lost or started, has tokens"
    REQUEUE_HELD = "executor lost or started, must prepare"
    PEER_GONE = "executor lost or started, peer gone"

    __hash__ = object.__hash__


HELD, WAITING, LOADING, PREFILLING, DECODING, SENDING, PREEMPTED, STOPPING, FINISHED = Phase
"""The phases as globals: as attributes of an enumeration they cost five times that to look up."""
ADMIT, JOIN, CHUNK, PREFILLED, END = Trigger.ADMIT, Trigger.JOIN, Trigger.CHUNK, Trigger.PREFILLED, Trigger.END
"""Triggers that every request meets."""

_P, _T = Phase, Trigger

TRANSITIONS: Mapping[tuple[Phase | None, Trigger], Phase] = {
    (None, _T.REFUSE): _P.FINISHED,
    (None, _T.ADMIT): _P.WAITING,
    (None, _T.ADMIT_HELD): _P.HELD,
    (_P.HELD, _T.PREPARED_PART): _P.HELD,
    (_P.HELD, _T.PREPARED): _P.WAITING,
    (_P.HELD, _T.PREPARED_TOKENS): _P.PREEMPTED,
    (_P.HELD, _T.END): _P.FINISHED,
    (_P.HELD, _T.END_IN_FLIGHT): _P.STOPPING,
    (_P.WAITING, _T.JOIN): _P.PREFILLING,
    (_P.WAITING, _T.JOIN_LOADING): _P.LOADING,
    (_P.WAITING, _T.END): _P.FINISHED,
    (_P.PREEMPTED, _T.JOIN): _P.PREFILLING,
    (_P.PREEMPTED, _T.JOIN_LOADING): _P.LOADING,
    (_P.PREEMPTED, _T.END): _P.FINISHED,
    (_P.PREEMPTED, _T.END_IN_FLIGHT): _P.STOPPING,
    (_P.LOADING, _T.LOADED): _P.PREFILLING,
    (_P.LOADING, _T.LOADED_TOKEN): _P.DECODING,
    (_P.LOADING, _T.LOAD_FAILED): _P.WAITING,
    (_P.LOADING, _T.LOAD_FAILED_TOKENS): _P.PREEMPTED,
    (_P.LOADING, _T.END): _P.FINISHED,
    (_P.LOADING, _T.END_IN_FLIGHT): _P.STOPPING,
    (_P.PREFILLING, _T.CHUNK): _P.PREFILLING,
    (_P.PREFILLING, _T.PREFILLED): _P.DECODING,
    (_P.PREFILLING, _T.PREFILLED_SEND): _P.SENDING,
    (_P.DECODING, _T.TOKEN): _P.DECODING,
    (_P.SENDING, _T.SENT): _P.FINISHED,
    (_P.SENDING, _T.END_IN_FLIGHT): _P.STOPPING,
    (_P.SENDING, _T.REQUEUE_TOKENS): _P.PREEMPTED,
    (_P.SENDING, _T.PEER_GONE): _P.FINISHED,
    (_P.STOPPING, _T.DRAINED): _P.FINISHED,
    **{
        (phase, trigger): target
        for phase in (_P.PREFILLING, _P.DECODING)
        for trigger, target in (
            (_T.RETRY, phase),
            (_T.PREEMPT, _P.PREEMPTED),
            (_T.END, _P.FINISHED),
            (_T.END_IN_FLIGHT, _P.STOPPING),
        )
    },
    **{
        (phase, trigger): target
        for phase in (_P.HELD, _P.WAITING, _P.LOADING, _P.PREFILLING, _P.DECODING, _P.PREEMPTED)
        for trigger, target in (
            (_T.REQUEUE, _P.WAITING),
            (_T.REQUEUE_TOKENS, _P.PREEMPTED),
            (_T.REQUEUE_HELD, _P.HELD),
        )
    },
}

LIVE = (_P.HELD, _P.WAITING, _P.LOADING, _P.PREFILLING, _P.DECODING, _P.SENDING, _P.PREEMPTED)
"""Phases in which the terminal output has not been given."""


def advance(request: Request, trigger: Trigger) -> None:
    """Move `request` along the table. Raises `InvariantViolation` for a pair that the table does not have."""
    target = TRANSITIONS.get((request.phase, trigger))
    if target is None:
        phase = request.phase.name if request.phase else "-"
        raise InvariantViolation(f"request {request.rid!r}: no transition from {phase} on {trigger.name}")
    request.phase = target
