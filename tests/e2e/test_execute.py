"""`leftfold replay execute`: a log of mixed requests of the default model is the same, token by token; a wrong token is
found with both scores.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from leftfold import cli
from leftfold.events import Admit, EventLog, ForwardDone, SamplingParams
from leftfold.llm import LLM
from tests.engines import CONFIG, Listener, admit, engine

pytestmark = pytest.mark.slow

WORDS = ("The capital of France is", "Once upon a time", "1 2 3 4 5", "Water boils at", "def add(a, b):", "Roses are")


def mixed(count: int) -> tuple[list[str], list[SamplingParams]]:
    """Greedy and seeded, long and short, some with several choices, some that share a beginning."""
    prompts = [" ".join([WORDS[n % 6]] * (1 + n % 4)) for n in range(count)]
    params = [
        SamplingParams(
            max_tokens=3 + n % 8, temperature=(0.0, 0.8, 1.2)[n % 3], seed=n, top_p=(1.0, 0.9)[n % 2],
            n=2 if n % 7 == 3 else 1, repetition_penalty=1.1 if n % 5 == 0 else 1.0,
        )
        for n in range(count)
    ]  # fmt: skip
    return prompts, params


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("captured") / "log"
    prompts, params = mixed(24)
    limits = {"max_num_seqs": 8, "kv_tokens": 1024, "max_model_len": 512, "max_num_batched_tokens": 48}
    with LLM("smollm2", log_dir=str(path), threads=2, **limits) as llm:
        llm.generate(prompts, params, use_tqdm=False)
    return str(path)


def executed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = cli.main(["replay", "execute", *arguments, "--threads", "2", "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, found


def test_every_request_is_token_identical(log: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = executed(capsys, log)
    assert (code, found["differences"]) == (0, [])
    assert found["requests"] == found["identical"] == found["choices"] == 24 + 3  # each choice is a request here
    assert found["tokens"] > 100


def test_a_wrong_token_is_found_with_both_scores(
    log: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with EventLog.open(tmp_path / "log") as changed:
        wrong = None
        for _, event in EventLog.read(log):
            if wrong is None and isinstance(event, ForwardDone) and len(event.tokens) > 1:
                wrong = int(event.tokens[0]) + 1
                event = replace(event, tokens=[wrong, *event.tokens[1:]])
            changed.append(event)
    rids = [event.rid for _, event in EventLog.read(log) if isinstance(event, Admit)]
    code, found = executed(capsys, str(tmp_path / "log"), "--rid", rids[0])
    assert code == 1 and found["identical"] == 0 and found["requests"] == 1
    difference = found["differences"][0]
    assert (difference["recorded"], difference["got"], difference["output"]) == (wrong, wrong - 1, 0)
    assert difference["logits"]["got"] > difference["logits"]["recorded"]


def test_the_log_of_another_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listener = Listener()
    with EventLog.open(tmp_path / "log") as log:
        made = engine(listener, log=log, config=CONFIG)
        admit(made, "a")
        made.run()
    assert cli.main(["replay", "execute", str(tmp_path / "log"), "--model", "smollm2"]) == 2
    assert "'oracle'" in capsys.readouterr().err
    assert cli.main(["replay", "execute", str(tmp_path / "log"), "--model", "smollm2", "--rid", "chatcmpl-a"]) == 2
    assert "'oracle'" in capsys.readouterr().err, "the request is found by the id of its answer"
    assert cli.main(["replay", "execute", str(tmp_path / "log"), "--rid", "nobody"]) == 2
