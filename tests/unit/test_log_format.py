"""docs/log-format.md is true: a reader written from it alone, and its tables and example against the code."""

from __future__ import annotations

import json
import re
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from leftfold.events import (
    EVENTS,
    Admit,
    Chunk,
    EventLog,
    ForwardDone,
    Join,
    Plan,
    Retention,
    SamplingParams,
    Tick,
    compress_closed,
    encode,
    prune,
)
from leftfold.events.codec import OPERATIONS, TAGS
from leftfold.fsm import Config, State
from leftfold.fsm.snapshot import encode as encode_state
from tests import page_reader
from tests.log_samples import write
from tests.page_reader import crc32c
from tests.unit.test_log_snapshots import NOW, log_with_snapshots

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "log-format.md").read_text()


def test_the_check_value_of_the_checksum() -> None:
    assert "`crc32c(\"123456789\", 0)` is `e3069283`" in PAGE
    assert crc32c(b"123456789", 0) == 0xE3069283
    assert crc32c(b"6789", crc32c(b"12345", 0)) == 0xE3069283


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("segment_bytes", [400, 1 << 20])
def test_a_reader_written_from_the_page_reads_what_was_written(
    tmp_path: Path, segment_bytes: int, compressed: bool
) -> None:
    items = write(tmp_path, 40, segment_bytes)
    if compressed:
        compress_closed(tmp_path)
    records = [record for record, _ in page_reader.read(tmp_path)]
    assert len(records) == 40
    for record, item in zip(records, items, strict=True):
        del record["crc"], record["seq"]
        assert record == json.loads(encode(item))


def test_the_example_is_what_the_code_writes(tmp_path: Path) -> None:
    with EventLog.open(tmp_path) as log:
        log.append(Admit(t=0, rid="a", prompt=[1, 2, 3], params=SamplingParams(max_tokens=4)))
        plan = Plan(step=1, join=(Join(0, "a", 0, 0, ((5,),)),), chunks=(Chunk(0, 3, True),))
        log.append(Tick(t=1, plan=plan))
        log.append(ForwardDone(t=250, step=1, tokens=[7], digest="0123456789abcdef" * 2))
    example = re.search(r"```\n(\{.*?)```", PAGE, re.DOTALL)
    assert example and example[1] == (tmp_path / "00000001.jsonl").read_text()


def field(f: object) -> str:
    default = getattr(f, "default", MISSING)
    name = getattr(f, "name", "")
    if default is MISSING:
        return str(name)
    return f"{name}={{}}" if isinstance(default, SamplingParams) else f"{name}={json.dumps(default)}"


@pytest.mark.parametrize("cls", [*EVENTS, *OPERATIONS], ids=lambda cls: TAGS[cls])
def test_every_type_stands_on_the_page_with_its_fields_and_defaults(cls: type) -> None:
    listed = ", ".join(field(f) for f in fields(cls) if f.name != "t")
    assert f"| `{TAGS[cls]}` | {listed} |\n" in PAGE


def test_parameters_stand_on_the_page_with_their_defaults() -> None:
    assert ", ".join(field(f) for f in fields(SamplingParams) if not f.name.startswith("_")) in " ".join(PAGE.split())


def test_plan_fields_stand_on_the_page_in_order() -> None:
    names = [f.name for f in fields(Plan) if not f.name.startswith("_")]
    table = PAGE[PAGE.index("## Plans") :]
    assert re.findall(r"^\| `(\w+)` \|", table[: table.index("| operation |")], re.MULTILINE) == names


def test_compressed_segments_have_the_name_the_page_says(tmp_path: Path) -> None:
    write(tmp_path, 40, 500)
    assert compress_closed(tmp_path)[0] == "00000001.jsonl.zst"
    assert "`00000001.jsonl.zst`" in PAGE


def test_a_reader_written_from_the_page_finds_snapshots_and_a_later_beginning(tmp_path: Path) -> None:
    log_with_snapshots(tmp_path)
    prune(tmp_path, Retention(size=0), NOW)
    compress_closed(tmp_path)
    reader = EventLog.read(tmp_path)
    assert [record["seq"] for record, _ in page_reader.read(tmp_path)] == [one.seq for one in reader]
    found = page_reader.read_snapshots(tmp_path)
    assert sorted(found, reverse=True) == reader.snapshots() and len(found) > 1
    assert all(found[seq]["digest"] == reader.snapshot(seq).digest for seq in found)
    assert all(found[seq]["t"] == next(one.event.t for one in reader if one.seq == seq) for seq in [max(found)])


def test_the_page_names_every_part_of_a_state() -> None:
    table = PAGE[PAGE.index("## Snapshots") :]
    state = State(Config(num_pages=4, page_size=4, max_running=2, max_batch_tokens=8, max_model_len=16))
    missing = [name for name in encode_state(state) if f"`{name}`" not in table]
    assert missing == []
