"""One answer's tokens become its text: decoded as they come, cut at stop strings, without the token that ended it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from leftfold.text.stops import StopMatcher
from leftfold.text.tokenizer import Tokenizer


class AnswerText:
    """Feed it every output of one choice; streamed or not, what it returns adds up to the same text.

    `stops`: strings before which the text ends; those in the first `min_tokens` tokens do not count. `stop_ids`:
    tokens that end the answer and are no part of its text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        stop_ids: Collection[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = tokenizer.detokenizer()
        self._matcher = StopMatcher(stops)
        self._stop_ids = frozenset(stop_ids)
        self._min_tokens = min_tokens
        self.tokens = 0
        """Tokens that count; a token that completes a stop string is the last."""
        self.reason: str | None = None
        """The engine's finish reason once the answer has ended; `stop` when a stop string ended it."""

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._matcher.stopped

    def take(self, tokens: Sequence[int], finish_reason: str | None = None) -> str:
        """The text that is final once `tokens` have come (and, with a `finish_reason`, nothing follows)."""
        if self.reason is not None:
            return ""
        text = ""
        for i, token in enumerate(tokens, start=1):
            self.tokens += 1
            if i == len(tokens) and finish_reason == "stop" and token in self._stop_ids:
                break
            piece = self._detokenizer.push((token,))
            text += piece if self.tokens <= self._min_tokens else self._matcher.push(piece)
            if self._matcher.stopped is not None:
                self.reason = "stop"
                return text
        if finish_reason is not None:
            text += self._matcher.push(self._detokenizer.finish())
            self.reason = finish_reason if self._matcher.stopped is None else "stop"
            text += self._matcher.finish()
        return text
