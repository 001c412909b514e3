"""The body of `POST /v1/responses`, and what it means as a conversation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from leftfold.server.admission import Place
from leftfold.server.errors import invalid, unsupported
from leftfold.server.openai_types import MAX_MESSAGES, ChatBody, GenerationBody, _messages, _object


def _input(value: Any) -> Any:
    return value if isinstance(value, str) else _messages(value)


class ResponseBody(GenerationBody):
    """`POST /v1/responses`. Text in, text out."""

    input: Annotated[Any, BeforeValidator(_input)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    background: bool = False
    store: bool = True
    metadata: Annotated[dict[str, Any] | None, BeforeValidator(_object)] = None
    previous_response_id: str | None = None
    conversation: Any = None
    tools: Any = None
    text: Annotated[dict[str, Any] | None, BeforeValidator(_object)] = None
    truncation: str = "disabled"
    include: Any = None


def chat_of(body: ResponseBody) -> ChatBody:
    """The chat that a response is the answer of. Raises a 400 ApiError for what this server cannot do."""
    for name in ("previous_response_id", "conversation", "tools"):
        if getattr(body, name):
            raise unsupported(name)
    form = (body.text or {}).get("format") or {}
    if not isinstance(form, dict) or form.get("type", "text") != "text":
        raise unsupported("text.format", 'only {"type": "text"} is')
    if body.truncation != "disabled":
        raise unsupported("truncation", 'only "disabled" is')
    if body.background and not body.store:
        raise invalid("background", "needs store = true: it is read later")
    if body.n != 1:
        raise invalid("n", "a response has one choice", body.n)
    messages: list[Any] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        messages += [_message(i, item) for i, item in enumerate(body.input)]
    if len(messages) > MAX_MESSAGES:
        raise invalid("input", f"must be at most {MAX_MESSAGES} messages, instructions included")
    fields = {name: getattr(body, name) for name in GenerationBody.model_fields if name in body.model_fields_set}
    fields.pop("stream_options", None)
    if body.max_output_tokens is not None:
        fields["max_tokens"] = body.max_output_tokens
    return ChatBody(**fields, messages=messages)


def _message(index: int, item: Any) -> Mapping[str, Any]:
    where = f"input.{index}"
    if not isinstance(item, dict):
        raise invalid(where, "must be an object", item)
    if item.get("type", "message") != "message":
        raise invalid(f"{where}.type", 'only "message" is supported', item["type"])
    return {"role": item.get("role"), "content": item.get("content")}


def place_of(body: ResponseBody) -> Place:
    """Where the messages of `chat_of` stand in `body`."""
    return Place("input", 1 if body.instructions else 0, ("input_text", "output_text", "text"))


__all__ = ["ResponseBody", "chat_of", "place_of"]
