"""What arrives in a simulation: requests whose prompts are made only when they come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from leftfold.events import Admit, SamplingParams
from leftfold.replay.errors import ReplayError

TokenArray = npt.NDArray[np.int32]
TOKEN_SPACE = 1 << 30
"""Made-up prompt ids stay below this; made-up answers are at least this (`executor.sim.MADE_UP`)."""


class TraceError(ReplayError):
    """A trace that cannot be read; the message names file, place and what is wrong."""


@dataclass(slots=True)
class Job:
    """One request. `t`: when it comes, in µs; with `after` so many µs after that request has ended.

    `admit(t)`: its `Admit`, made when it comes. `prompt_tokens`, `output_tokens`: its size. `abort_after`: µs after
    its arrival at which its client leaves (None: it stays).
    """

    rid: str
    t: int
    admit: Callable[[int], Admit]
    prompt_tokens: int
    output_tokens: int
    after: str | None = None
    abort_after: int | None = None


def job(
    rid: str, t: int, prompt: Callable[[], TokenArray], prompt_tokens: int, output_tokens: int, after: str | None = None
) -> Job:
    """A job that gets exactly `output_tokens` tokens, as far as the limits allow."""

    def admit(now: int) -> Admit:
        params = SamplingParams(max_tokens=output_tokens, temperature=0.0)
        return Admit(t=now, rid=rid, prompt=prompt(), params=params)

    return Job(rid, t, admit, prompt_tokens, output_tokens, after)


def block_prompt(blocks: Sequence[int] | npt.NDArray[Any], size: int, length: int) -> TokenArray:
    """`length` token ids of which each stretch of `size` is a function of its block's number alone."""
    ids = np.asarray(blocks, np.int64)[:, None] * size + np.arange(size)
    whole = ids.reshape(-1)[:length] % TOKEN_SPACE
    if len(whole) < length:  # a trace whose last block is not named: tokens that nobody shares
        whole = np.concatenate((whole, (np.arange(length - len(whole)) + int(whole[-1]) * 31 + 7) % TOKEN_SPACE))
    return whole.astype(np.int32)


def drawn_prompt(seed: int, number: int, length: int) -> TokenArray:
    """`length` token ids that no other request shares, a function of `seed` and the request's number."""
    return np.random.default_rng((seed, number)).integers(0, TOKEN_SPACE, length, dtype=np.int32)


def text_prompt(text: str) -> TokenArray:
    """A stand-in for a tokenizer: one token for four bytes of UTF-8, so that equal beginnings stay equal."""
    raw = text.encode()
    raw += b"\0" * (-len(raw) % 4)
    return (np.frombuffer(raw, "<u4") % TOKEN_SPACE).astype(np.int32)


__all__ = ["Job", "TOKEN_SPACE", "TraceError", "block_prompt", "drawn_prompt", "job", "text_prompt"]
