"""Stop strings: the streamed text is the whole text, however it was cut (C70)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leftfold.text import StopMatcher


def ends(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The rule, said directly: the text up to the stop string that is complete first (of those, the longest)."""
    found = [(text.index(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[: end - len(stop)], stop


def run(pieces: Sequence[str], stops: Sequence[str]) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops)
    shown = [matcher.push(piece) for piece in pieces]
    if matcher.stopped is None:
        shown.append(matcher.finish())
    return shown, matcher.stopped


@pytest.mark.parametrize(
    ("pieces", "shown", "stopped"),
    [
        (["C", "DE", "F", "GH"], ["C", "", "", ""], "DEFG"),
        (["C", "DE", "X"], ["C", "", "DEX", ""], None),
        (["C", "DE"], ["C", "", "DE"], None),
        (["DDEFG"], ["D"], "DEFG"),
        (["DEFGDEFG"], [""], "DEFG"),
    ],
)
def test_c70_pieces(pieces: list[str], shown: list[str], stopped: str | None) -> None:
    assert run(pieces, ["DEFG"]) == (shown, stopped)


def test_c70_every_way_to_cut_one_text() -> None:
    text, stops = "CDEDEFGHDE", ["DEFG", "EX"]
    for cuts in range(1 << (len(text) - 1)):
        pieces, start = [], 0
        for i in range(1, len(text)):
            if cuts >> (i - 1) & 1:
                pieces.append(text[start:i])
                start = i
        shown, stopped = run([*pieces, text[start:]], stops)
        assert ("".join(shown), stopped) == ("CDE", "DEFG")


short_text = st.text(alphabet="ab世", max_size=24)


@given(
    st.lists(st.text(alphabet="ab世", max_size=5), max_size=12),
    st.lists(st.text(alphabet="ab世", min_size=1, max_size=4), max_size=4),
)
def test_streamed_text_is_the_whole_text(pieces: list[str], stops: list[str]) -> None:
    shown, stopped = run(pieces, stops)
    assert ("".join(shown), stopped) == ends("".join(pieces), stops)


@given(short_text, st.lists(st.text(alphabet="ab世", min_size=1, max_size=4), min_size=1, max_size=3))
def test_no_more_is_held_back_than_may_become_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = matcher.push(text)
    if matcher.stopped is None:
        held = text[len(shown) :]
        longest = max(n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n]))
        assert len(held) == longest


def test_nothing_is_shown_after_the_end() -> None:
    matcher = StopMatcher(["x"])
    assert matcher.push("axb") == "a"
    assert matcher.push("more") == ""
    assert matcher.finish() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty stop string"):
        StopMatcher(["a", ""])
