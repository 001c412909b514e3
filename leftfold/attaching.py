"""Values beside the tokens join the outputs they belong to, outside log and reducer: they decide nothing."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from leftfold.events import Admit
from leftfold.executor.base import Attachment, Score
from leftfold.fsm import Effects, Output
from leftfold.fsm.request import Request

Key = tuple[str, int, int]
"""A choice: rid, epoch, choice."""


@dataclass(slots=True)
class Delivery(Effects):
    """What an event led to, as it leaves the engine: its effects, and what comes beside their outputs.

    `attachments`: at most one per choice, and only for a choice with an output here; it belongs to the first of them.
    """

    attachments: Sequence[Attachment] = ()


def delivery(effects: Effects, attachments: Sequence[Attachment] = ()) -> Delivery:
    """`effects` with `attachments`."""
    return Delivery(
        effects.plan, effects.outputs, effects.acks, effects.kv_events, effects.wake_at, attachments=attachments
    )


def by_choice(attachments: Sequence[Attachment]) -> dict[Key, Sequence[Score]]:
    """The scores of each choice; whoever goes through the outputs pops them."""
    return {(rid, epoch, choice): scores for rid, epoch, choice, scores in attachments}


class _Choice:
    """What waits for the next output of one choice. `since`: steps up to it are another request's of this name."""

    __slots__ = ("since", "told", "waiting")

    def __init__(self, since: int) -> None:
        self.since = since
        self.told = 0
        self.waiting: dict[int, Score] = {}


class Attaching:
    """Holds attachments until their output leaves: every position once, in order, however often it was computed.

    A step says scores of prompts long before the first token, and says them again when a request that was preempted
    computes its prompt again; a drawn token's score counts only if the reducer took the token.
    """

    def __init__(self) -> None:
        self._choices: dict[Key, _Choice] = {}

    def __bool__(self) -> bool:
        return bool(self._choices)

    def open(self, event: Admit, live: Container[Key], step: int) -> None:
        """An `Admit` that wants attachments was folded: the choices that it made get them, from steps after `step`."""
        if (event.rid, event.epoch, 0) in live:  # else refused, for whatever stands in it
            for key in ((event.rid, event.epoch, choice) for choice in range(event.params.n)):
                if key in live:
                    self._choices.setdefault(key, _Choice(step))

    def resume(self, live: Mapping[Key, Request]) -> None:
        """The requests of a log go on: those that want attachments get them for what is drawn from now on."""
        for key, request in live.items():
            if request.want:
                self._choices[key] = _Choice(0)

    def take(self, step: int, attachments: Sequence[Attachment]) -> None:
        """What the executor said beside the tokens of a step that the reducer took."""
        for rid, epoch, number, scores in attachments:
            choice = self._choices.get((rid, epoch, number))
            if choice is not None and step > choice.since:
                choice.waiting.update((score.position, score) for score in scores if score.position >= choice.told)

    def join(self, outputs: Iterable[Output]) -> list[Attachment]:
        """What leaves with these outputs. A terminal output closes its choice."""
        leaving: dict[Key, list[Score]] = {}
        for output in outputs:
            key = (output.rid, output.epoch, output.choice)
            choice = self._choices.get(key)
            if choice is None:
                continue
            upto = output.position + len(output.tokens)
            ready = sorted(position for position in choice.waiting if position < upto)
            choice.told = upto
            if ready:
                leaving.setdefault(key, []).extend(choice.waiting.pop(position) for position in ready)
            if output.finish_reason is not None:
                del self._choices[key]
        return [Attachment(*key, scores) for key, scores in leaving.items()]


__all__ = ["Attaching", "Delivery", "by_choice", "delivery"]
