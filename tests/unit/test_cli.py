"""The command line: exit codes, one line for wrong use, exactly one JSON object, help that costs nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from leftfold import cli
from leftfold.bench import control
from leftfold.cli import COMMANDS, main
from leftfold.events import EventLog, Pause, Resume
from leftfold.executor.cost import CostModel
from leftfold.fsm import GATES, TRANSITIONS
from leftfold.replay.fold import fold
from tests.logs import Recorder, record

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def log(tmp_path: Path) -> str:
    with EventLog.open(tmp_path / "log") as made:
        record(made)
    return str(tmp_path / "log")


def run(*arguments: str) -> int:
    """The exit code, whichever way the command leaves."""
    try:
        return main(arguments)
    except SystemExit as left:
        assert isinstance(left.code, int)
        return left.code


def flip(log: str) -> None:
    segment = Path(log) / "00000001.jsonl"
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)


def one_object(text: str) -> Any:
    assert text.endswith("\n") and text.count("\n") == 1
    found = json.loads(text)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    "arguments",
    [
        ("nope",),
        ("--nope",),
        ("serve", "--nope"),
        ("serve", "--port", "65536"),
        ("serve", "--port", "x"),
        ("serve", ""),
        ("serve", "--resume", "maybe"),
        ("chat", " "),
        ("replay", "show", "x", "--at", "0"),
        ("serve", "--api-key", ""),
        ("serve", "--admin-api-key", " "),
        ("serve", "--shutdown-timeout", "nan"),
        ("serve", "--shutdown-timeout", "-1"),
        ("serve", "--max-num-seqs", "0"),
        ("serve", "--max-body-bytes", "0"),
        ("serve", "--log-dir", ""),
        ("serve", "--served-model-name", " "),
        ("simulate", "--trace", "x", "--log", ""),
        ("serve", "--kv-memory", "much"),
        ("serve", "--kv-memory", "1G", "--kv-tokens", "5"),
        ("serve", "--policy", "magic"),
        ("serve", "a", "b"),
        ("replay",),
        ("replay", "verify"),
        ("replay", "verify", "/nonexistent/log"),
        ("replay", "show", "/nonexistent/log"),
        ("replay", "verify", "x", "--set", "page_size"),
        ("log", "cat", "/nonexistent/log"),
        ("log", "stat"),
        ("log", "verify", "/nonexistent/log"),
        ("fsm", "--format", "picture"),
        ("fsm", "--machine", "coffee"),
        ("bench", "control", "--policy", "magic"),
        ("bench", "control", "--depth", "3"),
        ("bench", "log", "--rows", "0"),
        ("bench", "log", "--dir", "nowhere"),
        ("bench", "control", "--waiting", "-1"),
        ("bench", "control", "--waiting", "1", "--churn", "0.1"),
        ("models", "x"),
        ("chat", "--url", "ftp://x"),
        ("chat", "--url", "http://127.0.0.1:9"),
        ("chat", "/nonexistent/model.gguf"),
        ("chat", "/nonexistent/model.gguf", "--policy", ""),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("leftfold") and err.count("\n") == 1


@pytest.mark.parametrize(("option", "value"), [
    ("temperature", "1000"), ("temperature", "nan"), ("temperature", "-1"), ("top_p", "1.5"), ("top_p", "nan"),
    ("max_tokens", "99999999999999999999999"), ("seed", "18446744073709551616"),
])  # fmt: skip
@pytest.mark.parametrize("where", [("/nonexistent/model.gguf",), ("--url", "http://127.0.0.1:9")], ids=["here", "url"])
def test_what_chat_cannot_draw_by_is_told_before_anything_is_loaded(
    where: tuple[str, ...], option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("chat", *where, f"--{option.replace('_', '-')}={value}") == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"leftfold: {option} = {value.removesuffix('.0')}") and err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("replay", "show", "LOG", "--at", "99999"),
        ("replay", "explain", "LOG", "a", "--at", "99999"),
        ("replay", "diff", "LOG", "LOG", "--at", "99999"),
        ("replay", "report", "LOG", "-o", "LOG/00000001.jsonl"),
        ("replay", "trace", "LOG", "-o", "LOG/00000001.jsonl"),
        ("replay", "whatif", "LOG", "--cost", "COST", "--policy", "os.path:exists"),
        ("log", "export", "LOG", "FILE"),
        ("log", "sanitize", "LOG", "FILE/x"),
        ("log", "cat", "LOG", "--type", "nope"),
        ("log", "cat", "LOG", "--type", ""),
        ("simulate", "fit", "LOG", "--meta", "FILE"),
        ("simulate", "--trace", "TRACE", "--log", "FILE"),
        ("simulate", "--trace", "TRACE", "--set", "num_pages=99999999999"),
        ("simulate", "--trace", "TRACE", "--policy", "os.path:exists"),
    ],
)
def test_wrong_use_with_a_log_is_one_line_and_leaves_the_log(
    log: str, arguments: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "FILE").write_text("x")
    (tmp_path / "COST").write_text('{"microseconds": {"step": 1000}}')
    (tmp_path / "TRACE").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,9,5\n")
    before = (Path(log) / "00000001.jsonl").read_bytes()
    names = {"LOG": log, "FILE": str(tmp_path / "FILE"), "COST": str(tmp_path / "COST"),
             "TRACE": str(tmp_path / "TRACE")}  # fmt: skip
    given = [next((word.replace(name, path, 1) for name, path in names.items() if word.split("/")[0] == name), word)
             for word in arguments]  # fmt: skip
    assert run(*given) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("leftfold") and err.count("\n") == 1
    assert (Path(log) / "00000001.jsonl").read_bytes() == before


def test_what_a_terminal_would_obey_is_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rid = "\x1b[31m\x9b\x07\u202e☃"
    with EventLog.open(tmp_path / "log") as made:
        recorder = Recorder(made)
        recorder.admit(rid, [1, 2, 3])
        recorder.run()
    log = str(tmp_path / "log")
    for view in (("timeline", log, rid), ("explain", log, rid), ("show", log), ("show", log, "--rid", rid)):
        assert run("replay", *view) == 0
        out = capsys.readouterr().out
        assert out and all(char.isprintable() or char == "\n" for char in out)
        assert "☃" in out or view[0] == "show"


@pytest.mark.parametrize(("option", "least"), [("--port", 0), ("--growth-horizon", 0), ("--max-num-seqs", 1)])
def test_numbers_are_refused_with_the_least_that_is_allowed(
    option: str, least: int, capsys: pytest.CaptureFixture[str]
) -> None:
    for text in ("x", str(least - 1)):
        assert run("serve", f"{option}={text}") == 2
        assert f"not a whole number of at least {least} " in capsys.readouterr().err


def test_no_command_shows_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 2
    err = capsys.readouterr().err
    assert all(f"  {name} " in err for name in COMMANDS)


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_every_command_has_help(command: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*([command] if command else []), "--help") == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: leftfold {command or 'COMMAND'}") and len(out.splitlines()) > 5


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["chat", "--help"], ["replay", "--help"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    script = (
        "import sys\nfrom leftfold.cli import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit:\n    pass\n"
        "print(*sorted({'torch', 'numpy', 'orjson', 'transformers', 'fastapi'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr.split() == []


def test_replaying_loads_no_torch(log: str) -> None:
    script = (
        "import sys\nfrom leftfold.cli import main\n"
        f"codes = [main([*words, {log!r}]) for words in (('replay', 'verify'), ('replay', 'show'), ('log', 'stat'))]\n"
        "print(codes, {'torch', 'transformers'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[0, 0, 0] set()"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith("leftfold ")


def test_verify_of_a_clean_log(log: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("replay", "verify", log) == 0
    text = capsys.readouterr().out
    assert "events" in text and "steps" in text and "tokens" in text and text.endswith("no divergence\n")
    assert run("replay", "verify", log, "--json") == 0
    found = one_object(capsys.readouterr().out)
    read = {"first_seq", "folded_from", "snapshots"}
    assert set(found) == {"events", "steps", "tokens", "divergence", "damage", "torn"} | read
    assert found["divergence"] is None
    assert found["events"] == len(EventLog.read(log))


def test_verify_with_other_settings_names_tick_and_both_plans(log: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("replay", "verify", log, "--set", "max_batch_tokens=4") == 1
    text = capsys.readouterr().out
    assert "divergence at seq 4, field chunks" in text
    (chunks,) = [line.split() for line in text.splitlines() if "chunks  " in line]
    assert chunks == ["*", "chunks", "[[0,8,false]]", "[[0,4,false]]"]
    assert run("replay", "verify", log, "--set", "max_batch_tokens=4", "--json") == 1
    divergence = one_object(capsys.readouterr().out)["divergence"]
    assert divergence == {"seq": 4, "field": "chunks", "expected": [[0, 8, False]], "got": [[0, 4, False]]}


@pytest.mark.parametrize("setting", ["colour=red", "page_size=0", "page_size=many", "policy=magic"])
def test_settings_that_no_engine_has_are_wrong_use(
    log: str, setting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("replay", "verify", log, "--set", setting) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and setting.partition("=")[0] in err


@pytest.mark.parametrize("number", ["9" * 23, "-" + "9" * 23, "281474976710657", "9" * 5000])
@pytest.mark.parametrize("command", [
    ("replay", "verify", "LOG"), ("replay", "whatif", "LOG"), ("simulate", "--trace", "LOG"),
], ids=lambda command: command[1])  # fmt: skip
def test_a_setting_beyond_all_settings_is_told_as_it_was_given(
    command: tuple[str, ...], number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*command, "--set", f"max_running={number}") == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert f"'max_running={number}"[:79] in err and "numbers of settings are within ±281474976710656" in err


def test_verify_of_a_damaged_log_names_segment_and_line(log: str, capsys: pytest.CaptureFixture[str]) -> None:
    flip(log)
    assert run("replay", "verify", log) == 1
    assert "damaged log: 00000001.jsonl, line " in capsys.readouterr().out
    assert run("replay", "verify", log, "--json") == 1
    found = one_object(capsys.readouterr().out)["damage"]
    assert run("log", "verify", log, "--json") == 1
    damage = one_object(capsys.readouterr().out)["damage"]
    assert found == damage and damage["segment"] == "00000001.jsonl" and damage["line"] > 1


def test_a_torn_tail_has_one_shape(log: str, capsys: pytest.CaptureFixture[str]) -> None:
    segment = Path(log) / "00000001.jsonl"
    size = segment.stat().st_size
    os.truncate(segment, size - 5)
    torn = []
    for command in ("replay", "log"):
        assert run(command, "verify", log, "--json") == 0
        torn.append(one_object(capsys.readouterr().out)["torn"])
    assert torn[0] == torn[1] and torn[0]["byte"] + torn[0]["size"] == size - 5


@pytest.mark.parametrize("which", [[], ["--rid", "a"]])
def test_a_place_beyond_the_end_is_wrong_use(
    log: str, which: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    last = len(EventLog.read(log))
    assert run("replay", "show", log, *which, "--at", str(last)) == 0
    capsys.readouterr()
    assert run("replay", "show", log, *which, "--at", str(last + 1)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err == f"leftfold: --at {last + 1} is beyond the log's last record, {last}\n"


DAMAGED: list[tuple[str, ...]] = [
    ("replay", "show", "LOG"), ("log", "cat", "LOG"), ("log", "stat", "LOG"), ("replay", "whatif", "LOG"),
    ("log", "export", "LOG", "OUT"), ("log", "sanitize", "LOG", "OUT"), ("replay", "diff", "LOG", "OTHER"),
    ("replay", "diff", "OTHER", "LOG"), ("simulate", "fit", "LOG"), ("replay", "timeline", "LOG", "zz"),
]  # fmt: skip


@pytest.mark.parametrize("command", DAMAGED, ids=lambda command: " ".join(command[:2]))
def test_damage_is_told_with_the_path_of_the_segment(
    log: str, tmp_path: Path, command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with EventLog.open(tmp_path / "other") as made:
        record(made)
    flip(log)
    places = {"LOG": log, "OUT": str(tmp_path / "out"), "OTHER": str(tmp_path / "other")}
    assert run(*(places.get(part, part) for part in command)) == 1
    out, err = capsys.readouterr()
    assert out == "" or command[:2] == ("log", "cat"), "which prints what is whole"
    assert err.startswith(f"leftfold: {log}/00000001.jsonl, line ") and err.count("\n") == 1


def test_a_log_without_a_step_is_named_with_the_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, cost = str(tmp_path / "log"), tmp_path / "cost.json"
    with EventLog.open(folder) as made:
        Recorder(made)
    assert run("replay", "whatif", folder) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"leftfold: the steps of the log {folder}: 0 of them went well, too few to fit ")
    assert "; give one with --cost FILE" in err and err.count("\n") == 1
    assert run("simulate", "fit", folder, "--json") == 1
    assert f"the log {folder}: 0 of them" in one_object(capsys.readouterr().out)["error"]
    cost.write_text(json.dumps(CostModel({"step": 1000.0}, "made up").as_dict()))
    assert run("replay", "whatif", folder, "--cost", str(cost)) == 0
    assert "answered" in capsys.readouterr().out


@pytest.mark.parametrize("command", [("replay", "show"), ("log", "cat"), ("log", "stat")])
def test_damage_is_a_finding_for_every_reader(
    log: str, command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    flip(log)
    assert run(*command, log) == 1
    assert "line " in capsys.readouterr().err
    assert run(*command, log, "--json") == 1
    assert "line " in one_object(capsys.readouterr().out)["error"]


def test_show_prints_the_state_and_a_life(log: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("replay", "show", log) == 0
    assert "no live requests" in capsys.readouterr().out
    assert run("replay", "show", log, "--at", "8", "--json") == 0
    found = one_object(capsys.readouterr().out)
    assert found["seq"] == 8 and {row["rid"] for row in found["requests"]} == {"a", "b"}
    assert run("replay", "show", log, "--rid", "a") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "admit" in lines[0] and "finish" in lines[-1]
    assert run("replay", "show", log, "--rid", "a", "--json") == 0
    assert one_object(capsys.readouterr().out)["life"][0]["what"] == "admit"
    assert run("replay", "show", log, "--rid", "zz") == 2
    assert "no request 'zz'" in capsys.readouterr().err


def test_show_names_who_ended_lately(log: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("replay", "show", log) == 0
    ended = fold(EventLog.read(log)).state.finished  # type: ignore[union-attr]
    names = [request.rid for request in ended]
    assert f"ended lately (see --rid): {', '.join(names)}\nno live requests" in capsys.readouterr().out
    assert sorted(names) == ["a", "b", "c", "d"]
    assert run("replay", "show", log, "--json") == 0
    assert one_object(capsys.readouterr().out)["finished"] == names
    assert run("replay", "show", log, "--at", "3") == 0
    assert "ended lately" not in capsys.readouterr().out


BASE = "605c51979403d33a789c315a"


@pytest.fixture
def answers(tmp_path: Path) -> str:
    """A log of an answer with two choices as requests of their own, of one with one, and of a request beside them."""
    with EventLog.open(tmp_path / "answers") as made:
        recorder = Recorder(made)
        for rid in (f"{BASE}-0", f"{BASE}-1", "aa-0", "mine"):
            recorder.admit(rid, [1, 2, 3])
            recorder.run()
    return str(tmp_path / "answers")


VIEWS: list[tuple[str, ...]] = [("timeline", "LOG", "RID"), ("explain", "LOG", "RID"), ("show", "LOG", "--rid", "RID")]


def view(command: tuple[str, ...], log: str, rid: str, *more: str) -> int:
    return run("replay", *({"LOG": log, "RID": rid}.get(part, part) for part in command), *more)


@pytest.mark.parametrize("command", VIEWS, ids=lambda command: command[0])
@pytest.mark.parametrize("name", ["chatcmpl-{}", "cmpl-{}", "resp_{}", "{}"])
def test_a_request_is_found_by_the_id_of_its_answer(
    answers: str, name: str, command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert view(command, answers, name.format(BASE)) == 0
    out = capsys.readouterr().out
    assert f"{BASE}-0" in out and f"{BASE}-1" in out and "aa-0" not in out
    assert view(command, answers, name.format(BASE), "--json") == 0
    found = one_object(capsys.readouterr().out)
    assert found["rid"] == name.format(BASE)
    assert [one["rid"] for one in found["requests"]] == [f"{BASE}-0", f"{BASE}-1"]
    for rid in (name.format("aa"), name.format("aa-0")):
        assert view(command, answers, rid, "--json") == 0
        assert one_object(capsys.readouterr().out)["rid"] == "aa-0"


@pytest.mark.parametrize("command", VIEWS, ids=lambda command: command[0])
def test_an_id_that_nobody_has_is_answered_with_those_there_are(
    answers: str, log: str, command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert view(command, answers, "chatcmpl-zz") == 2
    told = f"no request 'chatcmpl-zz' in {answers}: it holds '{BASE}-0', '{BASE}-1', 'aa-0', 'mine'"
    assert capsys.readouterr().err == f"leftfold: {told}\n"
    assert view(command, answers, "resp_") == 2
    assert view(command, log, "9", "--json") == 2
    if command[0] != "timeline":
        capsys.readouterr()
        assert view(command, answers, "mine", "--at", "3") == 2
        assert capsys.readouterr().err == f"leftfold: no request 'mine' in {answers} up to seq 3: it came later\n"


def test_records_are_found_by_the_id_of_an_answer(answers: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("log", "cat", answers, "--rid", f"chatcmpl-{BASE}", "--type", "admit", "--json") == 0
    found = one_object(capsys.readouterr().out)["records"]
    assert [record["rid"] for record in found] == [f"{BASE}-0", f"{BASE}-1"]


def test_many_ids_are_named_by_the_newest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with EventLog.open(tmp_path / "log") as made:
        recorder = Recorder(made)
        for number in range(9):
            recorder.admit(f"r{number}", [1, 2, 3])
    assert run("replay", "timeline", str(tmp_path / "log"), "x") == 2
    assert "it holds 9 ids, the newest of them 'r4', 'r5', 'r6', 'r7', 'r8' " in capsys.readouterr().err


def test_what_still_holds_counts_up_to_the_time_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with EventLog.open(tmp_path / "log") as made:
        recorder = Recorder(made)
        recorder.admit("a", [1, 2, 3], max_tokens=12)
        recorder.run(2)
        recorder.take(Pause, mode="keep", call="p")
        recorder.t += 10_000_000
        recorder.take(Resume, call="r")
    assert run("replay", "explain", str(tmp_path / "log"), "a", "--at", "7s") == 0
    assert "it was held 7.000 s, decoding, while the engine was paused" in capsys.readouterr().out


def test_log_cat_prints_records(log: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("log", "cat", log) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["seq"] for line in lines] == list(range(1, len(EventLog.read(log)) + 1))
    assert run("log", "cat", log, "--from", "2", "--to", "9", "--type", "admit", "--json") == 0
    assert [row["rid"] for row in one_object(capsys.readouterr().out)["records"]] == ["a", "b"]


def test_log_stat_counts(log: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("log", "stat", log, "--json") == 0
    found = one_object(capsys.readouterr().out)
    assert found["events"] == sum(found["types"].values()) == len(EventLog.read(log))
    assert found["prompt_tokens"] == 10 + 10 + 7 and found["types"]["admit"] == 4
    assert run("log", "stat", log) == 0
    assert "forward_done" in capsys.readouterr().out


def test_fsm_draws_every_edge_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("fsm") == 0
    drawing = capsys.readouterr().out
    assert drawing.startswith("stateDiagram-v2\n")
    assert run("fsm", "--format", "table") == 0
    table = capsys.readouterr().out
    for (phase, trigger), target in TRANSITIONS.items():
        assert trigger.value in drawing and trigger.value in table
        assert f"{phase.name if phase else '[*]'} --> {target.name}: " in drawing


def test_fsm_draws_the_engine_machine_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("fsm", "--machine", "engine") == 0
    drawing = capsys.readouterr().out
    assert "[*] --> RUNNING\n" in drawing
    for (gate, trigger), target in GATES.items():
        assert trigger.value in drawing and f"{gate.name} --> {target.name}: " in drawing


@pytest.mark.parametrize(("machine", "table"), [("request", TRANSITIONS), ("engine", GATES)])
def test_the_svg_has_a_line_for_every_state_and_an_arrow_for_every_edge(
    machine: str, table: Mapping[Any, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("fsm", "--machine", machine, "--format", "svg") == 0
    root = ElementTree.fromstring(capsys.readouterr().out)
    names = {text.text for text in root.iter(f"{SVG}text") if text.get("class") == "name"}
    assert names == {target.name for target in table.values()}
    across = {}
    boxes = [box for box in root.iter(f"{SVG}rect") if box.get("class") == "box"]
    for box, text in zip(boxes, (text for text in root.iter(f"{SVG}text") if text.get("class") == "name"), strict=True):
        across[text.text] = int(text.get("x", "0"))
        assert abs(int(box.get("x", "0")) + int(box.get("width", "0")) / 2 - across[text.text]) <= 1
    arrows = [path.get("d", "") for path in root.iter(f"{SVG}path") if path.get("marker-end")]
    pairs = {(source.name if source else "", target.name) for (source, _), target in table.items()}
    assert len(arrows) == len(pairs | ({("", "RUNNING")} if machine == "engine" else set()))
    for source, target in pairs:
        if source and source != target:
            near = across[target] + (-2 if across[target] > across[source] else 2)
            assert any(d.startswith(f"M{across[source]} ") and f" L{near} " in d for d in arrows), (source, target)


def test_bench_log_measures_every_durability(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ("bench", "log", "--no-model", "--rows", "4", "--steps", "3", "--dir", str(tmp_path))
    assert run(*options) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]] == ["off", "async", "strict"]
    assert run(*options, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == 4
    for part in ("log_us", "step_us"):
        assert list(found[part]) == ["off", "async", "strict"] and all(value > 0 for value in found[part].values())
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_bench_control_measures_depths_policies_and_crowds(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--rows", "4", "--steps", "8", "--depth", "2", "--policy", "edf", "--waiting", "30", "--no-peers")
    assert run("bench", "control", *options, "--json") == 0
    found = one_object(capsys.readouterr().out)
    assert (found["depth"], found["policy"], found["waiting"]) == (2, "edf", 30)
    (row,) = found["rows"]
    assert row["rows"] == 4 and row["us_per_step"] > 0 and row["us_per_admission"] > 0
    assert row["interruptions_per_s"] >= 0


@pytest.mark.parametrize(("per_second", "told"), [(4000.0, False), (17_430.0, True)])
def test_bench_control_says_when_its_figures_are_of_a_busy_machine(
    per_second: float, told: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(control, "interruptions", lambda: per_second)
    assert run("bench", "control", "--rows", "4", "--steps", "8", "--no-peers") == 0
    assert ("interrupts this machine up to 17,430 times" in capsys.readouterr().out) is told


def test_models_lists_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LEFTFOLD_CACHE", str(tmp_path))
    assert run("models") == 0
    assert "no models" in capsys.readouterr().out
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "models" / "tiny" / "x.gguf").write_bytes(b"12345")
    assert run("models", "--json") == 0
    (row,) = one_object(capsys.readouterr().out)["models"]
    assert (row["name"], row["bytes"]) == ("tiny", 5)


def test_serve_passes_on_what_was_given_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr("leftfold.cli.launch_server", lambda options: given.append(options) or 0)
    assert run("serve") == 0
    assert run("serve", "m.gguf", "--port", "0", "--kv-memory", "1.5MiB", "--no-prefix-cache", "--api-key", "k") == 0
    assert given[0] == {}
    assert given[1] == {
        "model": "m.gguf", "port": 0, "kv_memory": 3 << 19, "prefix_cache": False, "api_key": "k",
    }  # fmt: skip


def test_every_serve_flag_is_an_option_of_the_server() -> None:
    from dataclasses import fields

    from leftfold.commands import serve
    from leftfold.commands.common import Parser
    from leftfold.server.options import ServeOptions

    parser = Parser()
    serve.add_arguments(parser)
    flags = {action.dest for action in parser._actions} - {"help"}
    assert flags == {field.name for field in fields(ServeOptions)}


def test_keys_come_from_the_environment_unless_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[dict[str, Any]] = []
    monkeypatch.setattr(cli, "launch_server", lambda options: served.append(options) or 0)
    monkeypatch.setenv("LEFTFOLD_API_KEY", "from-env")
    monkeypatch.setenv("LEFTFOLD_ADMIN_API_KEY", "boss")
    assert run("serve") == 0 and run("serve", "--api-key", "given") == 0
    assert [options["api_key"] for options in served] == ["from-env", "given"]
    assert {options["admin_api_key"] for options in served} == {"boss"}


@pytest.mark.parametrize("name", ["LEFTFOLD_API_KEY", "LEFTFOLD_ADMIN_API_KEY"])
def test_an_empty_key_in_the_environment_does_not_open_the_server(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "launch_server", lambda options: 0)
    monkeypatch.setenv(name, "")
    assert run("serve") == 2
    error = capsys.readouterr().err
    assert name in error and error.count("\n") == 1


@pytest.mark.parametrize("command", [["serve", "--port", "0"], ["chat"]])
def test_a_light_installation_says_what_serving_needs(command: list[str]) -> None:
    code = f"""
import sys
from leftfold.cli import SERVE_EXTRA, main
for name in SERVE_EXTRA:
    sys.modules[name] = None  # as if it were not installed
sys.exit(main({command!r}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stderr.endswith("pip install 'leftfold[serve]'\n") and done.stderr.count("\n") == 1
