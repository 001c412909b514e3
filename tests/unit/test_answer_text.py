"""One answer's text: stop strings count tokens, stop tokens are not shown, `min_tokens` shields the beginning."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from leftfold.text import AnswerText, Tokenizer
from tests.tiny_folder import byte_tokenizer

TOKENIZER = Tokenizer(byte_tokenizer(), ())
END = TOKENIZER.encode("<|im_end|>")[0]


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def test_the_stop_token_is_counted_and_not_shown() -> None:
    answer = AnswerText(TOKENIZER, stop_ids=[ids("x")[0]])
    assert answer.take([*ids("ab"), ids("x")[0]], "stop") == "ab"
    assert (answer.tokens, answer.reason) == (3, "stop")


def test_an_end_by_length_shows_a_stop_token_that_did_not_count() -> None:
    answer = AnswerText(TOKENIZER, stop_ids=[ids("x")[0]], min_tokens=3)
    assert answer.take(ids("abx"), "length") == "abx"


def test_c72_several_tokens_at_once_count_as_one_by_one() -> None:
    answer = AnswerText(TOKENIZER, stops=["c"])
    assert answer.take(ids("ab")) == "ab"
    assert answer.take(ids("cdef")) == ""
    assert (answer.tokens, answer.reason, answer.stopped) == (3, "stop", "c")
    assert answer.take(ids("more"), "length") == ""


def test_a_stop_string_within_min_tokens_does_not_count() -> None:
    answer = AnswerText(TOKENIZER, stops=["ab"], min_tokens=3)
    assert answer.take(ids("abab"), "length") == "abab"
    assert answer.reason == "length"
    assert AnswerText(TOKENIZER, stops=["ab"], min_tokens=2).take(ids("abcab!")) == "abc"


def test_what_was_held_back_comes_at_the_end() -> None:
    answer = AnswerText(TOKENIZER, stops=["DEFG"])
    assert answer.take(ids("CDE")) == "C"
    assert answer.take((), "length") == "DE"


@given(st.lists(st.integers(0, 258), max_size=30), st.lists(st.integers(1, 6), max_size=10), st.sampled_from(["", "a"]))
def test_streamed_text_is_the_whole_text(tokens: list[int], sizes: list[int], stop: str) -> None:
    stops = [stop] if stop else []
    whole = AnswerText(TOKENIZER, stops)
    text = whole.take(tokens, "length")
    streamed = AnswerText(TOKENIZER, stops)
    pieces, start = [], 0
    for size in sizes:
        pieces.append(streamed.take(tokens[start : start + size]))
        start += size
    pieces.append(streamed.take(tokens[start:], "length"))
    assert "".join(pieces) == text
    assert (streamed.reason, streamed.tokens) == (whole.reason, whole.tokens)
