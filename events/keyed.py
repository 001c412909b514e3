"""Keyed stand-ins for what a log says: texts, names and token ids that tell nothing without the key, and stay equal.

Token ids are replaced by a permutation that depends on the key and on all ids before: sequences with a common beginning
keep exactly that, and nothing else, in common. A permutation is a Feistel network of six rounds of BLAKE2b on the
smallest fitting domain, walked until it lands in range (Black and Rogaway, "Ciphers with arbitrary finite domains",
2002). What keys it is the chained hash of all ids before, which nobody knows without the key that began it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

KEY_BYTES = 32
MAX_TOKEN = (1 << 31) - 1
_ROUND_TAGS = [bytes((number,)) for number in range(6)]


class Texts:
    """Texts and names under one key: equal ones stay equal, empty ones stay empty."""

    def __init__(self, key: bytes) -> None:
        self._key = blake2b(key, digest_size=KEY_BYTES, person=b"texts").digest()

    def text(self, text: str) -> str:
        """32 hex digits that stand for `text`."""
        if not text:
            return ""
        raw = text.encode("utf-8", "surrogatepass")
        return blake2b(raw, key=self._key, digest_size=16).hexdigest()

    def scrub(self, value: Any) -> Any:
        """Plain data of the same shape that tells nothing: of a number whether it is 0, and its sign."""
        if isinstance(value, str):
            return self.text(value)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            return (value > 0) - (value < 0)
        if isinstance(value, float):
            return 0.0 if value == 0 else 0.5 if value > 0 else -0.5
        if isinstance(value, Mapping):
            return {self.text(str(name)): self.scrub(item) for name, item in value.items()}
        return [self.scrub(item) for item in value]


class TokenCipher:
    """Permutes token ids by what stands before them.

    `fixed` ids (stop ids) stand for themselves, and nothing else does for them. `bounds`: ids below each of them stay
    below it (vocabulary sizes), so that an id that was outside the vocabulary still is.
    """

    def __init__(self, key: bytes, fixed: Iterable[int] = (), bounds: Iterable[int] = ()) -> None:
        self._key = blake2b(key, digest_size=KEY_BYTES, person=b"tokens").digest()
        edges = sorted({0, MAX_TOKEN + 1, *(bound for bound in bounds if 0 < bound <= MAX_TOKEN)})
        self._edges = edges
        kept = sorted({token for token in fixed if 0 <= token <= MAX_TOKEN})
        self._kept = frozenset(kept)
        self._bands = [_Band(low, high, kept) for low, high in zip(edges[:-1], edges[1:], strict=True)]
        self.start = blake2b(b"", key=self._key, digest_size=16).digest()

    def advance(self, before: bytes, token: int) -> bytes:
        """What stands before the token after `token`."""
        return blake2b(before + token.to_bytes(4, "little"), key=self._key, digest_size=16).digest()

    def permute(self, before: bytes, token: int) -> int:
        """What stands for `token` where `before` precedes it; what is no id (negative, too large) stays as it is."""
        if token in self._kept or not 0 <= token <= MAX_TOKEN:
            return token
        band = self._bands[bisect_right(self._edges, token) - 1]
        return band.unrank(_feistel(before, band.rank(token), band.size))

    def sequence(self, before: bytes, tokens: Sequence[int]) -> tuple[list[int], bytes]:
        """Stand-ins for ids that follow each other, and what stands before the next one."""
        found = []
        for token in tokens:
            found.append(self.permute(before, token))
            before = self.advance(before, token)
        return found, before


class _Band:
    """Ids in [low, high) but the fixed ones, numbered from 0."""

    def __init__(self, low: int, high: int, fixed: Sequence[int]) -> None:
        self._low = low
        self._fixed = fixed[bisect_left(fixed, low) : bisect_left(fixed, high)]
        self._before = [token - low - at for at, token in enumerate(self._fixed)]
        self.size = high - low - len(self._fixed)

    def rank(self, token: int) -> int:
        return token - self._low - bisect_left(self._fixed, token)

    def unrank(self, rank: int) -> int:
        return self._low + rank + bisect_right(self._before, rank)


def _feistel(key: bytes, value: int, size: int) -> int:
    bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << bits) - 1
    keys = [key + tag for tag in _ROUND_TAGS]
    while True:
        left, right = value >> bits, value & mask
        for round_key in keys:
            mixed = blake2b(round_key + right.to_bytes(2, "little"), digest_size=2).digest()
            left, right = right, left ^ (mixed[0] | mixed[1] << 8) & mask
        value = left << bits | right
        if value < size:
            return value


__all__ = ["KEY_BYTES", "TokenCipher", "Texts"]
