"""Text on both sides of the model: tokenizers, chat templates, incremental decoding, stop strings."""

from leftfold.text.answer_text import AnswerText
from leftfold.text.chat_template import ChatTemplate
from leftfold.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from leftfold.text.errors import GgufError, TemplateError, TextError, TokenizerError
from leftfold.text.stops import StopMatcher
from leftfold.text.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "AnswerText",
    "ByteDetokenizer",
    "ChatTemplate",
    "Detokenizer",
    "GgufError",
    "StopMatcher",
    "TemplateError",
    "TextError",
    "Tokenizer",
    "TokenizerError",
    "WindowDetokenizer",
    "load_tokenizer",
]
