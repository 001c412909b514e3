"""What the executor says of its steps becomes events: results, failures, losses, and who is to blame for them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import orjson

from leftfold.errors import EngineError
from leftfold.events import ControlDone, Event, ExecutorLost, ForwardDone
from leftfold.executor.base import Attachment, Result
from leftfold.fsm.state import InFlight, State
from leftfold.losses import Losses, Verdict, computed, places

logger = logging.getLogger("leftfold.engine")

CAREFUL_MICROSECONDS = 60_000_000
"""For so long after a death of its own doing no step begins before the log has it: the next must leave a trace."""


class Recording(Protocol):
    """Logs and folds an event. TypeError, ValueError: no record can hold it, and nothing happened."""

    def __call__(self, event: Event, attachments: Sequence[Attachment] = ()) -> object: ...


def _as_told(info: Any) -> Any:
    """An answer that no record can hold as it is: with text for its keys, as JSON tells it, or else described."""
    try:
        return orjson.loads(orjson.dumps(info, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY))
    except (TypeError, ValueError):
        return repr(info)


class Results:
    """`record` logs and folds; `now` is the time of the next event; `log_scores`: whether scores go into the log.

    `careful_until`: before that time no step begins that is not in the log.
    """

    def __init__(self, record: Recording, now: Callable[[], int], log_scores: bool) -> None:
        self._record = record
        self._now = now
        self._log_scores = log_scores
        self.losses = Losses()
        self.careful_until = 0

    def done(self, state: State, result: Result) -> bool:
        """A step was computed; False if the result is not that of its plan, so that the executor must begin anew.

        Raises EngineError once that was so too often.
        """
        oldest, error = _oldest(state), result.error
        if error is not None and error.get("retry") and not error.get("rows") and _is(oldest, result.step):
            error = _judged(error, self.losses.failed(places(oldest)))
        for op, info, fault in result.controls:
            try:
                self._record(ControlDone(t=self._now(), op=op, info=info, error=fault))
            except (TypeError, ValueError):
                self._record(ControlDone(t=self._now(), op=op, info=_as_told(info), error=fault and str(fault)))
        self._forward_done(result.step, result.tokens, result.digest, error, result.attachments)
        if state.executor_present:
            if error is None and self.losses:
                self.losses.passed(computed(state))
            return True
        text = f"the result of step {result.step} is not that of its plan"  # so the reducer took the executor for lost
        if self.losses.forge(places(oldest)):
            raise EngineError(f"{text}, the {self.losses.forged}. time without getting past it")
        logger.error("%s: the executor begins anew", text)
        return False

    def lost(self, state: State, step: int, why: str) -> None:
        """The executor was lost in `step`."""
        oldest = _oldest(state)
        verdict = self.losses.lost(places(oldest) if _is(oldest, step) else [])
        logger.error("executor lost in step %d (%d in a row): %s", step, self.losses.in_a_row, why)
        if verdict is not Verdict.AGAIN:
            error = {"text": why, "retry": verdict is not Verdict.END}
            self._forward_done(step, (), None, _judged(error, verdict))
        self._record(ExecutorLost(t=self._now(), error=why))

    def died(self, state: State, why: str) -> None:
        """The log is that of a process that died of itself, in the oldest step that is in flight: a loss as well."""
        oldest = _oldest(state)
        if oldest is not None:
            self.lost(state, oldest.step, why)
        self.careful_until = self._now() + CAREFUL_MICROSECONDS

    def before(self, state: State | None, event: Event) -> None:
        """An event of the log is about to be folded: what it tells of losses counts in this process, too."""
        self.losses.recall(event, None if state is None else _oldest(state))

    def after(self, state: State | None, event: Event) -> None:
        """It was folded."""
        if self.losses and state is not None and type(event) is ForwardDone and event.error is None:
            self.losses.passed(computed(state))

    def _forward_done(
        self, step: int, tokens: Any, digest: str | None, error: Any, attachments: Sequence[Attachment] = ()
    ) -> None:
        kept = [_plain(said) for said in attachments] if self._log_scores else ()
        done = ForwardDone(t=self._now(), step=step, tokens=tokens, digest=digest, error=error, scores=kept)
        self._record(done, attachments)


def _oldest(state: State) -> InFlight | None:
    return state.in_flight[0] if state.in_flight else None


def _is(oldest: InFlight | None, step: int) -> bool:
    """Whether `step` is the oldest in flight; else what comes of it is void, and nobody is to blame."""
    return oldest is not None and oldest.step == step


def _judged(error: Mapping[str, Any], verdict: Verdict) -> Mapping[str, Any]:
    return {**error, "apart": True} if verdict is Verdict.APART else error


def _plain(said: Attachment) -> list[Any]:
    """Scores as a record holds them."""
    scores = [[score.position, score.token, score.logprob, [[*one] for one in score.top]] for score in said.scores]
    return [said.rid, said.epoch, said.choice, scores]


__all__ = ["Results"]
