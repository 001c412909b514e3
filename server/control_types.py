"""What control routes are told: query parameters and bodies, their types and ranges."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError
from starlette.requests import Request

from leftfold.server.errors import invalid
from leftfold.server.openai_types import parse_body

TAGS = ("weights", "kv")
LEVELS = {1: ("kv",), 2: TAGS}
"""The field's levels of sleep: 1 keeps the weights where they are, 2 gives them back, too."""

MAX_IDS = 10_000
MAX_SECONDS = 86_400


def _tags(value: Any) -> Any:
    """`weights,kv`, or a list of such; `kv_cache` is another name of `kv`."""
    parts = [value] if isinstance(value, str) else value
    names = [name.strip().replace("kv_cache", "kv") for part in parts for name in part.split(",")]
    if not names or any(name not in TAGS for name in names):
        raise PydanticCustomError("invalid", "must be some of weights, kv")
    return tuple(tag for tag in TAGS if tag in names)


def _ids(value: Any) -> Any:
    if not isinstance(value, list) or len(value) > MAX_IDS or not all(isinstance(i, str) for i in value):
        raise PydanticCustomError("invalid", f"must be a list of at most {MAX_IDS} ids; an empty one means all")
    return value


class _Query(BaseModel):
    """Text from a URL becomes numbers; what is not known is refused, so that a slip of the pen does nothing."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class WaitQuery(_Query):
    """`timeout`: seconds to wait for the answer at most (without: until it is there)."""

    timeout: float | None = Field(None, gt=0, le=MAX_SECONDS)


class PauseQuery(WaitQuery):
    """There is no default mode: the three do very different things to who is being answered."""

    mode: Literal["keep", "wait", "abort"]


class WakeQuery(WaitQuery):
    tags: Annotated[tuple[str, ...] | None, BeforeValidator(_tags)] = None


class SleepQuery(WakeQuery):
    level: int | None = Field(None, ge=1, le=2)


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    timeout: float | None = Field(None, gt=0, le=MAX_SECONDS)


class AbortBody(BaseModel):
    """`request_ids`: the `id`s of answers; an empty list means everything. Not left out, since that is a lot."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    request_ids: Annotated[list[str], BeforeValidator(_ids)]


class UpdateWeightsBody(_Body):
    """`live`: what runs is computed anew with the new weights, or keeps its K/V."""

    source: str = Field(min_length=1, max_length=4096)
    version: str = Field(min_length=1, max_length=256, pattern=r"^[\x21-\x7e]+$")
    live: Literal["recompute", "keep"] = "recompute"


class ReconfigureBody(_Body):
    set: dict[str, Any] = Field(min_length=1, max_length=64)


class CallBody(_Body):
    verb: str = Field(min_length=1, max_length=64, pattern=r"^[a-z][a-z0-9_]*$")
    args: dict[str, Any] = {}


Query = TypeVar("Query", bound=_Query)


def parse_query(kind: type[Query], request: Request) -> Query:
    """The query's parameters as `kind`. Raises a 400 ApiError that names the first one at fault."""
    values: dict[str, Any] = {}
    for name in request.query_params:
        given = request.query_params.getlist(name)
        if name == "tags":
            values[name] = given
        elif len(given) > 1:
            raise invalid(name, "is given more than once", given)
        else:
            values[name] = given[0]
    return parse_body(kind, values)
