"""Builds a byte-level BPE tokenizer from what a GGUF file says about its own, pre-tokenizer included."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from leftfold.text.errors import TokenizerError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

# How Llama 3 and Qwen 2 cut text into words; they differ in how many digits stay together.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    """Digits one by one, then GPT-2's words."""
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _words(digits: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    def build() -> pre_tokenizers.PreTokenizer:
        split = pre_tokenizers.Split(Regex(_WORDS.format(digits=digits)), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return build


_LLAMA3, _QWEN2 = _words("{1,3}"), _words("")
PRE_TOKENIZERS: Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "smollm": _smollm,
    "gpt-2": _gpt2,
    "default": _gpt2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
}
_WHOLE_WORDS_FIRST = {"llama-bpe", "llama3", "llama-v3"}  # a word that is a token is not merged up from its letters


def build_tokenizer(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    """The tokenizer a GGUF file describes. Raises TokenizerError for kinds and pre-tokenizers it does not know."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise TokenizerError(f"{path}: its tokenizer is of kind {kind!r}; from GGUF only 'gpt2' (byte-level BPE) works")
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise TokenizerError(f"{path}: unknown pre-tokenizer {pre!r} (known: {known}); use the model's HF folder")
    tokens = list(metadata.get("tokenizer.ggml.tokens", ()))
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [_pair(merge, path) for merge in metadata.get("tokenizer.ggml.merges", ())]
    try:
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in _WHOLE_WORDS_FIRST)
    except Exception as error:  # the binding raises bare exceptions
        raise TokenizerError(f"{path}: its merges do not fit its vocabulary: {error}") from error
    tokenizer = Tokenizer(model)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    _add_special(tokenizer, tokens, metadata.get("tokenizer.ggml.token_type", ()))
    _add_bos(tokenizer, tokens, metadata)
    return tokenizer


def _pair(merge: str, path: Path) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not space:
        raise TokenizerError(f"{path}: the merge {merge!r} is not two pieces")
    return left, right


def _add_special(tokenizer: Tokenizer, tokens: list[str], types: Any) -> None:
    kinds = list(types) or [_NORMAL] * len(tokens)
    special = [t for t, k in zip(tokens, kinds, strict=False) if k in (_CONTROL, _UNKNOWN)]
    plain = [t for t, k in zip(tokens, kinds, strict=False) if k == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in plain])


def _add_bos(tokenizer: Tokenizer, tokens: list[str], metadata: Mapping[str, Any]) -> None:
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if not metadata.get("tokenizer.ggml.add_bos_token", False) or bos is None or not 0 <= bos < len(tokens):
        return
    token = tokens[bos]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{token}:0 $A:0", pair=f"{token}:0 $A:0 $B:1", special_tokens=[(token, bos)]
    )
