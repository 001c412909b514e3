"""Text out of tokens as they come: never half a character, never a step back, constant work per token.

Most tokenizers say which bytes each token stands for (byte-level BPE; pieces with byte fallback): then the text is
an incremental UTF-8 decoding of those bytes. For all others a small window of tokens is decoded again and again,
and what no longer changes is given out.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import tokenizers

REPLACEMENT = "\ufffd"
_SPACE_MARK = "\u2581"
_WINDOW_LIMIT = 32


class Detokenizer(Protocol):
    """What both kinds do. The concatenation of all that `push` and `finish` return is the text."""

    def push(self, ids: Sequence[int]) -> str:
        """The text that is final now that `ids` have come."""

    def finish(self) -> str:
        """What was held back; an incomplete character becomes U+FFFD, as in the tokenizer's own decoding."""


class ByteDetokenizer:
    """Decodes the tokens' bytes as UTF-8; `pieces[id]` is None for tokens that are not shown."""

    def __init__(self, pieces: Sequence[bytes | None], strip_first_space: bool = False) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip = strip_first_space

    def push(self, ids: Sequence[int]) -> str:
        pieces = self._pieces
        data = b"".join(piece for i in ids if 0 <= i < len(pieces) and (piece := pieces[i]))
        return self._shown(self._decoder.decode(data))

    def finish(self) -> str:
        return self._shown(self._decoder.decode(b"", final=True))

    def _shown(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class WindowDetokenizer:
    """Decodes a window of recent tokens before and after each new one, and gives out the stable difference.

    Tokens before the window serve as context only (a decoder may treat the first token of a text specially). A
    window that stays unfinished for 32 tokens (an endless run of broken bytes) is given out as it is, so that
    the work per token is bounded.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = special_ids(tokenizer)
        self._context: list[int] = []
        self._fresh: list[int] = []
        self._sent = 0  # characters of the window's text that were given out

    def push(self, ids: Sequence[int]) -> str:
        return "".join(self._push_one(i) for i in ids if i not in self._special)

    def finish(self) -> str:
        text = self._decode(self._context + self._fresh)
        tail, self._sent = text[self._sent :], len(text)
        return tail

    def _push_one(self, token: int) -> str:
        self._fresh.append(token)
        text = self._decode(self._context + self._fresh)
        complete = not text.endswith(REPLACEMENT) or len(self._fresh) >= _WINDOW_LIMIT
        stable = text if complete else text.rstrip(REPLACEMENT)
        piece = stable[self._sent :]
        self._sent = max(self._sent, len(stable))
        if complete and text:  # a context without text would make the next token look like the first
            self._context, self._fresh = self._fresh, []
            self._sent = len(self._decode(self._context))
        return piece

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def special_ids(tokenizer: tokenizers.Tokenizer) -> frozenset[int]:
    """Ids of tokens that control the model and are not shown as text."""
    return frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)


def byte_pieces(tokenizer: tokenizers.Tokenizer) -> tuple[list[bytes | None], bool] | None:
    """The bytes of every token and whether a text loses its first space, or None if the decoder is of another kind."""
    decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else None
    steps = _flatten(decoder)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _table(tokenizer, _ByteLevel()), False
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and _is_space_mark(steps[0]) and _is_space_strip(steps[3:]):
        return _table(tokenizer, _byte_fallback), bool(steps[3:])
    return None


def _flatten(decoder: Any) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _is_space_mark(step: dict[str, Any]) -> bool:
    return step.get("pattern") == {"String": _SPACE_MARK} and step.get("content") == " "


def _is_space_strip(steps: list[dict[str, Any]]) -> bool:
    return not steps or steps == [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]


def _table(tokenizer: tokenizers.Tokenizer, to_bytes: Any) -> list[bytes | None]:
    special = special_ids(tokenizer)
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    table: list[bytes | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
    for piece, i in vocabulary.items():
        if i not in special:
            table[i] = to_bytes(piece)
    return table


class _ByteLevel:
    """Undoes GPT-2's printable stand-ins for bytes; a piece with any other character stands for itself."""

    def __init__(self) -> None:
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others: Iterable[int] = (b for b in range(256) if b not in set(printable))
        self._byte_of = {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}

    def __call__(self, piece: str) -> bytes:
        try:
            return bytes(self._byte_of[char] for char in piece)
        except KeyError:
            return piece.encode()


def _byte_fallback(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes([int(piece[3:5], 16)])
        except ValueError:
            pass
    return piece.replace(_SPACE_MARK, " ").encode()
