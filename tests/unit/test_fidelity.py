"""`leftfold bench fidelity` on a measured run that a known model made: the fit finds what requests can tell of it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leftfold import cli
from leftfold.executor.cost import CostModel, Work
from leftfold.fsm import Config
from leftfold.replay.simulating import TraceError, simulate
from leftfold.replay.simulating import measured as measuring
from leftfold.replay.simulating.fit import FitError
from leftfold.replay.simulating.jobs import drawn_prompt, job
from leftfold.replay.simulating.measured import Measured, calibrate, read_measured, traced

TRUE = CostModel({"step": 15_000.0, "token": 60.0, "context": 0.5}, "the truth")
LIMITS = {"num_pages": 300, "page_size": 16, "max_running": 16, "max_batch_tokens": 256, "max_model_len": 2048}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A measured run as its two files."""
    folder = tmp_path_factory.mktemp("measured")
    rng = np.random.default_rng(5)
    sizes = [(int(rng.integers(20, 500)), int(rng.integers(5, 60))) for _ in range(60)]
    times = np.cumsum(rng.integers(1_000, 200_000, 60)).tolist()
    jobs = [job(f"b{n}", t, partial(drawn_prompt, 0, n, size[0]), *size)
            for n, (t, size) in enumerate(zip(times, sizes, strict=True))]  # fmt: skip
    run = simulate(jobs, Config(**LIMITS), TRUE)
    rows = []
    for one in jobs:
        seen = run.meter.services[one.rid, 0, 0]
        rows.append({"request_id": one.rid, "input_toks": one.prompt_tokens, "output_toks": one.output_tokens,
                     "queued_ts": 50 + seen.arrived / 1e6, "first_token_ts": 50 + seen.first / 1e6,
                     "last_token_ts": 50 + seen.ended / 1e6})  # fmt: skip
    meta = {
        "model": "made up", "vllm_version": "0",
        "engine_kwargs": {"max_num_seqs": 16, "max_num_batched_tokens": 256, "max_model_len": 2048},
        "kv_cache": {"num_gpu_blocks": 300, "block_size": 16, "enable_prefix_caching": True},
    }  # fmt: skip
    (folder / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "meta.json").write_text(json.dumps(meta))
    return str(folder / "requests.jsonl"), str(folder / "meta.json")


def test_the_costs_are_found_from_the_times_of_requests_alone(files: tuple[str, str]) -> None:
    cost = calibrate(read_measured(*files), range(0, 60, 2))
    for work in (Work(1, 200), Work(8, 2500), Work(4, 1000).chunk(0, 200)):
        assert cost.micros(work) == pytest.approx(TRUE.micros(work), rel=0.2)


def test_requests_that_never_meet_tell_the_costs_exactly_and_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [job(f"b{n}", n * 3_000_000, partial(drawn_prompt, 0, n, 40 * n + 20), 40 * n + 20, 20) for n in range(8)]
    limits = Config(**LIMITS)
    seen = simulate(jobs, limits, TRUE).meter.services
    asked: list[CostModel] = []

    def counted(run: Measured, cost: CostModel) -> Any:
        asked.append(cost)
        return traced(run, cost)

    monkeypatch.setattr(measuring, "traced", counted)
    found = calibrate(Measured(jobs, [seen[one.rid, 0, 0] for one in jobs], limits, "made up"), range(8))
    assert found.microseconds == pytest.approx(TRUE.microseconds, rel=1e-4)
    assert len(asked) == 2, "a model that does not change any more is the one"


def test_too_few_requests_are_no_model(files: tuple[str, str]) -> None:
    with pytest.raises(FitError, match="2 spans are too few to fit 3 coefficients to"):
        calibrate(read_measured(*files), [7])


def test_the_half_that_was_held_out_is_predicted(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "fidelity", "--measured", files[0], "--meta", files[1], "--model", "none"]
    assert cli.main([*arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["within_bar"] and list(found["measured"]) == ["every second", "first half"]
    one = found["measured"]["every second"]
    assert one["requests"] == 30 and all(abs(off) < 2 for off in one["off_percent"].values())
    assert cli.main(arguments) == 0
    assert "all within 5 %" in capsys.readouterr().out


def test_times_that_no_model_explains_are_a_finding(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.loads(line) for line in Path(files[0]).read_text().splitlines()]
    for row in rows[1::2]:  # those that are held out took three times as long to their first token
        late = 2 * (row["first_token_ts"] - row["queued_ts"])
        row["first_token_ts"] += late
        row["last_token_ts"] += late
    (tmp_path / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--measured", str(tmp_path / "requests.jsonl"), "--meta", files[1], "--model", "none"]
    assert cli.main(["bench", "fidelity", *arguments]) == 1
    assert "not all within" in capsys.readouterr().out


def test_a_model_is_fitted_to_a_measured_run(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "fit", files[0], "--meta", files[1], "--json"]) == 0
    assert "made up" in json.loads(capsys.readouterr().out)["source"]


def test_wrong_files_are_named(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TraceError, match="requests.jsonl"):
        read_measured(files[0], files[0])
    assert cli.main(["bench", "fidelity", "--measured", files[0], "--model", "none"]) == 2
    assert cli.main(["bench", "fidelity", "--model", "none"]) == 2
    assert "nothing to compare" in capsys.readouterr().err
