"""Each public trace format is read for what it says, and what it does not say right is named with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leftfold.replay.simulating import TraceError, read_trace
from leftfold.replay.simulating.jobs import TOKEN_SPACE


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prompt(job: Any) -> list[int]:
    tokens = job.admit(0).prompt
    assert tokens.dtype == np.int32 and len(tokens) == job.prompt_tokens
    assert tokens.min() >= 0 and tokens.max() < TOKEN_SPACE
    return tokens.tolist()


MOONCAKE = [
    {"timestamp": 500, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]},
    {"timestamp": 2000, "input_length": 1030, "output_length": 7, "hash_ids": [0, 1, 9]},
    {"timestamp": 2500, "input_length": 10, "output_length": 0, "hash_ids": [4]},
]


def test_mooncake_prompts_share_what_their_blocks_share(tmp_path: Path) -> None:
    trace = read_trace(lines(tmp_path / "m.jsonl", *MOONCAKE))
    first, second, third = trace.jobs
    assert trace.kind == "mooncake" and [job.t for job in trace.jobs] == [0, 1_500_000, 2_000_000]
    assert prompt(first) == prompt(second)[:700] and prompt(third)[0] not in prompt(second)
    assert [job.output_tokens for job in trace.jobs] == [5, 7, 1] and trace.longest == 1037
    event = second.admit(77)
    assert (event.t, event.params.max_tokens) == (77, 7)


def test_a_limit_takes_the_first(tmp_path: Path) -> None:
    assert len(read_trace(lines(tmp_path / "m.jsonl", *MOONCAKE), limit=2).jobs) == 2


def test_azure_rows_have_times_and_sizes_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    first, second = read_trace(path).jobs
    assert (first.t, second.t) == (0, 4_314_579) and (second.prompt_tokens, second.output_tokens) == (396, 109)
    assert prompt(first)[0] != prompt(second)[0]
    assert prompt(first) == prompt(read_trace(path).jobs[0]) != prompt(read_trace(path, seed=1).jobs[0])


def test_token_ids_are_taken_as_they_are(tmp_path: Path) -> None:
    row = {"input_toks": 3, "output_toks": 9, "arrival_time_ns": 5_000_000, "input_tok_ids": [5, 6, 7]}
    trace = read_trace(lines(tmp_path / "t.jsonl", row, {**row, "arrival_time_ns": 9_000_000}))
    assert trace.kind == "token ids" and prompt(trace.jobs[0]) == [5, 6, 7] and trace.jobs[1].t == 4000


def test_a_measured_run_has_sizes_and_times(tmp_path: Path) -> None:
    rows = [{"request_id": f"b{n}", "input_toks": 4, "output_toks": 2, "queued_ts": 100.0 + n} for n in range(2)]
    trace = read_trace(lines(tmp_path / "m.jsonl", *rows))
    assert trace.kind == "measured" and [(job.rid, job.t) for job in trace.jobs] == [("b0", 0), ("b1", 1_000_000)]


def test_conversations_are_counted_in_bytes(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "abcdefgh"}, {"from": "gpt", "value": "x" * 40}]
    whole = [{"id": "c1", "conversations": turns}, {"id": "c2", "conversations": turns}]
    (tmp_path / "s.json").write_text(json.dumps(whole, indent=1))
    trace = read_trace(tmp_path / "s.json")
    assert trace.kind == "sharegpt" and trace.jobs[0].prompt_tokens == 2 and trace.jobs[0].output_tokens == 10
    assert prompt(trace.jobs[0]) == prompt(trace.jobs[1])
    assert read_trace(lines(tmp_path / "s.jsonl", *whole)).kind == "sharegpt"


def test_openai_batches_say_prompt_and_length(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "hello there"}], "max_tokens": 33}
    rows = [
        {"custom_id": "x", "method": "POST", "url": "/v1/chat/completions", "body": body},
        {"custom_id": "y", "body": {"prompt": [1, 2, 3]}},
        {"custom_id": "z", "body": {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}},
    ]
    trace = read_trace(lines(tmp_path / "b.jsonl", *rows))
    assert trace.kind == "openai batch" and [job.rid for job in trace.jobs] == ["x", "y", "z"]
    assert trace.jobs[0].output_tokens == 33 and prompt(trace.jobs[1]) == [1, 2, 3]


def session(name: str) -> dict[str, Any]:
    requests = [
        {"t": 3.0, "type": "n", "in": 100, "out": 5, "hash_ids": [1, 2], "api_time": 2.0, "think_time": 0.0},
        {"t": 9.0, "type": "n", "in": 130, "out": 6, "hash_ids": [1, 2, 3], "api_time": 1.0, "think_time": 4.0},
        {"t": 20.0, "type": "s", "in": 140, "out": 6, "hash_ids": [1, 2, 3], "think_time": None},
    ]
    return {"id": name, "block_size": 64, "hash_id_scope": "local", "requests": requests}


def test_sessions_wait_for_their_answers(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.json").write_text(json.dumps(session(name)))
    trace = read_trace(tmp_path)
    assert trace.kind == "agent sessions"
    found = {job.rid: (job.t, job.after) for job in trace.jobs}
    assert found["one/0"] == (0, None) and found["one/1"] == (4_000_000, "one/0")
    assert found["two/2"] == (10_000_000, "two/1")  # its think time is not known: 20 - 9 - 1
    by_rid = {job.rid: job for job in trace.jobs}
    assert prompt(by_rid["one/0"]) == prompt(by_rid["one/1"])[:100] != prompt(by_rid["two/0"])
    assert len(read_trace(tmp_path / "one.json").jobs) == 3


def test_a_session_may_be_written_over_lines_and_its_sub_agents_are_passed_over(tmp_path: Path) -> None:
    whole = session("one")
    whole["requests"].insert(1, {"t": 5.0, "type": "sub-agent", "requests": []})
    (tmp_path / "one.json").write_text(json.dumps(whole, indent=2))
    trace = read_trace(tmp_path / "one.json")
    assert trace.kind == "agent sessions"
    assert [(job.rid, job.after) for job in trace.jobs] == [
        ("one/0", None), ("one/2", "one/0"), ("one/3", "one/2"),
    ]  # fmt: skip


def test_what_a_sessions_blocks_do_not_reach_is_shared_with_nobody(tmp_path: Path) -> None:
    whole = session("one")
    for request, blocks in zip(whole["requests"], ([1], [1, 2], []), strict=True):
        request["hash_ids"] = blocks  # the first has 100 tokens, a block 64: its second block has no name
    (tmp_path / "one.json").write_text(json.dumps(whole))
    (tmp_path / "two.json").write_text(json.dumps({**whole, "id": "two"}))
    first, second, third = [prompt(job) for job in read_trace(tmp_path / "one.json").jobs]
    assert first[:64] == second[:64] and first[64:] != second[64:100] and len(set(first)) == 100
    assert third[:64] != first[:64] and third != [prompt(job) for job in read_trace(tmp_path).jobs][-1]


def test_empty_lines_are_passed_over_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text("\n\n".join(json.dumps(row) for row in MOONCAKE) + "\n\n")
    assert [job.rid for job in read_trace(path).jobs] == ["m0", "m2", "m4"]
    path.write_text(json.dumps(MOONCAKE[0]) + "\n\n{}\n")
    with pytest.raises(TraceError, match="line 3: KeyError"):
        read_trace(path)


def test_a_rate_replaces_the_arrivals(tmp_path: Path) -> None:
    path = lines(tmp_path / "m.jsonl", *[{**MOONCAKE[2], "timestamp": 0}] * 400)
    times = [job.t for job in read_trace(path, rate=10.0).jobs]
    assert times == sorted(times) and 30e6 < times[-1] < 50e6
    assert times == [job.t for job in read_trace(path, rate=10.0).jobs]
    assert times != [job.t for job in read_trace(path, seed=4, rate=10.0).jobs]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "neither JSON"),
        ("hello\n", "neither JSON"),
        ('{"what": 1}\n', "no known format"),
        ("[]", "no request"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", "line 2"),
        ('{"timestamp": 1, "input_length": 600, "output_length": 1, "hash_ids": [1]}\n', "line 1"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1, "hash_ids": [1]}\n', "at least 1"),
        ('{"input_toks": 2, "output_toks": 1, "arrival_time_ns": 0, "input_tok_ids": [1]}\n', "there are 1 ids"),
        ('{"body": {}}\n', "KeyError"),
        ('{"block_size": 0, "hash_id_scope": "local", "requests": []}', "at least 1"),
        ('[{"conversations": []}]', "conversation 0: ValueError"),
        ('[{"id": "c"}]', "conversation 0: KeyError: 'conversations'"),
        ('[7]', "conversation 0: TypeError"),
        ('{"input_toks": 1, "output_toks": 1, "queued_ts": 0}\nnot json\n', "line 2"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "trace"
    path.write_text(content)
    with pytest.raises(TraceError, match=said):
        read_trace(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"a folder without \*\.json files"):
        read_trace(tmp_path)
    with pytest.raises(TraceError):
        read_trace(tmp_path / "none")
