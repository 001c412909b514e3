"""Answers to what the engine neither logs nor folds: a faulted log, a value that no record can hold."""

from __future__ import annotations

from leftfold.events import Admit, Event
from leftfold.fsm import Ack, Effects, FinishReason, Output, Usage


def refusal(event: Event, code: str, reason: str) -> Effects:
    """The one terminal output of a refused `Admit`, the one ack of a refused control call, nothing for the rest."""
    outputs, acks = [], []
    if isinstance(event, Admit):
        error, count = {"code": code, "text": reason}, len(event.prompt)
        usage = Usage(count, 0, 0)
        outputs = [
            Output(event.rid, event.epoch, choice, count, (), FinishReason.ERROR, error, usage, "")
            for choice in range(max(1, event.params.n))
        ]
    elif call := getattr(event, "call", ""):
        acks = [Ack(call, False, reason)]
    return Effects(plan=None, outputs=outputs, acks=acks, kv_events=(), wake_at=None)


__all__ = ["refusal"]
