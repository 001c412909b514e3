"""Text to token ids and back, away from the event loop; texts that no prompt can be are refused unread."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from leftfold.server.errors import ApiError, invalid
from leftfold.server.workers import Workers
from leftfold.text import TemplateError, Tokenizer

_LONG = 16_384  # characters, or tokens


class Texts:
    """A tokenizer for many at once: long texts wait for each other, and short ones pass them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._short = Workers("text", count=2, most=4096)
        self._long = Workers("long text", count=1, most=64)

    def _workers(self, size: int) -> Workers:
        return self._short if size < _LONG else self._long

    async def encode(self, text: str, room: int, param: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`. Raises a 400 ApiError if it is certainly more than `room` tokens."""
        most = room * self._tokenizer.longest_piece
        if len(text) > most:
            message = f"{param}: has {len(text)} characters; {room} tokens, the most that a prompt may have, are fewer"
            raise ApiError(400, message, param=param, code="context_length_exceeded")
        encode = functools.partial(self._tokenizer.encode, text, add_special_tokens=add_special_tokens)
        return await self._workers(len(text)).run(encode)

    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`."""
        decode = functools.partial(self._tokenizer.decode, ids, skip_special_tokens=skip_special_tokens)
        return await self._workers(len(ids)).run(decode)

    async def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, param: str) -> str:
        """The prompt text of a conversation. Raises a 400 ApiError if the model's template refuses it."""
        size = sum(len(message["content"]) for message in messages)
        render = functools.partial(self._tokenizer.render_chat, messages, add_generation_prompt=add_generation_prompt)
        try:
            return await self._workers(size).run(render)
        except TemplateError as error:
            raise invalid(param, str(error)) from error
