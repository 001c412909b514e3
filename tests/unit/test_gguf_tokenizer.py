"""Tokenizers from GGUF: cut and merge as the pre-tokenizer that the file names says, held against the rule itself."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import gguf
import pytest
import regex
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from leftfold import hub
from leftfold.text import GgufError, TokenizerError, load_tokenizer
from leftfold.text.gguf_meta import read_metadata
from leftfold.text.gguf_tokenizer import PRE_TOKENIZERS

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
HEAD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
RULES = {
    "smollm": (r"\p{N}|[^\p{N}]+", GPT2),
    "gpt-2": (GPT2,),
    "llama-bpe": (HEAD + r"\p{N}{1,3}" + TAIL,),
    "qwen2": (HEAD + r"\p{N}" + TAIL,),
}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def digit_heavy(seed: int, count: int) -> list[str]:
    """Strings of the kind that goes wrong: digits, runs of spaces and newlines before them, code, other scripts."""
    draw = random.Random(seed)
    parts = ["\n    ", "  ", " ", "\n", "\t", "[", "], ", "1", "23", "456", "7890", "3.14", "½", "٣", "x", "the", " a"]
    parts += ["don't", "I'LL", "世界", "é", "==", "0x1F", "\r\n", "—", "🙂", "2026-11-29", " 1,000,000", "\n    1,"]
    return ["".join(draw.choices(parts, k=draw.randint(1, 14))) for _ in range(count)]


def stand_ins() -> dict[int, str]:
    """GPT-2's printable characters for bytes."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table, free = {}, 256
    for byte in range(256):
        table[byte] = chr(byte) if byte in kept else chr(free)
        free += byte not in kept
    return table


class ByTheRule:
    """Cuts with `regex`, merges by rank, in plain Python."""

    def __init__(self, metadata: dict[str, Any]) -> None:
        self.rules = RULES[metadata["tokenizer.ggml.pre"]]
        self.ids = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
        self.ranks = {tuple(m.split(" ")): i for i, m in enumerate(metadata["tokenizer.ggml.merges"])}
        self.whole_words = metadata["tokenizer.ggml.pre"] == "llama-bpe"
        self.bytes = stand_ins()

    def encode(self, text: str) -> list[int]:
        pieces = [text]
        for rule in self.rules:
            pieces = [part for piece in pieces for part in regex.findall(rule, piece)]
        return [i for piece in pieces for i in self.merge("".join(self.bytes[b] for b in piece.encode()))]

    def merge(self, word: str) -> list[int]:
        if self.whole_words and word in self.ids:
            return [self.ids[word]]
        parts = list(word)
        while len(parts) > 1:
            ranked = [(self.ranks.get(pair, 1 << 60), i) for i, pair in enumerate(zip(parts, parts[1:], strict=False))]
            rank, at = min(ranked)
            if rank == 1 << 60:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return [self.ids[part] for part in parts]


def write_gguf(path: Path, pre: str | None, **changes: Any) -> Path:
    """A file without tensors whose BPE was learnt from digit-heavy text under GPT-2's rule."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learner.train_from_iterator(
        digit_heavy(99, 3000),
        trainers.BpeTrainer(vocab_size=700, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False),
    )
    learnt = json.loads(learner.to_str())["model"]
    tokens = [token for token, _ in sorted(learnt["vocab"].items(), key=lambda item: item[1])]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model(changes.get("model", "gpt2"))
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges(changes.get("merges", [" ".join(m) for m in learnt["merges"]]))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(changes.get("add_bos", False))
    writer.add_chat_template("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("pre", RULES)
def test_a_thousand_digit_heavy_strings_follow_the_rule(pre: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", pre)
    tokenizer, rule = load_tokenizer(path), ByTheRule(read_metadata(path))
    for text in digit_heavy(1, 1000):
        ids = tokenizer.encode(text)
        assert ids == rule.encode(text), repr(text)
        assert tokenizer.decode(ids) == text


def test_the_default_model_follows_the_rule_on_a_thousand_digit_heavy_strings() -> None:
    path = hub.resolve("smollm2", progress=False).path
    tokenizer, rule = load_tokenizer(path), ByTheRule(read_metadata(path))
    for text in digit_heavy(2, 1000):
        assert tokenizer.encode(text) == rule.encode(text), repr(text)
    assert tokenizer.eos_ids == (2, 0)
    assert tokenizer.encode_chat([{"role": "user", "content": "hi"}])[:2] == tokenizer.encode("<|im_start|>system")


def test_smollm_cuts_digits_one_by_one(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", "smollm"))
    assert [tokenizer.decode([i]) for i in tokenizer.encode("23")] == ["2", "3"]


def test_metadata_is_what_the_reference_reader_reads(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "smollm")
    reader = gguf.GGUFReader(str(path))
    expected = {name: f.contents() for name, f in reader.fields.items() if not name.startswith("GGUF.")}
    assert read_metadata(path) == expected


def test_special_tokens_and_ends(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", "smollm"))
    assert tokenizer.encode("<|im_end|>") == [2]
    assert tokenizer.decode([2, *tokenizer.encode("a")]) == "a"
    assert tokenizer.eos_ids == (2, 0)
    assert tokenizer.tokens["bos_token"] == "<|im_start|>"


def test_bos_comes_first_when_the_file_says_so_and_only_once_in_chats(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", "smollm", add_bos=True))
    assert tokenizer.encode("a")[0] == 1
    assert tokenizer.encode("a", add_special_tokens=False)[0] != 1
    assert tokenizer.encode_chat([{"role": "user", "content": "a"}]).count(1) == 1


@pytest.mark.parametrize(("pre", "changes", "words"), [
    ("mystery", {}, "unknown pre-tokenizer 'mystery'"),
    ("smollm", {"model": "llama"}, "of kind 'llama'"),
    ("smollm", {"merges": ["nospace"]}, "the merge 'nospace'"),
    ("smollm", {"merges": ["qq zz"]}, "do not fit its vocabulary"),
])  # fmt: skip
def test_what_cannot_be_right_is_refused(tmp_path: Path, pre: str, changes: dict[str, Any], words: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", pre, **changes)
    with pytest.raises(TokenizerError, match=regex.escape(words)) as error:
        load_tokenizer(path)
    assert "\n" not in str(error.value)


def test_every_known_pre_tokenizer_builds() -> None:
    assert all(isinstance(build(), pre_tokenizers.PreTokenizer) for build in PRE_TOKENIZERS.values())


def test_a_file_cut_anywhere_is_an_error_in_one_line(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf", "smollm").read_bytes()
    part = tmp_path / "part.gguf"
    for size in [0, 3, 4, 20, *range(24, len(whole), 997)]:
        part.write_bytes(whole[:size])
        with pytest.raises(GgufError, match="cannot read") as error:
            read_metadata(part)
        assert "\n" not in str(error.value)


def test_lengths_beyond_the_file_are_refused_without_being_tried(tmp_path: Path) -> None:
    huge = (2**62).to_bytes(8, "little")
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(8) + (1).to_bytes(8, "little") + huge + b"key")
    with pytest.raises(GgufError, match="bytes wanted"):
        read_metadata(path)
    array = (1).to_bytes(8, "little") + b"k" + (9).to_bytes(4, "little") + (8).to_bytes(4, "little") + huge
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(8) + (1).to_bytes(8, "little") + array)
    with pytest.raises(GgufError, match="past the end"):
        read_metadata(path)


def test_something_else_is_no_gguf(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04 nothing of the kind, but long enough")
    with pytest.raises(GgufError, match="does not begin with GGUF"):
        read_metadata(path)
