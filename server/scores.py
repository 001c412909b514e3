"""Scores beside tokens in the API's shapes: `logprobs` of chats and of plain completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from leftfold.executor.base import Score
from leftfold.text import Tokenizer

LOWEST = -9999.0
"""What stands for a probability of zero, which JSON's numbers cannot say."""


def shown_token(data: bytes) -> str:
    """A token's bytes as a string; what is no text by itself (a part of a character) is spelled `bytes:\\xf0\\x9f`."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class ChatScores:
    """`choices[].logprobs` of a chat: an entry for every token of the answer, the one that ended it included."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def shown(self, scores: Sequence[Score]) -> dict[str, Any]:
        content = [
            {**self._entry(score.token, score.logprob), "top_logprobs": [self._entry(*other) for other in score.top]}
            for score in scores
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token)
        return {"token": shown_token(data), "logprob": max(logprob, LOWEST), "bytes": list(data)}


class TextScores:
    """`choices[].logprobs` of one plain completion, in parallel lists; streamed or not, the lists add up to the same.

    `echo`: the text that comes before the completion; None: the prompt is not echoed. `prompt`: its tokens.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], echo: str | None) -> None:
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._echo = echo
        self._text = tokenizer.detokenizer()
        self._offset = len(echo or "")
        self.begun = False

    def shown(self, scores: Sequence[Score], prompt_scores: Sequence[Score]) -> dict[str, Any]:
        """The next entries; the prompt's come with the first. Offsets count characters from the start of the text."""
        lists: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        if self._echo is not None and not self.begun:
            self._add_prompt(lists, prompt_scores)
        self.begun = True
        for score in scores:
            self._add(lists, self._offset, score.token, score)
            self._offset += len(self._text.push((score.token,)))
        return lists

    def _add_prompt(self, lists: dict[str, list[Any]], scores: Sequence[Score]) -> None:
        """Of the first token nothing is known, so its numbers are null."""
        by_position = {score.position: score for score in scores}
        offset, text = 0, self._tokenizer.detokenizer()
        for position, token in enumerate(self._prompt):
            self._add(lists, offset, token, by_position.get(position))
            offset += len(text.push((token,)))

    def _add(self, lists: dict[str, list[Any]], offset: int, token: int, score: Score | None) -> None:
        name = self._name(token)
        lists["text_offset"].append(offset)
        lists["tokens"].append(name)
        if score is None:
            lists["token_logprobs"].append(None)
            lists["top_logprobs"].append(None)
            return
        lists["token_logprobs"].append(max(score.logprob, LOWEST))
        tops: dict[str, float] = {}
        for other, logprob in (*score.top, (token, score.logprob)):  # of tokens that look the same, the likeliest
            tops.setdefault(self._name(other), max(logprob, LOWEST))
        lists["top_logprobs"].append(tops)

    def _name(self, token: int) -> str:
        return shown_token(self._tokenizer.token_bytes(token))
