"""A model's tokenizer with what belongs to it: special tokens, the ids that end a text, the chat template."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from leftfold.text.chat_template import ChatTemplate
from leftfold.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer, byte_pieces, special_ids
from leftfold.text.errors import TemplateError, TokenizerError
from leftfold.text.gguf_meta import read_metadata
from leftfold.text.gguf_tokenizer import build_tokenizer

# Tokens by which models of different families end a turn; a GGUF file names only one of a model's end tokens.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|end_of_turn|>")
_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")

_VOCABULARIES = ("vocab.*", "*.model", "*.tiktoken", "tekken.json", "merges.txt", "tokenizer*.json")
"""Files of which at least one is there where a folder has a tokenizer of an older form."""
_NAMED = (
    "tokenizer.json, vocab.json, vocab.txt, tokenizer.model, *.tiktoken; copy the files of the model's tokenizer there"
)
_MOST_SAID = 500


@dataclass(frozen=True)
class Tokenizer:
    """Text to ids and back. `eos_ids`: every id that ends a generated text; `tokens`: named ones (`bos_token`, …)."""

    backend: tokenizers.Tokenizer
    eos_ids: tuple[int, ...]
    tokens: Mapping[str, str] = field(default_factory=dict)
    template_source: str | None = None

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id (a model may have more rows than its tokenizer has tokens)."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def longest_piece(self) -> int:
        """Characters of the longest token: a text of more characters than n of these has more than n tokens.

        (A tokenizer that squeezes text, such as runs of spaces, before it cuts it may need fewer.)
        """
        return max(map(len, self.backend.get_vocab(with_added_tokens=True)), default=1)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return special_ids(self.backend)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """Raises TemplateError if the model has none, or a broken one."""
        if self.template_source is None:
            raise TemplateError("this model has no chat template; use /v1/completions")
        return ChatTemplate(self.template_source, self.tokens)

    @cached_property
    def _pieces(self) -> tuple[list[bytes | None], bool] | None:
        return byte_pieces(self.backend)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; `add_special_tokens` puts BOS and its like where the model wants them.

        Other threads run meanwhile: the binding's batch call gives back the interpreter's lock, its single one does
        not.
        """
        return list(self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; broken UTF-8 becomes U+FFFD."""
        return str(self.backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0])

    def token_bytes(self, token: int) -> bytes:
        """What one token stands for by itself: a special one for its name, an unknown id for nothing."""
        pieces = self._pieces[0] if self._pieces is not None else []
        piece = pieces[token] if 0 <= token < len(pieces) else None
        if piece is not None:
            return piece
        if token in self.special_ids or self._pieces is not None:
            return (self.backend.id_to_token(token) or "").encode()
        return self.decode([token]).encode()

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental decoder, for the tokens of one answer."""
        if self._pieces is None:
            return WindowDetokenizer(self.backend)
        pieces, strip = self._pieces
        return ByteDetokenizer(pieces, strip)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **values: Any) -> str:
        """The prompt text of a conversation. Raises TemplateError."""
        return self.chat_template.render(messages, **values)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **values: Any) -> list[int]:
        """The prompt ids of a conversation (its template writes BOS itself). Raises TemplateError."""
        return self.encode(self.render_chat(messages, **values), add_special_tokens=False)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder or a `.gguf` file. Raises TokenizerError or GgufError."""
    path = Path(path)
    return _from_folder(path) if path.is_dir() else _from_gguf(path)


def _from_gguf(path: Path) -> Tokenizer:
    metadata = read_metadata(path)
    backend = build_tokenizer(metadata, path)
    named = {}
    for role in ("bos", "eos", "unknown", "padding"):
        token_id = metadata.get(f"tokenizer.ggml.{role}_token_id")
        if token_id is not None and (token := backend.id_to_token(token_id)) is not None:
            named[{"unknown": "unk", "padding": "pad"}.get(role, role) + "_token"] = token
    ids = [metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot", "eom")]
    by_name = [backend.token_to_id(token) for token in (*_END_OF_TURN, *_END_OF_TEXT)]
    eos = _valid_ids(backend, [*ids, *(i for i in by_name if i in special_ids(backend))])
    return Tokenizer(backend, eos, named, metadata.get("tokenizer.chat_template"))


def _from_folder(path: Path) -> Tokenizer:
    config = _read_json(path / "tokenizer_config.json")
    backend = _load_backend(path)
    named = {key: _token_text(value) for key, value in config.items() if key.endswith("_token") and value}
    template = _folder_template(path, config)
    ids: list[Any] = []
    for file in ("generation_config.json", "config.json"):
        value = _read_json(path / file).get("eos_token_id")
        ids.extend(value if isinstance(value, list) else [value])
    ids.append(backend.token_to_id(named["eos_token"]) if "eos_token" in named else None)
    ids.extend(backend.token_to_id(token) for token in _END_OF_TURN if template and token in template)
    return Tokenizer(backend, _valid_ids(backend, ids), named, template)


def _load_backend(path: Path) -> tokenizers.Tokenizer:
    file = path / "tokenizer.json"
    if file.is_file():
        try:
            return tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the binding raises bare exceptions
            raise TokenizerError(f"cannot read {file}: {error}") from error
    if not any(any(path.glob(pattern)) for pattern in _VOCABULARIES):
        raise TokenizerError(f"no usable tokenizer in {path}: it has none of {_NAMED}")
    try:
        from transformers import AutoTokenizer  # slow to import, and only old folders need its converters

        with _silent("transformers"):
            return AutoTokenizer.from_pretrained(str(path), trust_remote_code=False).backend_tokenizer
    except Exception as error:  # anything may be missing or broken in a foreign folder
        raise TokenizerError(f"no usable tokenizer in {path}: {_in_a_line(error)}") from error


@contextmanager
def _silent(name: str) -> Iterator[None]:
    """What a library logs below errors is not for the user, who did not ask it anything."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _in_a_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _MOST_SAID else text[: _MOST_SAID - 1] + "…"


def _folder_template(path: Path, config: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template if isinstance(template, str) else None


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"cannot read {file}: {error}") from error
    return value if isinstance(value, dict) else {}


def _token_text(value: Any) -> str:
    return str(value["content"]) if isinstance(value, dict) else str(value)


def _valid_ids(backend: tokenizers.Tokenizer, ids: Iterable[Any]) -> tuple[int, ...]:
    known = (i for i in ids if isinstance(i, int) and backend.id_to_token(i) is not None)
    return tuple(dict.fromkeys(known))
