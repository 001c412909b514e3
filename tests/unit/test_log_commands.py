"""`leftfold log …` and `leftfold replay …` on whole logs, on damaged ones, and on those whose beginning is gone."""

from __future__ import annotations

import csv
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from leftfold.cli import main
from leftfold.events import Abort, Admit, EventLog, Pause, Retention, SamplingParams, compress_closed, prune
from leftfold.replay.export import BATCH, REQUESTS, STEPS
from leftfold.replay.walking import opened
from tests.log_samples import segments
from tests.logs import Recorder, record
from tests.unit.test_log_snapshots import NOW, log_with_snapshots


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with EventLog.open(tmp_path / "log", segment_bytes=700) as log:
        record(log)
    return tmp_path / "log"


@pytest.fixture
def pruned(tmp_path: Path) -> Path:
    """A log that begins after record 1, with snapshots."""
    log_with_snapshots(tmp_path / "log")
    assert prune(tmp_path / "log", Retention(size=0), NOW)
    return tmp_path / "log"


class Said:
    """Runs a command and gives its exit code and what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: object) -> tuple[int, str]:
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = int(stop.code or 0)
        said = self._capsys.readouterr()
        return code, said.out + said.err

    def json(self, *arguments: object) -> tuple[int, dict[str, Any]]:
        code, text = self(*arguments, "--json")
        (line,) = text.splitlines()
        return code, json.loads(line)


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    return Said(capsys)


def test_cat_gives_every_record_and_filters(folder: Path, said: Said) -> None:
    lines = [json.loads(line) for line in said("log", "cat", folder)[1].splitlines()]
    assert [line["seq"] for line in lines] == list(range(1, len(EventLog.read(folder)) + 1))
    some = said.json("log", "cat", folder, "--from", 5, "--to", 20, "--type", "tick")[1]["records"]
    assert some == [line for line in lines if 5 <= line["seq"] <= 20 and line["type"] == "tick"]
    named = said.json("log", "cat", folder, "--rid", "c")[1]["records"]
    joins = [line for line in lines if any(row[1] == "c" for row in line.get("plan", {}).get("join", ()))]
    assert named == [line for line in lines if line.get("rid") == "c" or line in joins]
    assert len(joins) > 1
    assert said.json("log", "cat", folder, "--rid", "nobody") == (0, {"records": []})


@pytest.mark.parametrize("command", [
    ("log", "cat"), ("log", "stat"), ("log", "verify"), ("log", "sanitize", "OUT"), ("log", "export", "OUT"),
    ("replay", "verify"), ("replay", "show"),
])  # fmt: skip
def test_a_segment_that_cannot_be_opened_is_a_finding(
    folder: Path, tmp_path: Path, said: Said, command: tuple[str, ...]
) -> None:
    first = segments(folder)[0]
    first.unlink()
    first.mkdir()
    code, text = said(*command[:2], folder, *(tmp_path / word for word in command[2:]))
    assert code == 1 and f"{first.name}, line 1, byte 0: cannot be read: " in text


@pytest.mark.parametrize("command", [("log", "verify"), ("log", "sanitize"), ("replay", "show")])
def test_a_folder_that_cannot_be_looked_into_is_wrong_use(
    folder: Path, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    def denied(path: object) -> list[str]:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", denied)
    out = [tmp_path / "out"] if "sanitize" in command else []
    assert said(*command, folder, *out) == (2, f"leftfold: {folder}: Permission denied\n")


def test_stat_counts_what_there_is(folder: Path, said: Said) -> None:
    compress_closed(folder)
    code, found = said.json("log", "stat", folder)
    assert code == 0
    reader = EventLog.read(folder)
    assert (found["events"], found["first_seq"]) == (len(reader), 1)
    files = [*folder.glob("0*")]
    assert (found["segments"], found["compressed"]) == (len(files), len(files) - 1)
    assert found["bytes"] == sum(path.stat().st_size for path in files)
    assert found["plain_bytes"] == sum(found["type_bytes"].values()) == sum(len(line) + 18 for line in reader.lines())
    assert sum(found["types"].values()) == found["events"]
    assert (found["from_seconds"], found["seconds"]) == (10 / 1e6, reader.last_t / 1e6)
    assert "events " in said("log", "stat", folder)[1]


ODD = [
    *({"prompt": prompt} for prompt in (None, 5, "text", [1.5], [[1], [2]])),
    *({"params": SamplingParams(n=n)} for n in ("2", 10**9)), {"params": SamplingParams(max_tokens="x")},  # type: ignore[arg-type]
    {"params": SamplingParams(stop_token_ids=5)}, {"deadline": "x"}, {"cache": 5},  # type: ignore[arg-type]
]  # fmt: skip


@pytest.mark.parametrize("fields", ODD)
def test_every_tool_reads_a_log_with_an_odd_request(tmp_path: Path, said: Said, fields: dict[str, Any]) -> None:
    """Whatever a client sends is logged and refused; nobody who looks at it afterwards stumbles over it."""
    folder = tmp_path / "log"
    with EventLog.open(folder) as log:
        made = Recorder(log)
        made.take(Admit, **{"rid": "odd", "prompt": [1, 2, 3], **fields})
        made.admit("b", [1, 2, 3], max_tokens=20)
        made.run()
    code, found = said.json("log", "stat", folder)
    assert code == 0 and found["types"]["admit"] == 2
    for words in (
        ("verify", folder), ("show", folder), ("show", folder, "--rid", "odd"), ("timeline", folder, "odd"),
        ("explain", folder, "odd"), ("trace", folder, "-o", tmp_path / "trace"), ("diff", folder, folder),
        ("report", folder, "-o", tmp_path / "page"), ("whatif", folder, "--set", "max_running=2"),
    ):  # fmt: skip
        code, text = said("replay", *words)
        assert code == 0, (words, text)
    assert said("log", "export", folder, tmp_path / "out")[0] == 0
    rows = {row["rid"]: row["finish_reason"] for row in rows_of(tmp_path / "out" / "requests.csv")}
    assert rows == {"odd": "error", "b": "length"}
    assert said("log", "sanitize", folder, tmp_path / "copy")[0] == 0
    assert said("replay", "verify", tmp_path / "copy")[0] == 0


def test_verify_names_segment_line_and_byte(folder: Path, said: Said) -> None:
    assert said("log", "verify", folder)[0] == 0
    second = segments(folder)[1]
    data = second.read_bytes()
    place = data.index(b"\n") + 1 + 40
    second.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    code, found = said.json("log", "verify", folder)
    assert code == 1
    assert (found["damage"]["segment"], found["damage"]["line"]) == (second.name, 2)
    assert found["damage"]["byte"] == data.index(b"\n") + 1
    assert f"{second.name}, line 2, byte {found['damage']['byte']}" in said("log", "verify", folder)[1]


def test_verify_finds_a_bad_snapshot(pruned: Path, said: Said) -> None:
    code, found = said.json("log", "verify", pruned)
    assert code == 0 and len(found["snapshots"]) > 1 and found["first_seq"] > 1
    newest = found["snapshots"][0]
    path = pruned / f"snapshot-{newest}.json.zst"
    path.write_bytes(path.read_bytes()[:-3])
    code, found = said.json("log", "verify", pruned)
    assert code == 1 and newest not in found["snapshots"] and f"snapshot-{newest}" in found["bad_snapshots"][0]


def test_every_tool_reads_a_log_whose_beginning_is_gone_and_says_so(pruned: Path, said: Said) -> None:
    reader = EventLog.read(pruned)
    first = reader.first_seq
    code, text = said("replay", "verify", pruned)
    assert code == 0 and f"begins at record {first}" in text and "no divergence" in text
    found = said.json("replay", "verify", pruned)[1]
    assert (found["events"], found["first_seq"]) == (len(reader), first)
    assert found["folded_from"] == min(seq for seq in reader.snapshots() if seq >= first - 1) + 1
    assert found["snapshots"] == len(reader.snapshots()) - 1, "all but the one that the fold began with"
    assert min(reader.snapshots()) >= first - 1, "older ones went with the segments"
    assert f"begins at record {first}" in said("log", "verify", pruned)[1]
    assert said.json("log", "stat", pruned)[1]["first_seq"] == first
    assert said.json("log", "cat", pruned)[1]["records"][0]["seq"] == first
    assert said.json("replay", "show", pruned)[1]["seq"] == reader.next_seq - 1
    assert said("replay", "show", pruned, "--rid", "c")[0] == 0


def test_a_moment_before_the_oldest_snapshot_and_other_settings_are_refused_with_the_reason(
    pruned: Path, said: Said
) -> None:
    first = EventLog.read(pruned).first_seq
    code, text = said("replay", "show", pruned, "--at", first - 2)
    assert code == 1 and f"begins at record {first}" in text
    code, text = said("replay", "verify", pruned, "--set", "max_batch_tokens=4")
    assert code == 2 and "need a log that is whole" in text


def test_a_snapshot_that_is_not_what_the_log_says_is_a_divergence(tmp_path: Path, said: Said) -> None:
    log_with_snapshots(tmp_path, every=10)
    reader = EventLog.read(tmp_path)
    wrong, right = reader.snapshot(20), reader.snapshot(10)
    from leftfold.events import Snapshot

    forged = Snapshot(wrong.seq, wrong.chain, right.digest, {**wrong.body, "state": right.body["state"]})
    (tmp_path / "snapshot-20.json.zst").write_bytes(forged.encode())
    code, found = said.json("replay", "verify", tmp_path)
    assert code == 1
    assert (found["divergence"]["seq"], found["divergence"]["field"]) == (20, "snapshot")


def test_compact_compresses_and_removes_only_when_told(tmp_path: Path, said: Said) -> None:
    log_with_snapshots(tmp_path)
    before = list(EventLog.read(tmp_path).lines())
    code, found = said.json("log", "compact", tmp_path)
    assert code == 0 and found["removed"] == [] and len(found["compressed"]) > 5
    assert said("log", "compact", tmp_path) == (0, "nothing to do\n")
    assert list(EventLog.read(tmp_path).lines()) == before
    code, found = said.json("log", "compact", tmp_path, "--keep", "1B")
    assert code == 0 and found["removed"] and EventLog.read(tmp_path).first_seq > 1
    assert said("log", "compact", tmp_path, "--keep", "soon")[0] == 2


def test_sanitize_writes_a_copy_that_verifies(folder: Path, tmp_path: Path, said: Said) -> None:
    code, found = said.json("log", "sanitize", folder, tmp_path / "copy")
    assert (code, found["events"]) == (0, len(EventLog.read(folder)))
    assert said("replay", "verify", tmp_path / "copy")[0] == 0
    assert said("log", "sanitize", folder, tmp_path / "copy")[0] == 2, "it is there already"
    (tmp_path / "key").write_bytes(b"0123456789abcdef")
    for name in ("one", "two"):
        assert said("log", "sanitize", folder, tmp_path / name, "--key", tmp_path / "key")[0] == 0
    one, two = (list(EventLog.read(tmp_path / name).lines()) for name in ("one", "two"))
    assert one == two
    (tmp_path / "short").write_bytes(b"x")
    assert said("log", "sanitize", folder, tmp_path / "three", "--key", tmp_path / "short")[0] == 2


def test_a_log_whose_beginning_is_gone_is_not_sanitized(pruned: Path, tmp_path: Path, said: Said) -> None:
    code, text = said("log", "sanitize", pruned, tmp_path / "copy")
    assert code == 1 and "only one that is whole" in text


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_export_gives_requests_and_steps(folder: Path, tmp_path: Path, said: Said) -> None:
    code, found = said.json("log", "export", folder, tmp_path / "out")
    requests, steps = rows_of(tmp_path / "out" / "requests.csv"), rows_of(tmp_path / "out" / "steps.csv")
    assert (code, found["requests"], found["steps"]) == (0, len(requests), len(steps))
    assert tuple(requests[0]) == REQUESTS and tuple(steps[0]) == STEPS
    by_rid = {row["rid"]: row for row in requests}
    assert sorted(by_rid) == ["a", "b", "c", "d"]
    names = ("prompt_tokens", "finish_reason", "output_tokens")
    assert [by_rid["a"][name] for name in names] == ["10", "length", "10"]
    assert by_rid["b"]["finish_reason"] == "abort"
    assert (by_rid["d"]["finish_reason"], by_rid["d"]["joined_us"]) == ("error", "")
    assert int(by_rid["a"]["admitted_us"]) <= int(by_rid["a"]["joined_us"]) < int(by_rid["a"]["first_token_us"])
    verdict = said.json("replay", "verify", folder)[1]
    assert len(steps) == verdict["steps"]
    assert sum(int(row["output_tokens"]) for row in requests) == verdict["tokens"]
    assert {row["failed"] for row in steps} == {"True", "False"}


def test_export_of_a_log_whose_beginning_is_gone_begins_where_it_can(pruned: Path, tmp_path: Path, said: Said) -> None:
    code, found = said.json("log", "export", pruned, tmp_path / "out")
    first = EventLog.read(pruned).first_seq
    assert code == 0 and first <= found["first_seq"] <= int(rows_of(tmp_path / "out" / "steps.csv")[0]["seq"])
    assert first > 1 and rows_of(tmp_path / "out" / "requests.csv")


def test_export_tells_what_became_of_each_choice(tmp_path: Path, said: Said) -> None:
    with EventLog.open(tmp_path / "log") as log:
        made = Recorder(log)
        made.take(Admit, rid="two", prompt=[1, 2, 3], params=SamplingParams(max_tokens=6, n=2))
        made.run(2)
        made.take(Abort, rid="two", choice=1)
        made.run()
        made.take(Pause, mode="keep", call="x")
        made.take(Admit, rid="late", prompt=[1, 2], params=SamplingParams(max_tokens=5), deadline=5)
        assert made.tick() is None  # its plan ends the request, and is no step
    code, found = said.json("log", "export", tmp_path / "log", tmp_path / "out")
    rows = {(row["rid"], row["choice"]): row for row in rows_of(tmp_path / "out" / "requests.csv")}
    assert (code, found["requests"], len(rows)) == (0, 3, 3)
    ends = {key: (row["finish_reason"], row["output_tokens"]) for key, row in rows.items()}
    assert ends == {("two", "0"): ("length", "6"), ("two", "1"): ("abort", "1"), ("late", "0"): ("deadline", "0")}
    assert found["steps"] == said.json("replay", "verify", tmp_path / "log")[1]["steps"]


def test_export_counts_preemptions_of_those_that_wait_for_them_alone(tmp_path: Path, said: Said) -> None:
    with EventLog.open(tmp_path / "log") as log:
        made = Recorder(log)
        for rid, first in (("a", 1), ("b", 11), ("c", 21)):
            made.admit(rid, list(range(first, first + 8)), max_tokens=12)
        for rid in ("d", "e"):
            made.admit(rid, [1, 2, 3], max_tokens=2)
        made.run()
        preempted = [rid for rid in "abcde" if made.state.requests[rid].preemptions]
    assert said("log", "export", tmp_path / "log", tmp_path / "out")[0] == 0
    rows = {row["rid"]: int(row["preemptions"]) for row in rows_of(tmp_path / "out" / "requests.csv")}
    assert sorted(rid for rid, count in rows.items() if count) == preempted and 0 < len(preempted) < 5
    assert rows == {rid: made.state.requests[rid].preemptions for rid in "abcde"}


def test_an_export_that_fails_leaves_what_was_there(
    folder: Path, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "steps.csv").write_text("of another log")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("leftfold.replay.export._Csv.write", full)
    code, text = said("log", "export", folder, out)
    assert code == 2 and "No space left" in text
    assert {path.name: path.read_text() for path in out.iterdir()} == {"steps.csv": "of another log"}


def test_export_as_parquet_holds_the_same_rows(folder: Path, tmp_path: Path, said: Said) -> None:
    from pyarrow import parquet

    assert said("log", "export", folder, tmp_path / "csv")[0] == 0
    steps = len(rows_of(tmp_path / "csv" / "steps.csv"))
    for out, batch in (("pq", None), ("batches", 3), ("one batch", steps)):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("leftfold.replay.export.BATCH", batch or BATCH)
            assert said("log", "export", folder, tmp_path / out, "--format", "parquet")[0] == 0
        for name in ("requests", "steps"):
            table = parquet.read_table(tmp_path / out / f"{name}.parquet").to_pylist()
            plain = [{key: "" if value is None else str(value) for key, value in row.items()} for row in table]
            assert plain == rows_of(tmp_path / "csv" / f"{name}.csv")


def test_parquet_without_pyarrow_says_what_to_install(
    folder: Path, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    code, text = said("log", "export", folder, tmp_path / "out", "--format", "parquet")
    assert code == 2 and "pip install 'leftfold[export]'" in text and len(text.splitlines()) == 1


def test_a_request_from_before_the_first_record_is_looked_at_as_far_as_it_goes(tmp_path: Path, said: Said) -> None:
    log_with_snapshots(tmp_path, every=3)
    assert prune(tmp_path, Retention(size=0), NOW)
    fold = opened(EventLog.read(tmp_path))[0]
    assert fold.state is not None
    living, gone = set(fold.state.by_rid), {*fold.state.requests} - {*fold.state.by_rid}
    assert living and gone
    for rid in living:
        code, text = said("replay", "timeline", tmp_path, rid)
        assert code == 2 and text.endswith(f"in {tmp_path}: it came before the log's first record\n")
        assert said("replay", "explain", tmp_path, rid)[0] == said("replay", "show", tmp_path, "--rid", rid)[0] == 0
    for rid in gone:
        for words in (("explain", tmp_path, rid), ("show", tmp_path, "--rid", rid)):
            code, text = said("replay", *words)
            assert code == 2 and text.endswith(f"in {tmp_path}: it ended before the log's first record\n")
