"""One answer as it comes in: tokens to text, stop strings, the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leftfold.fsm import Output
from leftfold.text import StopMatcher, Tokenizer


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one answer; `cached_tokens` of the prompt were found in the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer. `finish_reason`: "stop", "length", "abort", "error" or "deadline"; `error` says what went wrong."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    prompt_token_ids: tuple[int, ...] = ()
    error: str | None = None


class Answer:
    """Collects one request's outputs. `result` is None until it has ended; a stop string ends it here at once."""

    def __init__(self, rid: str, prompt: Sequence[int], tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self.rid = rid
        self.prompt = tuple(prompt)
        self.text = ""
        self.token_ids: list[int] = []
        self.result: Completion | None = None
        self._detokenizer = tokenizer.detokenizer()
        self._matcher = StopMatcher(stops)

    def take(self, output: Output) -> str:
        """The text that became final with `output`."""
        if self.result is not None:
            return ""
        before = len(self.text)
        for token in output.tokens:
            self.token_ids.append(int(token))
            self.text += self._matcher.push(self._detokenizer.push((int(token),)))
            if self._matcher.stopped is not None:
                self._end("stop")
                return self.text[before:]
        if output.finish_reason is not None:
            self._flush()
            reason = "stop" if self._matcher.stopped is not None else output.finish_reason.value
            cached = output.usage.cached_tokens if output.usage is not None else 0
            self._end(reason, cached, None if output.error is None else output.error["text"])
        return self.text[before:]

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended it, so that the engine need not go on."""
        return self._matcher.stopped is not None

    def fail(self, error: str) -> None:
        """End it because nothing more will come."""
        if self.result is None:
            self._flush()
            self._end("error", 0, error)

    def _flush(self) -> None:
        self.text += self._matcher.push(self._detokenizer.finish()) + self._matcher.finish()

    def _end(self, reason: str, cached: int = 0, error: str | None = None) -> None:
        usage = Usage(len(self.prompt), len(self.token_ids), cached)
        self.result = Completion(self.text, tuple(self.token_ids), reason, usage, self.prompt, error)


__all__ = ["Answer", "Completion", "Usage"]
