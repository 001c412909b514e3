"""Control verbs of the torch executor: memory given back and taken again, other weights, and every wrong ask."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from leftfold.events import Control
from leftfold.executor.base import Result
from leftfold.executor.torch_executor import TorchExecutor
from tests.plan_stream import Driver, PlanStream, generate, joined
from tests.tiny_models import KINDS, edit_config, make

PAGES, PAGE = 24, 4
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models: "old", "other" of the same shape, and some that cannot take its place."""
    root = tmp_path_factory.mktemp("models")
    torch.set_num_threads(1)
    found = {name: root / name for name in ("old", "other", "deeper", "shorter", "broken", "qwen2")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(KINDS, "llama-again", ("Llama", {"tie_word_embeddings": False}))
        patch.setitem(KINDS, "deeper", ("Llama", {"num_hidden_layers": 4}))
        for name, kind in (("old", "llama"), ("other", "llama-again"), ("deeper", "deeper"), ("qwen2", "qwen2")):
            make(kind, found[name])
        make("llama", found["shorter"])
        edit_config(found["shorter"], max_position_embeddings=64)
        make("llama", found["broken"])
        file = found["broken"] / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-4000])
    return found


@pytest.fixture
def executor(folders: dict[str, Path]) -> TorchExecutor:
    return TorchExecutor(folders["old"], num_pages=PAGES, page_size=PAGE, max_model_len=96, max_running=4)


def tokens(executor: TorchExecutor) -> list[int]:
    return generate(executor, PROMPT, 8, num_pages=PAGES, page_size=PAGE)


class Calls:
    """Control calls, each in a plan of its own."""

    def __init__(self, executor: TorchExecutor) -> None:
        self.executor = executor
        self.stream = PlanStream()
        executor.reset()

    def __call__(self, verb: str, **args: Any) -> tuple[Any, str | None]:
        result = self.executor.execute(self.stream.plan(ops=(Control(op=7, verb=verb, args=args),)))
        assert result.error is None
        ((op, info, error),) = result.controls
        assert op == 7
        return info, error


def ask(stream: PlanStream, executor: TorchExecutor) -> Result:
    row = joined(0, PROMPT, [0, 1, 2])
    return executor.execute(stream.plan(joined=[row], chunks=[(0, 9, True)], chunk_tokens=[PROMPT]))


@pytest.mark.parametrize("tags", [["weights"], ["kv"], ["weights", "kv"]])
def test_sleep_frees_the_memory_and_wake_brings_the_same_tokens(executor: TorchExecutor, tags: list[str]) -> None:
    expected = tokens(executor)
    call = Calls(executor)
    tensors = {"weights": executor.model.embedding, "kv": executor.memory.keys[0]}
    alive = {tag: weakref.ref(tensor) for tag, tensor in tensors.items()}
    layer = weakref.ref(executor.model.layers[0].attention_norm)
    bytes_of = {"weights": executor.model.nbytes, "kv": executor.memory.nbytes}
    del tensors
    info, error = call("sleep", tags=tags)
    assert error is None and info == {"freed_bytes": sum(bytes_of[tag] for tag in tags)}
    assert {tag for tag, tensor in alive.items() if tensor() is None} == set(tags)
    assert (layer() is None) == ("weights" in tags)
    assert call("sleep", tags=tags) == ({"freed_bytes": 0}, None)
    assert call("wake", tags=tags) == ({"asleep": []}, None)
    assert int(ask(call.stream, executor).tokens[0]) == expected[0]
    assert tokens(executor) == expected


def test_kv_comes_back_empty(executor: TorchExecutor) -> None:
    call = Calls(executor)
    assert ask(call.stream, executor).error is None
    assert any(bool(keys.any()) for keys in executor.memory.keys)
    executor.execute(call.stream.plan(ended=[0]))
    call("sleep", tags=["kv"])
    call("wake", tags=["kv"])
    assert not any(bool(keys.any()) for keys in (*executor.memory.keys, *executor.memory.values))


@pytest.mark.parametrize(("tags", "words"), [(["weights"], "weights are asleep"), (["kv"], "KV memory is asleep")])
def test_rows_while_something_sleeps_are_a_plans_fault(executor: TorchExecutor, tags: list[str], words: str) -> None:
    call = Calls(executor)
    call("sleep", tags=tags)
    result = ask(call.stream, executor)
    assert result.error is not None and result.error["retry"] is False and words in result.error["text"]


def test_a_reset_wakes_what_sleeps(executor: TorchExecutor) -> None:
    expected = tokens(executor)
    Calls(executor)("sleep", tags=["weights", "kv"])
    assert executor.resident.asleep == ("weights", "kv")
    executor.reset()
    assert executor.resident.asleep == ()
    assert tokens(executor) == expected


def test_a_wake_that_fails_says_why_and_may_be_tried_again(
    executor: TorchExecutor, folders: dict[str, Path], tmp_path: Path
) -> None:
    expected = tokens(executor)
    call = Calls(executor)
    call("sleep", tags=["weights"])
    away = tmp_path / "away"
    folders["old"].rename(away)
    try:
        info, error = call("wake", tags=["weights"])
        assert info is None and error is not None and "there is no model at" in error
    finally:
        away.rename(folders["old"])
    assert call("wake", tags=["weights"])[1] is None
    assert tokens(executor) == expected


def test_new_weights_answer_as_if_they_had_been_there_from_the_start(
    executor: TorchExecutor, folders: dict[str, Path]
) -> None:
    old = tokens(executor)
    fresh = TorchExecutor(folders["other"], num_pages=PAGES, page_size=PAGE, max_model_len=96)
    new = tokens(fresh)
    call = Calls(executor)
    before = weakref.ref(executor.model.embedding)
    other = str(folders["other"])
    assert call("update_weights", source=other, version="2") == ({"source": other}, None)
    assert before() is None
    assert tokens(executor) == new != old
    call = Calls(executor)
    call("sleep", tags=["weights"])
    call("wake", tags=["weights"])
    assert tokens(executor) == new
    Calls(executor)("update_weights", source=str(folders["old"]), version="3")
    assert tokens(executor) == old


def test_weights_that_sleep_wake_as_the_new_ones(executor: TorchExecutor, folders: dict[str, Path]) -> None:
    new = tokens(TorchExecutor(folders["other"], num_pages=PAGES, page_size=PAGE, max_model_len=96))
    call = Calls(executor)
    call("sleep", tags=["weights"])
    assert call("update_weights", source=str(folders["other"]), version="2")[1] is None
    assert executor.resident.asleep == ("weights",)
    call("wake", tags=["weights"])
    assert tokens(executor) == new


@pytest.mark.parametrize(("source", "words"), [
    ("deeper", "num_layers = 4; this engine's model has 3"),
    ("qwen2", "family = 'qwen2'"),
    ("shorter", "reach 64 positions; rows here reach 96"),
    ("broken", "cannot read"),
    ("nowhere", "there is no model at"),
    ("", "source is '', it must be a path"),
])  # fmt: skip
def test_wrong_weights_are_an_error_and_the_old_ones_stay(
    executor: TorchExecutor, folders: dict[str, Path], source: str, words: str
) -> None:
    expected = tokens(executor)
    path = str(folders.get(source, folders["old"].parent / source)) if source else ""
    info, error = Calls(executor)("update_weights", source=path, version="2")
    assert info is None and error is not None and words in error
    assert tokens(executor) == expected


@pytest.mark.parametrize(("verb", "args", "words"), [
    ("dance", {}, "'dance' is unknown; there are: sleep, wake, update_weights, slow_down"),
    ("sleep", {}, "tags is None"),
    ("sleep", {"tags": ["weights", "heart"]}, "must be some of weights, kv"),
    ("wake", {"tags": []}, "tags is []"),
    ("slow_down", {"seconds": "much"}, "seconds is 'much'"),
    ("slow_down", {"seconds": -1}, "0 to 60"),
    ("stop_profile", {"file": "trace.json"}, "no profile is being taken"),
    ("stop_profile", {}, "file is None"),
    ("update_weights", {"source": 5}, "source is 5"),
])  # fmt: skip
def test_a_wrong_ask_is_its_own_answer_and_fails_no_step(
    executor: TorchExecutor, verb: str, args: dict[str, Any], words: str
) -> None:
    info, error = Calls(executor)(verb, **args)
    assert info is None and error is not None and words in error


def test_a_step_slows_down_until_told_otherwise(executor: TorchExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr("leftfold.executor.controls.time.sleep", waited.append)
    call = Calls(executor)
    assert call("slow_down", seconds=0.5) == ({"seconds": 0.5}, None)
    ask(call.stream, executor)
    call("slow_down", seconds=0)
    executor.execute(call.stream.plan())
    assert waited == [0.5, 0.5]


def test_a_profile_holds_what_ran_in_between(executor: TorchExecutor, tmp_path: Path) -> None:
    call = Calls(executor)
    assert call("start_profile")[1] is None
    assert "already" in str(call("start_profile")[1])
    ask(call.stream, executor)
    file = tmp_path / "profiles" / "trace.json"
    assert call("stop_profile", file=str(file)) == ({"file": str(file)}, None)
    names = {event.get("name") for event in json.loads(file.read_text())["traceEvents"]}
    assert any("aten::" in str(name) for name in names)


def test_a_control_is_carried_out_although_the_rows_beside_it_fail(executor: TorchExecutor) -> None:
    call = Calls(executor)
    executor.fail_next("no")
    ops = (Control(op=1, verb="slow_down", args={"seconds": 0}), Control(op=2, verb="dance", args={}))
    result = executor.execute(call.stream.plan(joined=[joined(0, [1], [0])], ops=ops))
    assert result.error is not None and [done[0] for done in result.controls] == [1, 2]


def test_a_void_step_carries_out_no_control(executor: TorchExecutor) -> None:
    call = Calls(executor)
    executor.fail_next("no")
    executor.execute(call.stream.plan(joined=[joined(0, [1], [0])]))
    late = call.stream.plan(ops=(Control(op=3, verb="sleep", args={"tags": ["weights"]}),))
    result = executor.execute(late)
    assert result.error is not None and result.controls == [(3, None, "an earlier step failed")]
    assert executor.resident.asleep == ()


def test_nothing_of_the_models_files_stays_open(folders: dict[str, Path]) -> None:
    from leftfold.executor.weights import load

    loaded = load(folders["old"])
    read = weakref.ref(loaded.get)
    executor = TorchExecutor(loaded, num_pages=PAGES, page_size=PAGE, max_model_len=96)
    del loaded
    gc.collect()
    assert read() is None
    assert Driver(executor, PAGES, PAGE).rows == []
