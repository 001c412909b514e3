"""From a client's body to what the engine is asked: token ids, sampling parameters, one request per choice."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from leftfold.events import SamplingParams
from leftfold.server.errors import ApiError, invalid, unsupported
from leftfold.server.openai_types import ChatBody, CompletionBody, GenerationBody
from leftfold.server.state import Service
from leftfold.text import Tokenizer
from leftfold.text.content import PARTS, ContentError, content_text

_GREEDY_BELOW = 1e-4  # a smaller temperature overflows float32 logits and means greedy anyway
DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Place:
    """Where a conversation stands in a body, so that messages about it name what was sent.

    `field`: the list of messages, after `before` that stand elsewhere; `parts`: types of text parts, the first is
    usual.
    """

    field: str = "messages"
    before: int = 0
    parts: tuple[str, ...] = PARTS

    def of(self, index: int) -> str:
        """The name of message `index`."""
        return f"{self.field}.{index - self.before}"


MESSAGES = Place()


@dataclass(frozen=True, slots=True)
class Job:
    """A generation: `n` choices for each of `prompts`; choice i belongs to prompt i // n. `params` has no seed yet.

    `want`: scores beside the tokens, as `Admit.want` says it. `token_ids`: pieces come for every token, text or not.
    """

    prompts: Sequence[Sequence[int]]
    n: int
    params: SamplingParams
    seed: int
    stops: Sequence[str]
    priority: int = 0
    timeout: float | None = None
    queue_timeout: float | None = None
    want: Mapping[str, int] | None = None
    token_ids: bool = False

    def requests(self) -> list[dict[str, Any]]:
        """The `Admit` fields of every choice; the first choice of a prompt draws as if it were alone."""
        return [
            {
                "prompt": prompt,
                "params": replace(self.params, seed=(self.seed + choice) % 2**64),
                "priority": self.priority,
                "want": self.want,
            }
            for prompt in self.prompts
            for choice in range(self.n)
        ]


async def completion_job(body: CompletionBody, service: Service, max_n: int) -> Job:
    """What `/v1/completions` asks for. Raises a 400 ApiError."""
    if body.suffix:
        raise unsupported("suffix")
    if body.best_of is not None and body.best_of != body.n:
        raise invalid("best_of", f"only best_of = n (here {body.n}) is supported", body.best_of)
    _check_common(body)
    count = len(body.prompt)
    if count > max_n:
        raise invalid("prompt", f"at most {max_n} prompts, got {count}")
    if count * body.n > max_n:
        raise invalid("n", f"{count} prompts with n choices each are more than {max_n} choices", body.n)
    prompts = [
        await service.texts.encode(prompt, service.max_prompt_len, "prompt") if isinstance(prompt, str) else prompt
        for prompt in body.prompt
    ]
    job = _job(body, service, prompts, body.max_tokens or DEFAULT_MAX_TOKENS, "prompt")
    if body.logprobs is None:
        return job
    return replace(job, want={"logprobs": body.logprobs, **({"logprobs_from": 0} if body.echo else {})})


async def chat_job(body: ChatBody, service: Service, max_n: int, place: Place = MESSAGES) -> Job:
    """What `/v1/chat/completions` asks for; its messages stood at `place`. Raises a 400 ApiError."""
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "is only allowed with logprobs = true", body.top_logprobs)
    if body.tools or body.functions:
        raise unsupported("tools" if body.tools else "functions")
    if body.response_format is not None and body.response_format.get("type") != "text":
        raise unsupported("response_format", 'only {"type": "text"} is')
    _check_common(body)
    if body.n > max_n:
        raise invalid("n", f"at most {max_n} choices", body.n)
    prompt = await chat_prompt(body.messages, service, body.add_generation_prompt, place)
    wanted = body.max_completion_tokens or body.max_tokens or service.max_model_len
    job = _job(body, service, [prompt], wanted, place.field)
    return replace(job, want={"logprobs": body.top_logprobs or 0}) if body.logprobs else job


async def chat_prompt(
    messages: Sequence[Any], service: Service, add_generation_prompt: bool, place: Place = MESSAGES
) -> list[int]:
    """The prompt ids of a conversation. Raises a 400 ApiError naming the message at fault."""
    plain = [_message(place, i, message, service.tokenizer) for i, message in enumerate(messages)]
    text = await service.texts.render(plain, add_generation_prompt, place.field)
    return await service.texts.encode(text, service.max_prompt_len, place.field, add_special_tokens=False)


def _message(place: Place, index: int, message: Any, tokenizer: Tokenizer) -> dict[str, Any]:
    where = place.of(index)
    if not isinstance(message, dict):
        raise invalid(where, "must be an object with role and content", message)
    role = message.get("role")
    if not isinstance(role, str) or not role or len(role) > 64:
        raise invalid(f"{where}.role", "must be a string of 1 to 64 characters", role)
    if role == "developer" and "developer" not in (tokenizer.template_source or ""):
        role = "system"  # the newer name of the same role
    return {**message, "role": role, "content": _content(where, message.get("content"), role, place.parts)}


def _content(where: str, content: Any, role: str, kinds: Sequence[str]) -> str:
    try:
        return content_text(content, role, kinds)
    except ContentError as error:
        if error.part is None:
            raise invalid(f"{where}.content", "must be a string or a list of text parts", content) from None
        form = f'must be {{"type": "{kinds[0]}", "text": "…"}} (types {", ".join(kinds)}); only text is supported'
        raise invalid(f"{where}.content.{error.part}", form, content[error.part]) from None


def _check_common(body: GenerationBody) -> None:
    if body.stream_options is not None:
        if not body.stream:
            raise invalid("stream_options", "is only allowed with stream = true", body.stream_options)
        if not isinstance(body.stream_options.get("include_usage") or False, bool):
            value = body.stream_options["include_usage"]
            raise invalid("stream_options.include_usage", "must be a boolean", value)
        if not isinstance(ids := body.stream_options.get("include_ids", True), bool):
            raise invalid("stream_options.include_ids", "must be a boolean", ids)


def _job(body: GenerationBody, service: Service, prompts: list[list[int]], max_tokens: int, param: str) -> Job:
    for prompt in prompts:
        check_prompt(prompt, service, param)
    for name, ids in (("stop_token_ids", body.stop_token_ids), ("logit_bias", body.logit_bias or ())):
        for token in ids:
            if token >= service.vocab_size:
                raise invalid(name, f"token ids must be below {service.vocab_size}", token)
    max_tokens = min(max_tokens, service.max_model_len)
    if body.min_tokens > max_tokens:
        raise invalid("min_tokens", f"must not be above max_tokens ({max_tokens})", body.min_tokens)
    eos = () if body.ignore_eos else service.tokenizer.eos_ids
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        stop_token_ids=list(dict.fromkeys((*eos, *body.stop_token_ids))),
        ignore_eos=body.ignore_eos,
        temperature=0.0 if body.temperature < _GREEDY_BELOW else float(body.temperature),
        top_p=float(body.top_p),
        top_k=max(body.top_k, 0),
        min_p=float(body.min_p),
        presence_penalty=float(body.presence_penalty),
        frequency_penalty=float(body.frequency_penalty),
        repetition_penalty=float(body.repetition_penalty),
        logit_bias=body.logit_bias or None,
    )
    seed = secrets.randbits(64) if body.seed is None else body.seed
    return Job(
        prompts, body.n, params, seed, body.stop, body.priority, body.timeout, body.queue_timeout,
        token_ids=body.return_token_ids,
    )  # fmt: skip


def check_prompt(prompt: Sequence[int], service: Service, param: str) -> None:
    """Raises a 400 ApiError if the engine could never run `prompt`."""
    if not prompt:
        raise invalid(param, "gives no tokens; it must not be empty")
    if len(prompt) > service.max_prompt_len:
        message = (
            f"{param}: has {len(prompt)} tokens, but prompts of this server have at most {service.max_prompt_len} "
            f"(model length {service.max_model_len}, answer included)"
        )
        raise ApiError(400, message, param=param, code="context_length_exceeded")
    check_token_ids(prompt, service, param)


def check_token_ids(ids: Sequence[int], service: Service, param: str) -> None:
    """Raises a 400 ApiError if one of `ids` is outside the vocabulary."""
    bad = next((token for token in ids if not 0 <= token < service.vocab_size), None)
    if bad is not None:
        raise invalid(param, f"token ids must be from 0 to {service.vocab_size - 1}", bad)
