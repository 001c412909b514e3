"""What a message says: a text, or a list of text parts, one to a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PARTS = ("text", "input_text")
"""Types of parts that hold text; the first one is usual."""


class ContentError(ValueError):
    """A content that is neither; `part`: the index of the part at fault, None where it is the whole."""

    def __init__(self, part: int | None) -> None:
        super().__init__(part)
        self.part = part


def content_text(content: Any, role: str, kinds: Sequence[str] = PARTS) -> str:
    """The text of a message by `role`, whose parts may be of these `kinds`. The model's own turn may have none.

    Raises ContentError.
    """
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, list) or not content:
        raise ContentError(None)
    for i, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") not in kinds or not isinstance(part.get("text"), str):
            raise ContentError(i)
    return "\n".join([part["text"] for part in content])
