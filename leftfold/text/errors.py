"""What can be wrong with a tokenizer, a chat template or a conversation."""

from __future__ import annotations


class TextError(Exception):
    """Root of this room's errors; the message is one line, meant for people."""


class TokenizerError(TextError):
    """The model's tokenizer cannot be read or is of a kind that is not supported."""


class GgufError(TextError):
    """A GGUF file is damaged or not one."""


class TemplateError(TextError):
    """The chat template is missing, refuses the messages, or goes beyond a limit."""
