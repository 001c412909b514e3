"""One answer as it comes in: tokens to text, stop strings, scores, the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from leftfold.events import SamplingParams
from leftfold.executor.base import Score
from leftfold.fsm import Output
from leftfold.text import AnswerText, Tokenizer


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one answer; `cached_tokens` of the prompt were found in the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class TokenLogprob(NamedTuple):
    """What the model thought of a token, before temperature, penalties and filters: natural logarithms.

    `top`: (token id, logprob) of the likeliest tokens at its position, likeliest first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer. `finish_reason`: "stop", "length", "abort", "error" or "deadline"; `error` says what went wrong.

    `token_ids` include the token that ended the answer, `text` does not. `logprobs`, one per token id, and
    `prompt_logprobs`, one per token of the prompt (None for the first, which nothing predicts), if asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    prompt_token_ids: tuple[int, ...] = ()
    error: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None


class Beside(NamedTuple):
    """Scores asked for: so many alternatives for each token of the answer, and of its prompt; None: no scores."""

    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def want(self) -> dict[str, int] | None:
        """As an `Admit` says it."""
        counts = [count for count in self if count is not None]
        if not counts:
            return None
        whole = {} if self.prompt_logprobs is None else {"logprobs_from": 0}
        return {"logprobs": min(counts) if min(counts) < 0 else max(counts), **whole}  # a wrong one is to be refused


class Answer:
    """Collects one request's outputs. `result` is None until it has ended; a stop string ends it here at once."""

    def __init__(
        self,
        rid: str,
        prompt: Sequence[int],
        params: SamplingParams,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        beside: Beside | None = None,
    ) -> None:
        self.rid = rid
        self.prompt = tuple(prompt)
        self.text = ""
        self.token_ids: list[int] = []
        self.result: Completion | None = None
        self._text = AnswerText(tokenizer, stops, params.stop_token_ids, params.min_tokens)
        self._beside = beside or Beside()
        self._scores: dict[int, Score] = {}

    def take(self, output: Output, scores: Sequence[Score] = ()) -> str:
        """The text that became final with `output`; `scores`: what came beside it."""
        if self.result is not None:
            return ""
        tokens = [int(token) for token in output.tokens]
        reason = None if output.finish_reason is None else output.finish_reason.value
        text = self._text.take(tokens, reason)
        self.text += text
        self.token_ids += tokens[: self._text.tokens - len(self.token_ids)]
        self._scores.update((score.position, score) for score in scores)
        if self._text.reason is not None:
            cached = output.usage.cached_tokens if output.usage is not None else 0
            self._end(self._text.reason, cached, None if output.error is None else output.error["text"])
        return text

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended it, so that the engine need not go on."""
        return self._text.stopped is not None

    def _end(self, reason: str, cached: int, error: str | None) -> None:
        usage = Usage(len(self.prompt), len(self.token_ids), cached)
        first, end = len(self.prompt), len(self.prompt) + len(self.token_ids)
        drawn, prompt = (
            None if top is None else [self._logprob(position, top) for position in positions]
            for top, positions in zip(self._beside, (range(first, end), range(first)), strict=True)
        )
        self.result = Completion(
            self.text,
            tuple(self.token_ids),
            reason,
            usage,
            self.prompt,
            error,
            None if drawn is None else tuple(entry for entry in drawn if entry is not None),
            None if prompt is None else tuple(prompt),
        )

    def _logprob(self, position: int, top: int) -> TokenLogprob | None:
        score = self._scores.get(position)
        return None if score is None else TokenLogprob(score.token, score.logprob, tuple(score.top[:top]))


__all__ = ["Answer", "Beside", "Completion", "TokenLogprob", "Usage"]
