"""`leftfold bench latency` and `throughput` on a tiny model; workloads; what is wrong use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from leftfold.bench.presets import PRESETS
from leftfold.cli import main
from tests import tiny_models


def test_prompts_are_seeded_and_of_the_lengths_that_a_preset_says() -> None:
    for preset in PRESETS.values():
        prompts = preset.prompts(1000, seed=3)
        assert prompts == preset.prompts(1000, seed=3) != preset.prompts(1000, seed=4)
        assert len(prompts) == preset.requests
        least, most = preset.shared + preset.shortest, preset.shared + preset.longest
        assert all(least <= len(prompt) <= most and min(prompt) >= 100 and max(prompt) < 1000 for prompt in prompts)
        assert preset.reach == most + preset.output
    shared = [prompt[:512] for prompt in PRESETS["C"].prompts(1000)]
    assert all(prefix == shared[0] for prefix in shared)


@pytest.mark.parametrize(("command", "preset"), [("latency", "A"), ("throughput", "B")])
def test_a_benchmark_tells_its_figures_as_one_object(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, preset: str
) -> None:
    tiny_models.make("llama", tmp_path)
    given = ["--preset", preset, "--model", str(tmp_path), "--rounds", "1", "--threads", "1", "--json"]
    assert main(["bench", command, *given]) == 0
    found = json.loads(capsys.readouterr().out)
    figure = "decode_throughput" if command == "latency" else "output_throughput"
    assert found["preset"] == preset and found[figure] > 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("latency", "--model", "/nowhere"), "no model"),
        (("latency", "--preset", "B"), "invalid choice"),
        (("throughput", "--rounds", "0"), "at least 1"),
        (("serve", "--vs", "tgi"), "NAME=http"),
        (("serve", "--vs", "llama.cpp=/nowhere/llama-server"), "no program"),
        (("latency", "--vs", "vllm=/nowhere/python"), "no program"),
        (("serve", "--url", "ftp://x"), "does not begin with http"),
        (("serve", "--url", "http://127.0.0.1:9"), "does not answer"),
    ],
)
def test_wrong_use_is_one_line_and_code_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], text: str
) -> None:
    try:
        code = main(["bench", *arguments])
    except SystemExit as ended:
        code = int(ended.code or 0)
    said = capsys.readouterr().err
    assert code == 2 and text in said and said.count("\n") == 1
