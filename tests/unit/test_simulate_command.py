"""`leftfold simulate` and `simulate fit`: one JSON object, the same each time, and wrong use said in a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from leftfold import cli


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": n * 40, "input_length": 300 + 40 * n, "output_length": 3 + n, "hash_ids": [0, n + 1]}
        for n in range(12)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.main(["simulate", *arguments, "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    found: dict[str, Any] = json.loads(out)
    return found


def test_equal_arguments_give_equal_output_but_for_the_clock(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--trace", trace, "--seed", "3", "--rate", "50", "--replicas", "2", "--router", "prefix"]
    first, second = said(capsys, *arguments), said(capsys, *arguments)
    del first["wall_seconds"], second["wall_seconds"]
    assert json.dumps(first) == json.dumps(second)
    other = said(capsys, *[*arguments[:3], "4", *arguments[4:]])
    assert other["ttft_ms"] != first["ttft_ms"]


def test_the_figures_have_their_names(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = said(capsys, "--trace", trace, "--limit", "10")
    assert found["requests"] == 10 and found["virtual_seconds"] > 0 and found["wall_seconds"] >= 0
    for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
        assert list(found[name]) == ["mean", "p50", "p90", "p99"] and found[name]["p50"] <= found[name]["p99"]
    assert found["output_tokens"] == sum(3 + n for n in range(10)) and "RTX 4090" in found["cost"]["source"]
    assert 0 < found["cache_hit_share"] < 1 and found["trace"] == "mooncake"


def test_text_says_the_same(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "--trace", trace]) == 0
    out = capsys.readouterr().out
    assert "12 requests (12 length)" in out and "TTFT" in out and "cost model: Llama-3.1-8B" in out


def test_a_simulated_log_is_verified_fitted_and_simulated_again(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, model = str(tmp_path / "log"), str(tmp_path / "cost.json")
    first = said(capsys, "--trace", trace, "--log", log)
    assert cli.main(["replay", "verify", log]) == 0
    capsys.readouterr()
    fitted = said(capsys, "fit", log, "-o", model)
    assert fitted["quality"]["r2"] > 0.999 and fitted["out"] == model
    again = said(capsys, "--trace", trace, "--cost", model)
    assert again["e2e_ms"]["mean"] == pytest.approx(first["e2e_ms"]["mean"], rel=0.01)
    assert cli.main(["simulate", "fit", log]) == 0
    assert "fit: samples" in capsys.readouterr().out


def test_settings_and_policies_reach_the_engine(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = said(capsys, "--trace", trace, "--set", "max_running=1", "--policy", "sjf")
    assert found["config"]["max_running"] == 1 and found["config"]["policy"] == "sjf"
    assert found["ttft_ms"]["p99"] > said(capsys, "--trace", trace)["ttft_ms"]["p99"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "needs --trace"),
        (["--trace", "/nowhere"], "nowhere"),
        (["--trace", "TRACE", "--set", "pages=1"], "no such setting"),
        (["--trace", "TRACE", "--set", "page_size=0"], "page_size"),
        (["--trace", "TRACE", "--policy", "best"], "policy 'best'"),
        (["--trace", "TRACE", "--cost", "/nowhere.json"], "--cost"),
        (["--trace", "TRACE", "--replicas", "2", "--log", "x"], "one engine"),
        (["--trace", "TRACE", "--rate", "0"], "--rate"),
        (["fit", "/nowhere"], "nowhere"),
    ],
)
def test_wrong_use_is_one_line(
    trace: str, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [trace if part == "TRACE" else part for part in arguments]
    try:
        code = cli.main(["simulate", *given])
    except SystemExit as stop:
        code = int(str(stop.code))
    err = capsys.readouterr().err
    assert code == 2 and text in err and err.count("\n") == 1
