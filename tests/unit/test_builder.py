"""From options to an engine: how much KV memory, which limits, which log; what cannot be met is said in one line."""

from __future__ import annotations

import dataclasses
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from leftfold.builder import Machine, build_engine, machine_of, open_log, size_config, weight_bytes, work_bytes
from leftfold.errors import ConfigurationError
from leftfold.events import Admit, EventLog, Started
from leftfold.events.gaps import Gap, gaps, note_gap
from leftfold.executor.config import ModelConfig
from leftfold.executor.torch_executor import TorchExecutor
from leftfold.executor.weights import load
from leftfold.hub import resolve
from leftfold.identity import check_model, identity
from leftfold.keeping import NoLog
from leftfold.options import EngineOptions

MODEL = ModelConfig(
    family="llama", vocab_size=100, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=16, rms_eps=1e-5, rope_theta=10000.0, rope_scaling=None, max_positions=2048, tied_embeddings=True,
    qk_norm=False, windows=(None, None),
)  # fmt: skip
EACH = 2 * 2 * 2 * 16 * 4
ROOMY = Machine("cpu", "float32", free=1 << 34)


def sized(machine: Machine = ROOMY, **options: Any) -> Any:
    return size_config(EngineOptions(**options), MODEL, machine)


def test_weights_are_counted_before_the_kv_memory(tiny: Path) -> None:
    loaded = load(tiny)
    executor = TorchExecutor(loaded, num_pages=1, page_size=4, max_model_len=16)
    assert weight_bytes(loaded.config, "float32") == pytest.approx(executor.model.nbytes, rel=0.05)
    assert weight_bytes(MODEL, "bfloat16") * 2 == weight_bytes(MODEL, "float32")


def test_limits_of_the_line_and_of_the_planner_are_passed_on() -> None:
    given = {"max_queued_requests": 7, "max_queued_tokens": 500, "growth_horizon": 32, "pipeline_depth": 2}
    given |= {"policy": "priority", "max_chunk_tokens": 64, "prefix_cache": False}
    assert {name: getattr(sized(**given), name) for name in given} == given


def test_defaults_hold_one_full_request_and_many_modest_ones() -> None:
    config = sized()
    assert (config.page_size, config.max_model_len, config.vocab_size) == (16, 2048, 100)
    assert config.num_pages * 16 == config.max_running * 256
    few = sized(max_num_seqs=1)
    assert few.num_pages * 16 >= 2048


def test_a_step_is_short_by_default_but_has_room_for_prompts_beside_every_row() -> None:
    assert sized().max_batch_tokens == 128
    assert sized(max_num_seqs=200).max_batch_tokens == 400
    assert sized(max_num_seqs=200, max_num_batched_tokens=77).max_batch_tokens == 77
    assert sized(Machine("cuda:0", "float32", free=1 << 34)).max_batch_tokens == 8192


def test_little_memory_bounds_the_default(caplog: pytest.LogCaptureFixture) -> None:
    taken = weight_bytes(MODEL, "float32") + work_bytes(MODEL, 128, 64)
    config = sized(Machine("cpu", "float32", free=taken + 4 * 1000 * EACH))
    assert config.num_pages == 1000 // 16
    assert "less than max_model_len 2048" in caplog.text


def test_no_room_beside_the_weights_leaves_a_page_and_refuses_more() -> None:
    full = Machine("cpu", "float32", free=weight_bytes(MODEL, "float32"))
    assert sized(full).num_pages == 1
    with pytest.raises(ConfigurationError, match="only 0 MiB are free beside the weights"):
        sized(full, kv_tokens=1600)


def test_memory_is_that_of_the_device_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {torch.device("cuda:0"): 7, torch.device("cuda:1"): 1 << 30}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[device], 1 << 31))
    assert machine_of(EngineOptions(device="cuda:1")) == Machine("cuda:1", "bfloat16", 1 << 30)


def test_kv_size_is_taken_as_given_rounded_to_pages(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    assert sized(kv_tokens=2100).num_pages == 131 and not caplog.records
    assert sized(kv_memory=2100 * EACH).num_pages == 131 and not caplog.records
    assert sized(kv_tokens=2000).num_pages == 125 and "holds 2000 tokens" in caplog.text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kv_tokens": 15}, "KV memory for 15 tokens is less than one page of 16"),
        ({"kv_memory": 16 * EACH - 1}, f"--kv-memory {16 * EACH - 1} is less than one page of 16 tokens"),
        ({"kv_tokens": 99, "kv_memory": 99}, "give one of them"),
        ({"kv_tokens": 1 << 40}, "only 163.. MiB are free beside the weights"),
        ({"max_model_len": 2049}, "beyond the model's 2048"),
    ],
)
def test_sizes_that_cannot_be_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        sized(**options)


def test_limits_reach_the_config() -> None:
    config = sized(
        max_num_seqs=3, max_num_batched_tokens=77, max_chunk_tokens=9, max_model_len=100, max_queued_requests=5,
        page_size=8, policy="priority", prefix_cache=False,
    )  # fmt: skip
    assert (config.max_running, config.max_batch_tokens, config.max_chunk_tokens) == (3, 77, 9)
    assert (config.max_model_len, config.max_queued_requests, config.page_size) == (100, 5, 8)
    assert (config.policy, config.prefix_cache) == ("priority", False)


@pytest.mark.parametrize(("device", "policy", "depth"), [("cpu", "spf", 0), ("cuda:0", "fcfs", 1)])
def test_order_and_depth_suit_the_device(device: str, policy: str, depth: int) -> None:
    machine = Machine(device, "float32", free=1 << 34)
    config, other = sized(machine), sized(machine, policy="edf")
    assert (config.policy, config.pipeline_depth, other.policy) == (policy, depth, "edf")


def test_options_are_taken_from_any_object_that_has_them() -> None:
    @dataclasses.dataclass
    class More:
        model: str = "x"
        kv_tokens: int = 5
        port: int = 8000

    assert EngineOptions.of(More()) == EngineOptions(model="x", kv_tokens=5)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"durability": "never"}, "durability is 'never': give one of off, async, strict"),
        ({"on_log_failure": "hope"}, "on_log_failure is 'hope': give one of stop, serve"),
        ({"device": "tpu"}, "device 'tpu' is unknown"),
        ({"dtype": "int3"}, "dtype 'int3' is unknown"),
        ({"kernels": "attention"}, "not of the form operation=name"),
        ({"kernels": "foo=bar"}, "unknown operation 'foo'"),
        ({"pipeline_depth": 3}, "pipeline_depth is 3: give a whole number from 0 to 2"),
    ],
)
def test_options_that_cannot_be_met_leave_nothing_behind(
    tiny: Path, tmp_path: Path, options: dict[str, Any], text: str
) -> None:
    options = {"model": str(tiny), "log_dir": str(tmp_path / "log"), "kv_tokens": 512, "device": "cpu", **options}
    with pytest.raises(ConfigurationError, match=text):
        build_engine(EngineOptions(**options))
    assert not (tmp_path / "log").exists()


def test_weights_that_cannot_be_read_leave_nothing_behind(tiny: Path, tmp_path: Path) -> None:
    (tiny / "model.safetensors").write_bytes(b"rubbish")
    with pytest.raises(ConfigurationError):
        build_engine(EngineOptions(model=str(tiny), log_dir=str(tmp_path / "log"), device="cpu"))
    assert not (tmp_path / "log").exists()


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    from tests import tiny_models

    tiny_models.make("llama", tmp_path / "tiny")
    return tmp_path / "tiny"


def test_the_log_is_by_default_named_after_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    log = open_log(EngineOptions(), "smollm2")
    log.close()
    assert (tmp_path / "logs" / "smollm2" / "LOCK").is_file()


def test_a_torn_tail_is_cut_off_and_said_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with EventLog.open(tmp_path / "log") as log:
        log.append(Admit(t=0, rid="a"))
        log.append(Admit(t=0, rid="b"))
    segment = tmp_path / "log" / "00000001.jsonl"
    segment.write_bytes(segment.read_bytes()[:-9])
    opened = open_log(EngineOptions(log_dir=str(tmp_path / "log")), "x")
    assert [event.rid for _, event in opened] == ["a"]
    opened.close()
    assert "torn record" in caplog.text


def test_a_damaged_log_is_refused_with_its_place(tmp_path: Path) -> None:
    with EventLog.open(tmp_path / "log") as log:
        log.append(Admit(t=0, rid="a"))
        log.append(Admit(t=0, rid="b"))
    segment = tmp_path / "log" / "00000001.jsonl"
    segment.write_bytes(segment.read_bytes().replace(b'"rid":"a"', b'"rid":"x"'))
    with pytest.raises(ConfigurationError, match="00000001.jsonl, line 2"):
        open_log(EngineOptions(log_dir=str(tmp_path / "log")), "x")


@pytest.mark.parametrize("durability", ["async", "strict"])
def test_a_log_is_written_by_itself(durability: str, tmp_path: Path) -> None:
    log = open_log(EngineOptions(log_dir=str(tmp_path / "log"), durability=durability), "x")
    assert log.strict == (durability == "strict")
    log.append(Admit(t=0, rid="a"))
    log.commit()
    segment = tmp_path / "log" / "00000001.jsonl"
    while not (segment.exists() and b'"rid":"a"' in segment.read_bytes()):
        time.sleep(0.001)  # nobody writes but the log's own thread
    log.close()
    assert [event.rid for _, event in EventLog.read(tmp_path / "log")] == ["a"]


def test_no_log_numbers_events_and_keeps_none() -> None:
    log = open_log(EngineOptions(durability="off"), "x")
    assert isinstance(log, NoLog)
    assert [log.append(Admit(t=0, rid=rid)) for rid in "ab"] == [1, 2]
    assert list(log.begin()[1]) == [] and log.safe == 2
    log.close()


def test_a_gap_that_an_engine_left_is_told_at_the_next_start_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = EngineOptions(log_dir=str(tmp_path))
    log = open_log(options, "x")
    log.append(Admit(t=0, rid="a"))
    log.close()
    note_gap(tmp_path, Gap(0, "No space left on device"))  # record 1 was written, but not surely on disk
    log = open_log(options, "x")
    assert "went on without its log after record 1: No space left on device" in caplog.text
    assert gaps(tmp_path) == [Gap(0, "No space left on device", resumed=1)]
    log.append(Admit(t=0, rid="b"))
    log.close()
    caplog.clear()
    open_log(options, "x").close()
    assert not caplog.records


def test_a_folder_that_cannot_be_written_is_refused_unless_serving_is_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def read_only(*args: Any, **options: Any) -> Any:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(EventLog, "open", read_only)
    options = EngineOptions(log_dir=str(tmp_path / "log"))
    with pytest.raises(ConfigurationError, match="cannot be opened.*Read-only"):
        open_log(options, "x")
    log = open_log(dataclasses.replace(options, on_log_failure="serve"), "x")
    assert isinstance(log, NoLog) and log.failure is not None and "Read-only" in log.failure.reason
    assert "so none is kept" in caplog.text and "Read-only" in str(log.figures()["log_failure"])


def refused(tiny: Path, log: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """The log is refused before weights are loaded, and its lock is free again."""

    def never(path: Path) -> Any:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("leftfold.builder.load", never)
    with pytest.raises(ConfigurationError, match=text):
        build_engine(EngineOptions(model=str(tiny), log_dir=str(log), device="cpu"))


def test_what_is_wrong_with_a_log_is_known_before_the_model_is_loaded(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    log.write_text("a file")
    refused(tiny, log, monkeypatch, "a log is a directory")
    log.unlink()
    with EventLog.open(log) as made:
        made.append(Started(t=0, model="other"))
        refused(tiny, log, monkeypatch, "in use by process")
    refused(tiny, log, monkeypatch, "holds model 'other'")
    with EventLog.open(log) as made:  # the lock is free
        made.append(Admit(t=0, rid="a"))
    segment = log / "00000001.jsonl"
    segment.write_bytes(segment.read_bytes().replace(b"other", b"osier"))
    refused(tiny, log, monkeypatch, "00000001.jsonl, line 2")


def test_a_model_that_cannot_be_loaded_lets_go_of_the_log(tiny: Path, tmp_path: Path) -> None:
    EventLog.open(tmp_path / "log").close()
    (tiny / "model.safetensors").write_bytes(b"rubbish")
    with pytest.raises(ConfigurationError):
        build_engine(EngineOptions(model=str(tiny), log_dir=str(tmp_path / "log"), device="cpu"))
    EventLog.open(tmp_path / "log").close()


def test_two_models_of_one_name_do_not_share_a_log(tmp_path: Path) -> None:
    for folder, content in (("a", b"x" * 999_999), ("b", b"x" * 999_998 + b"y"), ("c", b"x" * 999_999)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model.gguf").write_bytes(content)
    a, b, c = (identity(resolve(str(tmp_path / folder / "model.gguf"))) for folder in "abc")
    assert a == c != b and a.startswith("model#")
    check_model(Started(t=0, model=a), c)
    check_model(Started(t=0, model="model"), b)  # of a version that knew names alone
    with pytest.raises(ConfigurationError, match="the same name, other files"):
        check_model(Started(t=0, model=a), b)
    with pytest.raises(ConfigurationError, match="holds model"):
        check_model(Started(t=0, model="else"), b)


@pytest.mark.parametrize("resume", [True, False])
def test_what_the_options_say_of_live_requests_reaches_the_engine(tiny: Path, tmp_path: Path, resume: bool) -> None:
    from leftfold.events import SamplingParams

    options: dict[str, Any] = {"model": str(tiny), "log_dir": str(tmp_path / "log"), "kv_tokens": 512, "device": "cpu"}
    first = build_engine(EngineOptions(**options))
    first.start()
    first.submit(Admit, rid="a", prompt=[1, 2], params=SamplingParams(max_tokens=9))
    first.stop()
    first.run()
    second = build_engine(EngineOptions(resume=resume, **options))
    second.start()
    second.close()
    assert [key[0] for key in second.state.live] == (["a"] if resume else [])
