"""Incremental decoding: never half a character, never a step back, in the end what the tokenizer itself says (C71)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from leftfold.text import ByteDetokenizer, Detokenizer, WindowDetokenizer
from leftfold.text import Tokenizer as ModelTokenizer
from leftfold.text.detokenizer import byte_pieces
from tests.tiny_folder import byte_tokenizer

PIECES = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁wor", "ld", "a", "é", "世", "<s>", "▁▁"]


def fallback_tokenizer(strip: bool = True) -> Tokenizer:
    """Pieces with byte fallback, as SentencePiece models have them."""
    tokenizer = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(PIECES)}, merges=[], unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return tokenizer


def wordpiece_tokenizer() -> Tokenizer:
    """A decoder that puts spaces between words: nothing is known of a token's bytes."""
    vocab = {"[UNK]": 0, "un": 1, "##believ": 2, "##able": 3, "world": 4, ",": 5, "世": 6, "[SEP]": 7}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens([AddedToken("[SEP]", special=True)])
    return tokenizer


def pieces_of(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push([i]) for i in ids), detokenizer.finish()]


def byte_level(tokenizer: Tokenizer) -> ByteDetokenizer:
    table = byte_pieces(tokenizer)
    assert table is not None
    return ByteDetokenizer(*table)


BYTES = byte_tokenizer()
BYTES.add_tokens([AddedToken("one two", special=False), AddedToken("é!", special=False)])
byte_ids = st.lists(st.integers(0, BYTES.get_vocab_size() - 1), max_size=40)


@given(byte_ids)
def test_byte_level_text_is_the_tokenizers_own(ids: list[int]) -> None:
    assert "".join(pieces_of(byte_level(BYTES), ids)) == BYTES.decode(ids)


@given(byte_ids)
def test_a_window_gives_the_same_text_as_bytes_for_whole_characters(ids: list[int]) -> None:
    text = BYTES.decode(ids).replace("\ufffd", "")
    clean = BYTES.encode(text).ids
    assert "".join(pieces_of(WindowDetokenizer(BYTES), clean)) == BYTES.decode(clean)


@given(st.text(alphabet="aé世🙂 \u200d", max_size=20), st.sampled_from([byte_level, WindowDetokenizer]))
def test_never_half_a_character(text: str, make: type) -> None:
    for piece in pieces_of(make(BYTES), BYTES.encode(text).ids):
        assert "\ufffd" not in piece


@given(st.lists(st.sampled_from(["▁", "▁wor", "ld", "a", "é", "世", "<s>", "▁▁", "🙂", "ü"]), max_size=20))
@pytest.mark.parametrize("strip", [True, False])
def test_byte_fallback_text_is_the_tokenizers_own(strip: bool, words: list[str]) -> None:
    tokenizer = fallback_tokenizer(strip)
    ids = [i for w in words for i in ([PIECES.index(w)] if w in PIECES else [1 + b for b in w.encode()])]
    assert "".join(pieces_of(byte_level(tokenizer), ids)) == tokenizer.decode(ids)


@given(st.lists(st.integers(1, 7), max_size=20))
def test_any_other_decoder_is_windowed(ids: list[int]) -> None:
    tokenizer = wordpiece_tokenizer()
    assert byte_pieces(tokenizer) is None
    model = ModelTokenizer(tokenizer, ())
    assert "".join(pieces_of(model.detokenizer(), ids)) == tokenizer.decode(ids)


class Scripted:
    """A tokenizer whose decoded text per step is given, as in C71."""

    def __init__(self, texts: dict[int, str]) -> None:
        self.texts = texts

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return self.texts[len(ids)] if ids else ""

    def get_added_tokens_decoder(self) -> dict[int, AddedToken]:
        return {}


def test_c71_the_sent_offset_never_moves_back() -> None:
    texts = {1: "A 世\ufffd", 2: "A 世a\ufffd", 3: "A 世ab"}
    shown = pieces_of(WindowDetokenizer(Scripted(texts)), [1, 2, 3])  # type: ignore[arg-type]
    assert shown == ["A 世", "a", "b", ""]


@pytest.mark.parametrize("make", [byte_level, WindowDetokenizer])
def test_endless_broken_bytes_cost_a_bounded_window(make: type) -> None:
    lead = BYTES.encode("世").ids[0]
    shown = pieces_of(make(BYTES), [lead] * 500)
    assert "".join(shown) == "\ufffd" * 500
    assert sum(map(bool, shown[:-1])) > 1  # some of it long before the end


def test_a_cut_character_ends_as_the_tokenizer_says() -> None:
    ids = BYTES.encode("a世").ids[:-1]
    assert pieces_of(byte_level(BYTES), ids)[-1] == "\ufffd"
    assert "".join(pieces_of(byte_level(BYTES), ids)) == BYTES.decode(ids)


def test_ids_beyond_the_tokenizer_are_no_text() -> None:
    assert byte_level(BYTES).push([10**6, -1]) == ""
