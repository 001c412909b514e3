"""One generation: the engine's tokens become pieces of text, cut at stop strings; streaming or not, the same text."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leftfold.executor.base import Score
from leftfold.server.admission import Job
from leftfold.server.client import EngineGone, EngineStopping, Group
from leftfold.server.deadlines import deadlines
from leftfold.server.errors import ApiError, engine_error, stopping, too_late
from leftfold.server.state import ServerState
from leftfold.server.wire import Output
from leftfold.text import AnswerText

# The engine's finish reasons in the API's words. Whatever cut an answer short is "length": it is incomplete.
FINISH_REASONS: Mapping[str, str] = {"stop": "stop", "length": "length", "abort": "length", "deadline": "length"}
_FIRST_OUTPUT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of choice `index`; `finish_reason` (the API's word) comes with the last one.

    `scores`, where they are wanted: of each token since the last one, its text shown or not; `prompt_scores`: of the
    prompt's, with the first.
    """

    index: int
    text: str
    finish_reason: str | None = None
    scores: Sequence[Score] = ()
    prompt_scores: Sequence[Score] = ()


class Generation:
    """Runs a job: `begin`, iterate for deltas, and always `close`, which aborts what is still running.

    `id`: the answer's, as the client sees it. `version`: of the weights that the last tokens came from.
    """

    def __init__(self, state: ServerState, job: Job) -> None:
        self.id = ""
        self.version = ""
        service = state.serving()
        self._state = state
        self._metrics = state.metrics
        self._job = job
        self._choices = [
            AnswerText(service.tokenizer, job.stops, job.params.stop_token_ids, job.params.min_tokens)
            for _ in range(len(job.prompts) * job.n)
        ]
        self._cached = [0] * len(self._choices)
        self._started = time.perf_counter()
        self._heard: dict[int, float] = {}
        self._computed: set[int] = set()
        self._group: Group | None = None

    async def begin(self) -> None:
        """Admits the choices; raises the ApiError if the engine refuses at once (a status can still say so)."""
        self._check_awake()
        if self._state.phase == "draining":  # a stop came while the prompt was read
            raise stopping()
        if not self._state.ready:
            raise self._state.unready()
        limits = deadlines(self._job.timeout, self._job.queue_timeout, self._state.options)
        try:
            self._group = self._state.serving().engine.admit([{**r, **limits} for r in self._job.requests()])
        except EngineGone as gone:
            raise _gone(gone) from gone
        self._state.enter(self.id, self._group)
        first = None
        with contextlib.suppress(TimeoutError):  # a long wait: let the client see that the answer has begun
            first = await asyncio.wait_for(self._group.first(), _FIRST_OUTPUT_SECONDS)
        if first is not None:
            self._check(first)

    def close(self) -> None:
        """Aborts whatever has not ended; closing twice is fine."""
        if self._group is not None:
            for _ in range(self._group.close()):
                self._metrics.finished("abort", time.perf_counter() - self._started)
            self._group = None
            self._state.leave(self.id)

    @property
    def usage(self) -> dict[str, Any]:
        """Token counts so far, in the API's form."""
        prompt = sum(len(p) for p in self._job.prompts)
        completion = sum(choice.tokens for choice in self._choices)
        cached = sum(self._cached[:: self._job.n])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    async def __aiter__(self) -> AsyncIterator[Delta]:
        assert self._group is not None, "begin comes first"
        group = self._group
        try:
            async for index, output in group:
                if self._choices[index].reason is not None:  # a stop string has ended it; this is what it had cost
                    self._count(index, output)
                    continue
                self._check(output)
                self.version = output.version
                self._measure(index, output)
                choice = self._choices[index]
                counted = choice.tokens
                text = choice.take(output.tokens, output.finish_reason)
                scores = self._scores(index, output, output.position + choice.tokens - counted)
                if choice.reason is not None:
                    group.stop(output, keep=choice.tokens)
                    self._metrics.finished(choice.reason, time.perf_counter() - self._started)
                    yield Delta(index, text, FINISH_REASONS[choice.reason], *scores)
                elif text or any(scores):
                    yield Delta(index, text, None, *scores)
        except EngineGone as gone:
            if any(choice.reason is None for choice in self._choices):
                raise _gone(gone) from gone

    def _scores(self, index: int, output: Output, end: int) -> tuple[Sequence[Score], Sequence[Score]]:
        """What came beside an output: of generated tokens before `end`, which count, and of the prompt's."""
        if not output.scores:
            return (), ()
        first = len(self._job.prompts[index // self._job.n])
        drawn = [score for score in output.scores if first <= score.position < end]
        return drawn, [score for score in output.scores if score.position < first]

    def _check_awake(self) -> None:
        try:
            self._state.check_awake()
        except ApiError:
            self._metrics.rejected(self._state.resting or "refusing")
            raise

    def _check(self, output: Output) -> None:
        """Raises the ApiError if this output means that there is no answer."""
        if output.error is not None or output.finish_reason == "error":
            self._metrics.rejected(str((output.error or {}).get("code", "failed")))
            raise engine_error(output.error)
        if output.finish_reason == "deadline" and not self._heard and not output.tokens:
            self._metrics.finished("deadline", time.perf_counter() - self._started)
            raise too_late()
        if output.finish_reason == "abort" and not self._state.ready and not self._heard and not output.tokens:
            self._metrics.finished("abort", time.perf_counter() - self._started)
            raise stopping()

    def _measure(self, index: int, output: Output) -> None:
        now = time.perf_counter()
        if output.tokens:
            if index in self._heard:
                self._metrics.inter_token_latency.observe((now - self._heard[index]) / len(output.tokens))
            else:
                self._metrics.time_to_first_token.observe(now - self._started)
                self._count_prompt(index // self._job.n)
            self._heard[index] = now
            self._metrics.generation_tokens.inc(len(output.tokens))
        self._count(index, output)

    def _count_prompt(self, number: int) -> None:
        """A prompt counts once, when the first of its choices has a token: then it has been computed."""
        if number not in self._computed:
            self._computed.add(number)
            self._metrics.prompt_tokens.inc(len(self._job.prompts[number]))

    def _count(self, index: int, output: Output) -> None:
        if output.usage:
            self._cached[index] = int(output.usage.get("cached_tokens") or 0)


def _gone(reason: EngineGone) -> ApiError:
    if isinstance(reason, EngineStopping):
        return stopping()
    return ApiError(500, f"the engine stopped: {reason}", kind="server_error", code="engine_gone")
