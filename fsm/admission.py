"""Admission: what can never run is refused at once with a clear error, everything else waits in line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from leftfold.events.codec import CodecError, params_json
from leftfold.events.digest import canonical
from leftfold.events.plan import TokenArray
from leftfold.events.quick import untouched
from leftfold.events.types import Admit, SamplingParams
from leftfold.fsm.effects import FinishReason, Outputs, closing_output
from leftfold.fsm.ending import forget
from leftfold.fsm.gate import CLOSING, STOPPED
from leftfold.fsm.lifecycle import ADMIT, Trigger, advance
from leftfold.fsm.limits import MAX_TOKEN, token_limit
from leftfold.fsm.prefix import namespace
from leftfold.fsm.request import NO_TOKENS, Request
from leftfold.fsm.seating import enqueue
from leftfold.fsm.state import State

_INT32 = np.dtype(np.int32)
_UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
MAX_INT = (1 << 62) - 1

MAX_CHOICES = 128
"""The most choices of one request."""

MAX_LOGPROBS = 20
"""The most alternatives that a request may ask for beside each token."""


class Refusal(Exception):
    """Why an `Admit` is refused: a code for the server, a text for the client."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


def choices(state: State, rid: str, epoch: int | None) -> list[Request]:
    """The live choices of one request, in order; of its latest live epoch when `epoch` is None."""
    live = state.by_rid.get(rid, [])
    if epoch is None and live:
        epoch = max([request.epoch for request in live])
    return [request for request in live if request.epoch == epoch]


def admit(state: State, event: Admit, outputs: Outputs) -> None:
    """A request enters the line, or is refused with a terminal output. One that is live already is a no-op.

    With n > 1 every choice is a request of its own; all but the first wait until the first has computed the prompt, and
    find its pages in the prefix cache.
    """
    if event.rid in state.by_rid and choices(state, event.rid, event.epoch):
        state.count("ignored")
        return
    try:
        if state.gate is CLOSING or state.gate is STOPPED:
            raise Refusal("closing", "the engine is shutting down")
        tokens = _tokens(event.prompt, state.config.vocab_size)
        _check(state, event, len(tokens))
        _check_writable(event)
        _check_queue(state, event.params.n, len(tokens))
    except Refusal as refusal:
        _refuse(state, event, refusal, outputs)
        return
    leader = _take(state, event, tokens, 0)
    state.requests[event.rid] = leader
    if event.params.n > 1:
        for choice in range(1, event.params.n):
            _take(state, event, tokens, choice).leader = leader


def _take(state: State, event: Admit, tokens: TokenArray, choice: int) -> Request:
    request = _request(state, event, tokens, choice)
    state.live[request.key] = request
    state.by_rid.setdefault(request.rid, []).append(request)
    advance(request, ADMIT)
    state.tenants.admitted(request.tenant)
    enqueue(state, request)
    if request.deadline_at:
        state.deadlines.add((request.deadline_at, request.arrival, 0), request)
    if request.queue_deadline_at:
        state.deadlines.add((request.queue_deadline_at, request.arrival, 1), request)
    return request


def _request(state: State, event: Admit, tokens: TokenArray, choice: int) -> Request:
    request = Request(event.rid, event.epoch, choice, state.next_arrival, tokens, event.params)
    request.priority = event.priority
    request.tenant = event.tenant
    request.limit = token_limit(len(tokens), event.params.max_tokens, state.config)
    request.deadline_at = event.t + event.deadline if event.deadline else 0
    request.rank = state.policy.rank(request)
    request.queue_deadline_at = event.t + event.queue_deadline if event.queue_deadline else 0
    request.want = event.want or None
    whole = event.want is not None and event.want.get("logprobs_from") is not None  # every position is computed
    request.wishes = (event.cache != "off" and not whole, event.cache == "use")
    request.use_cache(state.config.prefix_cache)
    request.salt = salt = event.cache_salt
    request.root = namespace(generation=state.generation, salt=salt) if salt else state.root
    state.next_arrival += 1
    return request


def _refuse(state: State, event: Admit, refusal: Refusal, outputs: Outputs) -> None:
    """A terminal output for every choice."""
    error = {"code": refusal.code, "text": refusal.text}
    count = event.params.n if _is_count(event.params.n, 1) and event.params.n <= MAX_CHOICES else 1
    for choice in reversed(range(count)):
        request = Request(event.rid, event.epoch, choice, state.next_arrival, NO_TOKENS, SamplingParams(n=count))
        request.prompt_len = len(event.prompt) if isinstance(event.prompt, (Sequence, np.ndarray)) else 0
        known = request.prompt_len
        outputs.parts.append(closing_output(request, known, FinishReason.ERROR, error, version=state.version))
        advance(request, Trigger.REFUSE)
        if event.rid not in state.by_rid:  # what lives is not hidden by what was refused
            state.requests[event.rid] = request
        forget(state, request)
    state.next_arrival += 1
    state.count("refused")


def _check_queue(state: State, count: int, tokens: int) -> None:
    config = state.config
    tokens *= count
    if config.max_queued_requests is not None and len(state.waiting) + count > config.max_queued_requests:
        raise Refusal("queue_full", f"{len(state.waiting)} requests are waiting, max_queued_requests is reached")
    if config.max_queued_tokens is not None and state.queued_tokens + tokens > config.max_queued_tokens:
        raise Refusal(
            "queue_full",
            f"{state.queued_tokens} tokens are waiting, {tokens} more are over max_queued_tokens "
            f"({config.max_queued_tokens})",
        )


def _tokens(prompt: Any, vocab_size: int | None) -> TokenArray:
    """The prompt as int32 ids of its own, or a refusal that names the first bad one."""
    plain = type(prompt) is np.ndarray and prompt.dtype is _INT32 and prompt.ndim == 1 and len(prompt) > 0
    tokens = prompt if plain else _integers(prompt)
    bound = MAX_TOKEN + 1 if vocab_size is None else vocab_size
    unsigned = tokens.view(_UNSIGNED[tokens.dtype.itemsize])  # so that one look finds negative ids, too
    if unsigned.item(unsigned.argmax()) >= bound:
        at = int((unsigned >= bound).argmax())
        raise Refusal("invalid", f"prompt[{at}] is {int(tokens[at])}, outside the vocabulary (0 to {bound - 1})")
    return tokens.copy() if plain else tokens.astype(np.int32)


def _integers(prompt: Any) -> npt.NDArray[Any]:
    """The prompt as an array of integers, or a refusal."""
    try:
        tokens = np.asarray(prompt)
    except (ValueError, TypeError, OverflowError):
        raise Refusal("invalid", "prompt is not a list of token ids") from None
    if tokens.ndim != 1:
        raise Refusal("invalid", "prompt is not a list of token ids")
    if not tokens.size:
        raise Refusal("invalid", "prompt is empty")
    if tokens.dtype.kind not in "iu":
        listed = prompt.tolist() if isinstance(prompt, np.ndarray) else [*prompt]
        wrong = [token for token in listed if type(token) is not int] or [max(listed, key=abs)]
        raise Refusal("invalid", f"prompt holds {wrong[0]!r}, which is no token id")
    return tokens


_is_usual = untouched({
    "priority": 0, "deadline": 0, "queue_deadline": 0, "adapter": "", "cache": "use", "media": (), "session": None,
    "peer": None, "shard": None, "task": "generate", "want": None,
})  # fmt: skip
_has_usual_params = untouched({"min_tokens": 0, "n": 1, "grammar": None, "processors": ()})


def _is_count(value: object, least: int) -> bool:
    return type(value) is int and least <= value <= MAX_INT


def _check(state: State, event: Admit, prompt: int) -> None:
    config, params = state.config, event.params
    if prompt >= config.max_model_len:
        raise Refusal("invalid", f"prompt has {prompt} tokens, max_model_len {config.max_model_len} leaves no room")
    if prompt > config.capacity:
        raise Refusal("invalid", f"prompt has {prompt} tokens, the KV memory holds {config.capacity}")
    if not _is_count(params.max_tokens, 1):
        raise Refusal("invalid", f"max_tokens is {params.max_tokens!r}, it must be at least 1")
    if not isinstance(params.stop_token_ids, (list, tuple)):
        raise Refusal("invalid", f"stop_token_ids is {params.stop_token_ids!r}, it must be a list of token ids")
    for token in params.stop_token_ids:
        if type(token) is not int or not 0 <= token <= MAX_TOKEN:
            raise Refusal("invalid", f"stop_token_ids holds {token!r}, which is no token id")
    if not (_is_usual(event) and _has_usual_params(params)):
        _check_unusual(event, params)


def _check_unusual(event: Admit, params: SamplingParams) -> None:
    """Fields that are nearly always at their defaults."""
    if not _is_count(params.n, 1) or params.n > MAX_CHOICES:
        raise Refusal("invalid", f"n is {params.n!r}, it must be 1 to {MAX_CHOICES}")
    if not _is_count(params.min_tokens, 0):
        raise Refusal("invalid", f"min_tokens is {params.min_tokens!r}, it must be at least 0")
    for name in ("deadline", "queue_deadline"):
        if not _is_count(getattr(event, name), 0):
            raise Refusal("invalid", f"{name} is {getattr(event, name)!r}, it must be a duration in µs")
    if type(event.priority) is not int or abs(event.priority) > MAX_INT:
        raise Refusal("invalid", f"priority is {event.priority!r}, it must be a 64-bit integer")
    if event.cache not in ("use", "read", "off"):
        raise Refusal("invalid", f"cache is {event.cache!r}, it must be use, read or off")
    if event.want is not None:
        _check_want(event.want)
    _check_supported(event)


def _check_writable(event: Admit) -> None:
    """What no record can hold would fail later, in a digest."""
    try:
        canonical([event.rid, event.epoch, event.tenant, event.cache_salt, event.want])
        params_json(event.params)
    except (TypeError, CodecError) as error:
        raise Refusal("invalid", f"the request cannot be written down: {error}") from None


def _check_want(want: object) -> None:
    """`logprobs`: so many alternatives a token; `logprobs_from`: the same for the prompt from that position on."""
    if not isinstance(want, Mapping):
        raise Refusal("invalid", f"want is {want!r}, it must be a mapping")
    for name, value in want.items():
        if name not in ("logprobs", "logprobs_from"):
            raise Refusal("invalid", f"want {name!r} is not supported")
        most = MAX_LOGPROBS if name == "logprobs" else MAX_TOKEN
        if value is not None and not (_is_count(value, 0) and value <= most):
            raise Refusal("invalid", f"{name} is {value!r}, it must be 0 to {most}")


def _check_supported(event: Admit) -> None:
    """What the vocabulary has and these laws do not do yet is refused, never ignored."""
    params = event.params
    wanted = {
        "grammar": params.grammar is not None,
        "processors": bool(params.processors),
        "adapter": bool(event.adapter),
        "media": bool(event.media),
        "session": event.session is not None,
        "peer": event.peer is not None,
        "shard": event.shard is not None,
        "task": event.task != "generate",
    }
    for name, asked in wanted.items():
        if asked:
            value = getattr(params, name) if hasattr(params, name) else getattr(event, name)
            raise Refusal("invalid", f"{name} {value!r} is not supported")
