"""What the README shows is what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from leftfold import cli

README = (Path(__file__).parents[2] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_drawing_of_the_request_machine_is_the_one_that_leftfold_draws(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fsm", "--format", "mermaid"]) == 0
    assert blocks("mermaid") == [capsys.readouterr().out]


def test_the_core_does_what_its_example_says(capsys: pytest.CaptureFixture[str]) -> None:
    [example] = [block for block in blocks("python") if "leftfold.fsm" in block]
    exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out.split("\n")[:2] == re.findall(r"# (\[.*\])$", example, re.MULTILINE)


def test_every_command_that_is_named_exists() -> None:
    named = set(re.findall(r"`?leftfold ([a-z]+)\b", README)) - {"import"}
    assert named - {"draws"} <= set(cli.COMMANDS), named


def test_every_link_leads_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (Path(__file__).parents[2] / target).exists(), target
