"""Options: every field refuses what is of another type or out of its range, by name, with the value that came."""

from __future__ import annotations

import dataclasses
import math
import re
from types import NoneType
from typing import Any

import pytest

from leftfold import checking
from leftfold.checking import Functions, Named, OneOf, Seconds, Threads, Whole, check, most_threads
from leftfold.cli import main
from leftfold.errors import ConfigurationError
from leftfold.events import SamplingParams
from leftfold.fsm import limits
from leftfold.options import MOST_AHEAD, MOST_RUNNING, EngineOptions
from leftfold.params import check_params
from leftfold.server.options import ServeOptions

OTHER = {
    int: ["x", 1.5, True, [1]], float: ["x", True, math.nan, math.inf], bool: [0, 1, "yes"], str: [5, b"x", ["x"]],
    list: ["x:f", ("x:f",), {}],
}  # fmt: skip
"""By type: what is of another."""


def wrong(kind: type) -> list[tuple[type, str, Any]]:
    """For every field: values of other types, and those just beyond its range."""
    found = []
    for name, (kinds, rules) in checking._fields(kind).items():
        (main_kind,) = (each for each in kinds if each is not NoneType)
        values = [*OTHER[main_kind], object()] if NoneType in kinds else [*OTHER[main_kind], object(), None]
        for rule in rules:
            match rule:
                case Whole(least, most):
                    values += [least - 1, most + 1, 10**30]
                case Threads():
                    values += [0, -1, most_threads() + 1, 100_000]
                case Seconds():
                    values += [-1, -0.1, 1e9, 10**30]
                case OneOf():
                    values += ["", "never"]
                case Named():
                    values += ["", "  "]
                case Functions():
                    values += [[5], ["x"], ["x:f", None]]
        found += [(kind, name, value) for value in values]
    return found


def test_a_field_of_counts_has_a_range() -> None:
    for kind in (EngineOptions, ServeOptions):
        for name, (kinds, rules) in checking._fields(kind).items():
            assert rules or not {int, float} & set(kinds), name


@pytest.mark.parametrize(("kind", "name", "value"), [*wrong(EngineOptions), *wrong(ServeOptions)])
def test_every_field_refuses_what_it_cannot_be(kind: type, name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        kind(**{name: value})
    told = str(caught.value)
    shown = type(value).__name__ if name in ("api_key", "admin_api_key") else repr(value)[:79]
    assert told.startswith(f"{name} is {shown}") and ": give " in told and "\n" not in told


@pytest.mark.parametrize("kind", [EngineOptions, ServeOptions])
def test_both_ends_of_a_range_are_in_it(kind: type) -> None:
    for name, (kinds, rules) in checking._fields(kind).items():
        for rule in rules:
            good: tuple[Any, ...] = (None,) if NoneType in kinds else ()
            match rule:
                case Whole(least, most):
                    good += (least, most)
                case Threads():
                    good += (1, most_threads())
                case Seconds():
                    good += (0, 0.5, 999_999_999)
                case OneOf(words):
                    good += words
                case Functions():
                    good += ([], ["x:f", "x.y:g"])
            for value in good:
                assert getattr(kind(**{name: value}), name) == value


def test_any_dataclass_can_be_checked_and_long_values_are_cut() -> None:
    @dataclasses.dataclass
    class Anything:
        text: str = "x"

    check(Anything())
    with pytest.raises(ConfigurationError) as caught:
        check(Anything(text=[5] * 10_000))  # type: ignore[arg-type]
    assert len(str(caught.value)) < 120


def test_what_has_no_short_form_of_its_own_is_told_in_one_line() -> None:
    class Square:
        def __repr__(self) -> str:
            return "[[1, 2],\n [3, 4]]"

    for value, told in ((10**5000, "a number of thousands of digits"), (Square(), "[[1, 2], [3, 4]]")):
        with pytest.raises(ConfigurationError, match=re.escape(f"page_size is {told}: give")):
            EngineOptions(page_size=value)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=re.escape(f"seed = {told}: must be")):
            check_params(SamplingParams(seed=value))  # type: ignore[arg-type]


def test_the_ranges_are_the_laws() -> None:
    assert (checking.MOST, MOST_RUNNING, MOST_AHEAD) == (limits.MAX_INT, limits.MAX_ROWS, limits.MAX_DEPTH)


def test_threads_are_bounded_by_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for processors, most in ((None, 64), (1, 64), (16, 64), (17, 68), (512, 2048)):
        monkeypatch.setattr("os.cpu_count", lambda count=processors: count)
        assert most_threads() == most
        assert str(Threads()).startswith(f"a whole number from 1 to {most} ")


@pytest.mark.parametrize("command", [
    "serve", "replay execute LOG", "bench log --model m", "bench serve", "bench latency", "bench throughput",
    "bench determinism", "bench fidelity --requests FILE",
])  # fmt: skip
@pytest.mark.parametrize("count", ["100000", "5000", "0", "-1", "x", "1.5", "9" * 5000],
                         ids=["many", "too-many", "none", "negative", "word", "fraction", "endless"])  # fmt: skip
def test_every_command_that_takes_threads_bounds_them(
    command: str, count: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*command.split(), f"--threads={count}"])
    out, err = capsys.readouterr()
    assert (caught.value.code, out) == (2, "")
    assert f"argument --threads: '{count}' is not a whole number from 1 to {most_threads()} " in err
    assert err.count("\n") == 1


def test_what_the_command_line_lets_through_is_told_in_a_line_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["serve", "--max-num-seqs", "100000"]) == 2
    assert capsys.readouterr().err == "leftfold: max_num_seqs is 100000: give a whole number from 1 to 65536\n"
