"""What the offline API is asked: prompts, conversations and what goes with them, checked and brought into one form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from leftfold.answer import Beside
from leftfold.checking import short
from leftfold.events import SamplingParams
from leftfold.params import check_params
from leftfold.text.content import ContentError, content_text

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
MOST_SCORES = 20
MOST_TOKEN = (1 << 31) - 1


def prompts_of(prompts: Any) -> list[str | list[int]]:
    """One prompt, or several. Raises TypeError and ValueError that name the one at fault."""
    if isinstance(prompts, str):
        return [prompts]
    each = _items(prompts, "prompts", "a text, token ids, or a list of such")
    if each and _whole(each[0]):
        return [_ids(each, "prompts")]
    return [prompt_of(prompt, f"prompts[{i}]") for i, prompt in enumerate(each)]


def prompt_of(prompt: Any, name: str) -> str | list[int]:
    """A text, or token ids. Raises TypeError and ValueError."""
    return prompt if isinstance(prompt, str) else _ids(_items(prompt, name, "a text or token ids"), name)


def conversations_of(messages: Any) -> list[list[Message]]:
    """One conversation, or several. Raises TypeError, or ValueError for one that is empty."""
    each = _items(messages, "messages", "a list of messages, or a list of such lists")
    if is_conversation(each):
        return [_conversation(each, "messages")]
    return [
        _conversation(_items(one, f"messages[{i}]", "a message, or a list of messages"), f"messages[{i}]")
        for i, one in enumerate(each)
    ]


def is_conversation(prompt: Any) -> bool:
    """Whether this is a list that begins with a message."""
    return isinstance(prompt, Sequence) and not isinstance(prompt, str) and bool(prompt) and _is_message(prompt[0])


def params_of(params: Any, count: int) -> list[SamplingParams]:
    """One for all, or one for each of `count` prompts. Raises TypeError and ValueError."""
    if params is None or isinstance(params, SamplingParams):
        each: list[Any] = [params or SamplingParams()] * count
    else:
        each = _items(params, "params", "SamplingParams(…), one for all or a list with one for each prompt")
        if len(each) != count:
            raise ValueError(f"{len(each)} sampling parameters for {count} prompts: give one for all, or one for each")
    for i, one in enumerate(each):
        if not isinstance(one, SamplingParams):
            raise TypeError(f"params[{i}] is {short(one)}: give SamplingParams(…)")
        if i == 0 or one is not each[i - 1]:
            check_params(one)
    return each


def stops_of(stop: Any) -> list[str]:
    """Strings that end an answer. Raises TypeError, or ValueError for an empty one."""
    stops = [stop] if isinstance(stop, str) else _items(stop, "stop", "a text or a list of texts")
    for one in stops:
        if not isinstance(one, str):
            raise TypeError(f"stop holds {short(one)}: give a text or a list of texts")
        if not one:
            raise ValueError("stop holds '': a stop string must not be empty; leave it out")
    return stops


def scores_of(logprobs: Any, prompt_logprobs: Any) -> Beside:
    """Alternatives beside every token; None: no scores. Raises ValueError."""
    for name, count in (("logprobs", logprobs), ("prompt_logprobs", prompt_logprobs)):
        if count is not None and not (_whole(count) and 0 <= count <= MOST_SCORES):
            raise ValueError(f"{name} is {short(count)}: give a whole number from 0 to {MOST_SCORES}")
    return Beside(logprobs, prompt_logprobs)


def _conversation(messages: list[Any], name: str) -> list[Message]:
    if not messages:
        raise ValueError(f"{name} is empty: give at least one message")
    for i, message in enumerate(messages):
        if not _is_message(message):
            form = '{"role": "user", "content": "…"}'
            raise TypeError(f"{name}[{i}] is {short(message)}: give a message such as {form}")
        if not isinstance(message.get("role"), str):
            raise TypeError(f"{name}[{i}]['role'] is {short(message.get('role'))}: give a text such as 'user'")
    return [{**message, "content": _content(message, f"{name}[{i}]['content']")} for i, message in enumerate(messages)]


def _content(message: Message, name: str) -> str:
    content = message.get("content")
    try:
        return content_text(content, message["role"])
    except ContentError as error:
        if error.part is None:
            raise TypeError(f"{name} is {short(content)}: give a text or a list of text parts") from None
        part = short(message["content"][error.part])
        raise TypeError(f'{name}[{error.part}] is {part}: give {{"type": "text", "text": "…"}}') from None


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping)


def _ids(values: list[Any], name: str) -> list[int]:
    for value in values:
        if not _whole(value):
            raise TypeError(f"{name} holds {short(value)}: token ids are whole numbers")
        if not 0 <= value <= MOST_TOKEN:
            raise ValueError(f"{name} holds {short(value)}: token ids are from 0 to {MOST_TOKEN}")
    return [int(value) for value in values]


def _whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _items(value: Any, name: str, wanted: str) -> list[Any]:
    """The items of a list, an array or the like; a text, bytes and mappings are none."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise TypeError(f"{name} is {short(value)}: give {wanted}")
    return list(value)


__all__ = ["Message", "Prompt", "conversations_of", "is_conversation", "params_of", "prompt_of", "prompts_of",
           "scores_of", "stops_of"]  # fmt: skip
