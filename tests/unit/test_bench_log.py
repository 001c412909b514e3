"""`leftfold bench log` with a model: every durability has its turn, and what it costs is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from leftfold.cli import main
from tests import tiny_models


def test_a_model_is_measured_with_every_durability(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_models.make("llama", tmp_path / "tiny")
    options = ["--model", str(tmp_path / "tiny"), "--streams", "3", "--tokens", "4", "--rounds", "2", "--threads", "1"]
    assert main(["bench", "log", "--rows", "2", "--steps", "2", *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["streams"], found["tokens"]) == (3, 4)
    assert list(found["tokens_per_second"]) == ["off", "async", "strict"] and list(found["lost"]) == ["async", "strict"]
    assert all(speed > 0 for speed in found["tokens_per_second"].values())
