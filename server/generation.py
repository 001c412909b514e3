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
from leftfold.server.deadlines import deadlines
from leftfold.server.errors import ApiError, engine_error, stopping, too_late
from leftfold.server.group import EngineGone, EngineStopping, Group
from leftfold.server.state import ServerState
from leftfold.server.wire import Output
from leftfold.text import AnswerText

# The engine's finish reasons in the API's words. Whatever cut an answer short is "length": it is incomplete.
FINISH_REASONS: Mapping[str, str] = {"stop": "stop", "length": "length", "abort": "length", "deadline": "length"}
FIRST_OUTPUT_SECONDS = 5.0
"""So long the status waits for the first output; after that a stream begins, and says in it what goes wrong."""


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of choice `index`; `finish_reason` (the API's word) comes with the last one.

    `tokens`: those that it stands for; `at`: how much of the choice there is with it, tokens and one more for the end.
    `scores`, where they are wanted: of each token since the last one, its text shown or not; `prompt_scores`: of the
    prompt's, with the first.
    """

    index: int
    text: str
    finish_reason: str | None = None
    scores: Sequence[Score] = ()
    prompt_scores: Sequence[Score] = ()
    tokens: Sequence[int] = ()
    at: int = 0


class Generation:
    """Runs a job: `begin`, iterate for deltas, and always `close`, which aborts what is still running.

    `id`: the answer's, as the client sees it; `base`: of the ids that the engine knows it by. `version`: of the
    weights that the last tokens came from. `patient`: the server's end does not wait for it, nor ends it.
    """

    def __init__(self, state: ServerState, job: Job, patient: bool = False) -> None:
        self.id = self.base = ""
        self.version = ""
        self._patient = patient
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
        """Admits the choices, and waits for the first output, so that a status can say so if the engine refuses."""
        self.admit()
        await self.first()

    def admit(self) -> None:
        """Sends the choices to the engine. Raises ApiError where it takes no work."""
        self._check_awake()
        if self._state.phase == "draining":  # a stop came while the prompt was read
            raise stopping()
        if not self._state.ready:
            raise self._state.unready()
        limits = deadlines(self._job.timeout, self._job.queue_timeout, self._state.options)
        requests = [{**request, **limits} for request in self._job.requests()]
        try:
            self._group = self._state.serving().engine.admit(requests, self.base or None)
        except EngineGone as gone:
            raise gone_error(gone) from gone
        self._state.enter(self.id, self._group, self._patient)

    async def first(self) -> None:
        """Waits a while for the first output; raises the ApiError if it says that there is no answer."""
        first = None
        with contextlib.suppress(TimeoutError):  # a long wait: let the client see that the answer has begun
            first = await asyncio.wait_for(self.group.first(), FIRST_OUTPUT_SECONDS)
        if first is not None:
            self._check(first)

    def take_up(self, group: Group) -> None:
        """Goes on with what an earlier process of the server has begun."""
        self._group = group
        self._state.enter(self.id, group, self._patient)

    @property
    def group(self) -> Group:
        assert self._group is not None, "begin comes first"
        return self._group

    async def run(self) -> None:
        """Goes on to the end, whoever listens: stop strings end it, and it is counted."""
        try:
            async for _ in self:
                pass
        except ApiError:
            pass  # whoever reads it hears that
        finally:
            self.close()

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
        return usage_of(prompt, sum(choice.tokens for choice in self._choices), sum(self._cached[:: self._job.n]))

    async def __aiter__(self) -> AsyncIterator[Delta]:
        group = self.group
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
                tokens = output.tokens[: choice.tokens - counted]
                scores = self._scores(index, output, output.position + len(tokens))
                if choice.reason is not None:
                    group.stop(output, keep=choice.tokens)
                    self._metrics.finished(choice.reason, time.perf_counter() - self._started)
                    yield Delta(index, text, FINISH_REASONS[choice.reason], *scores, tokens, choice.tokens + 1)
                elif text or any(scores) or (tokens and self._job.token_ids):
                    yield Delta(index, text, None, *scores, tokens, choice.tokens)
        except EngineGone as gone:
            if any(choice.reason is None for choice in self._choices):
                raise gone_error(gone) from gone

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


def usage_of(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    """Token counts in the API's form."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def gone_error(reason: EngineGone) -> ApiError:
    """What clients are told of an engine that is gone."""
    if isinstance(reason, EngineStopping):
        return stopping()
    return ApiError(500, f"the engine stopped: {reason}", kind="server_error", code="engine_gone")
