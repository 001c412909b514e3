"""The bodies that clients send: fields, types, ranges. Null means absent; unknown fields are ignored."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from leftfold.server.errors import ApiError, beyond, invalid

MAX_STOPS = 32
MAX_STOP_CHARS = 512
MAX_STOP_IDS = 256
MAX_BIASES = 1024
MAX_MESSAGES = 10_000
MAX_LOGPROBS = 20
MAX_SECONDS = 10**7


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _problem(text: str) -> PydanticCustomError:
    return PydanticCustomError("invalid", text)


def _stops(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise _problem("must be a string or a list of strings")
    if "" in stops:
        raise _problem("a stop string must not be empty; leave it out")
    if len(stops) > MAX_STOPS or any(not 1 <= len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise _problem(f"at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters each")
    return stops


def _stop_ids(value: Any) -> Any:
    if len(_token_list(value)) > MAX_STOP_IDS:
        raise _problem(f"at most {MAX_STOP_IDS} token ids")
    return value


def _token_list(value: Any) -> Any:
    if not isinstance(value, list) or not all(_is_int(i) and i >= 0 for i in value):
        raise _problem("must be a list of token ids")
    return value


def _biases(value: Any) -> Any:
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise _problem(f"must be an object of at most {MAX_BIASES} token ids with a bias each")
    biases = {}
    for token, bias in value.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise _problem(f"the key {token[:20]!r} is not a token id")
        if not (_is_int(bias) or isinstance(bias, float)) or not -100 <= bias <= 100:
            raise _problem(f"the bias of token {token} must be a number from -100 to 100")
        biases[int(token)] = float(bias)
    return biases


def _prompt(value: Any) -> Any:
    """A list of prompts, each a string or a list of token ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value and all(_is_int(i) for i in value):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(p, str) for p in value):
            return value
        if all(isinstance(p, list) and all(_is_int(i) for i in p) for p in value):
            return value
    raise _problem("must be a non-empty string, list of strings, list of token ids or list of lists of token ids")


def _messages(value: Any) -> Any:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_MESSAGES:
        raise _problem(f"must be a list of 1 to {MAX_MESSAGES} messages")
    return value


def _object(value: Any) -> Any:
    if not isinstance(value, dict):
        raise _problem("must be an object")
    return value


def _whole_seed(value: Any) -> Any:
    if not _is_int(value) or not -(2**63) <= value < 2**64:
        raise _problem("must be an integer of 64 bits")
    return value % 2**64


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, arbitrary_types_allowed=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        return {k: v for k, v in data.items() if v is not None} if isinstance(data, dict) else data


class GenerationBody(_Body):
    """What chat and plain completions have in common."""

    model: str | None = None
    stream: bool = False
    stream_options: Annotated[dict[str, Any] | None, BeforeValidator(_object)] = None
    n: int = Field(1, ge=1)
    max_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    min_tokens: int = Field(0, ge=0, le=2**31 - 1)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, ge=0, le=1)
    top_k: int = Field(0, ge=-1, le=2**31 - 1)
    min_p: float = Field(0.0, ge=0, le=1)
    seed: Annotated[int | None, BeforeValidator(_whole_seed)] = None
    stop: Annotated[list[str], BeforeValidator(_stops)] = []
    stop_token_ids: Annotated[list[int], BeforeValidator(_stop_ids)] = []
    ignore_eos: bool = False
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    logit_bias: Annotated[dict[int, float] | None, BeforeValidator(_biases)] = None
    priority: int = Field(0, ge=-(2**31), le=2**31 - 1)
    timeout: float | None = Field(None, gt=0, le=MAX_SECONDS)
    queue_timeout: float | None = Field(None, gt=0, le=MAX_SECONDS)
    return_token_ids: bool = False
    user: Any = None

    @property
    def include_usage(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage"))

    @property
    def include_ids(self) -> bool:
        return bool((self.stream_options or {}).get("include_ids", True))


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: Annotated[list[Any], BeforeValidator(_prompt)]
    echo: bool = False
    best_of: int | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    suffix: Any = None


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`. `max_completion_tokens` is the newer name of `max_tokens`."""

    messages: Annotated[list[Any], BeforeValidator(_messages)]
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    add_generation_prompt: bool = True
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    response_format: Annotated[dict[str, Any] | None, BeforeValidator(_object)] = None
    tools: Any = None
    functions: Any = None


class TokenizeBody(_Body):
    """`POST /tokenize`: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Any] | None, BeforeValidator(_messages)] = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class DetokenizeBody(_Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Annotated[list[int], BeforeValidator(_token_list)]


Body = TypeVar("Body", bound=_Body)


def parse_body(kind: type[Body], data: Any) -> Body:
    """The body as `kind`. Raises a 400 ApiError that names the first field at fault and its value."""
    if not isinstance(data, Mapping):
        raise invalid("body", "must be a JSON object", data)
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _explain(kind, error.errors(include_url=False, include_context=True)[0]) from None


def _explain(kind: type[BaseModel], problem: Mapping[str, Any]) -> ApiError:
    param = ".".join(str(part) for part in problem["loc"]) or "body"
    if problem["type"] == "missing":
        return invalid(param, "is required")
    if problem["type"] == "extra_forbidden":
        known = sorted(field.alias or name for name, field in kind.model_fields.items())
        return invalid(param, f"is not known here; known: {', '.join(known)}", problem["input"])
    message, value = str(problem["msg"]), problem["input"]
    if problem["type"] == "int_type" and beyond(value):
        return invalid(param, "must be an integer of 64 bits", value)
    if problem["type"] in _RANGES and beyond(value):  # a field of fractions, which are told as they are
        return invalid(param, f"{_reworded(message)}, got {value!r}")
    return invalid(param, _reworded(message), value)


_RANGES = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")
_SHOULD = re.compile(r"^(?:Input|String|Dictionary|List|Value) should (.*?)(?: after validation, not \d+)?$")


def _reworded(message: str) -> str:
    """`Input should be less than 1` as the other messages have it: `must be less than 1`."""
    return _SHOULD.sub(r"must \1", message)
