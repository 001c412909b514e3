"""The digest chained over hydrated plans: what an executor attests to in its `ForwardDone`."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import orjson

from leftfold.events.codec import params_json, plan_json
from leftfold.events.plan import ExecutionPlan, Joined, Plan, TokenArray

START = "0" * 32
_INT32 = np.dtype("<i4")


def canonical(value: Any) -> bytes:
    """JSON bytes of plain values, sequences and integer arrays: equal values have equal bytes."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def digest_of(
    previous: str,
    plan: Plan,
    ended: Sequence[int],
    joined: Sequence[Joined],
    chunk_tokens: Sequence[TokenArray],
    voids: int = 0,
) -> str:
    """BLAKE2b-128 over the previous digest, the logged delta and everything hydrated into it; 32 hex digits.

    Each part says what it is and how long: no two plans make the same bytes.
    """
    delta = plan_json(plan)
    if not (ended or joined or chunk_tokens or voids):
        return blake2b(previous.encode() + delta, digest_size=16).hexdigest()
    parts = [previous.encode(), delta]
    if ended:
        parts += _part(b"ended", canonical(list(ended)))
    if voids:
        parts.append(b"\nvoids %d" % voids)
    for row in joined:
        parts += _part(b"params", params_json(row.params))
        parts += _part(b"prompt %d of" % row.prompt_len, _token_bytes(row.tokens))
        if row.want:
            parts += _part(b"want", canonical(row.want))
    for tokens in chunk_tokens:
        parts += _part(b"chunk", _token_bytes(tokens))
    return blake2b(b"".join(parts), digest_size=16).hexdigest()


def _part(name: bytes, content: bytes) -> tuple[bytes, bytes]:
    return b"\n%b %d " % (name, len(content)), content


def _token_bytes(tokens: TokenArray) -> bytes:
    return tokens.tobytes() if tokens.dtype is _INT32 else np.asarray(tokens, _INT32).tobytes()


def chain_digest(previous: str, plan: ExecutionPlan) -> str:
    """What `plan.digest` must be, given the digest of the plan before it (`START` after a `Started`)."""
    return digest_of(previous, plan.plan, plan.ended, plan.joined, plan.chunk_tokens, plan.voids)
