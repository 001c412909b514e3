"""The fuzzer itself: equal seeds, no findings on a sound core, and planted faults found and made small."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from leftfold.events import EventLog
from leftfold.fsm import FinishReason, admitting, commit, controls, ending, pausing, planner, reducer, validity
from leftfold.fsm.pages import PagePool
from leftfold.fsm.prefix import namespace
from leftfold.replay import fuzz as command
from leftfold.replay.fuzzing import (
    PROFILES,
    Run,
    Tally,
    core,
    crew,
    execute,
    fuzz,
    fuzz_together,
    shrink,
    source_of,
    write_log,
    write_test,
)  # fmt: skip
from leftfold.replay.fuzzing.loop import random_run, run_seed
from leftfold.replay.verify import verify

SHARES = {"lite": 0.25, "swarm": 0.35, "faults": 0.35, "perf": 0.05}
"""Of the seconds that a session fuzzes."""


@pytest.mark.parametrize("name", SHARES)
def test_a_fresh_seed_finds_nothing(name: str, fuzz_seed: int, fuzz_seconds: float) -> None:
    end = time.monotonic() + fuzz_seconds * SHARES[name]
    tally = fuzz(fuzz_seed, lambda tally: time.monotonic() < end, PROFILES[name])
    print(f"seed {fuzz_seed}, profile {name}: {tally.runs} runs, {tally.steps} steps")
    again = f"leftfold fuzz --profile {name} --seed {fuzz_seed} --skip {tally.number} --runs 1"
    assert tally.found is None, f"{again} finds: {tally.found}"


def test_equal_seeds_make_equal_runs() -> None:
    first, second = (fuzz(11, lambda tally: tally.runs < 8) for _ in range(2))
    assert (first.runs, first.steps) == (second.runs, second.steps)
    assert first.steps != fuzz(12, lambda tally: tally.runs < 8).steps


BYTES = """
import hashlib, sys
from leftfold.events import encode
from leftfold.replay.fuzzing import PROFILES
from leftfold.replay.fuzzing.loop import random_run, run_seed

for number in range(int(sys.argv[2])):
    run = random_run(run_seed(5, number), False, PROFILES[sys.argv[1]])
    assert run.fault is None, run.fault
    print(run.commands, hashlib.sha256(b"".join(map(encode, run.log))).hexdigest())
"""


@pytest.mark.parametrize("name", PROFILES)
def test_equal_seeds_make_equal_logs_byte_by_byte(name: str) -> None:
    """In other processes, too, whatever the order of their hashes."""
    said = [
        subprocess.run(
            [sys.executable, "-c", BYTES, name, "12"], env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "4711")
    ]  # fmt: skip
    assert len(said[0].splitlines()) == 12
    assert said[0] == said[1]


def test_a_run_can_be_made_without_those_before_it() -> None:
    runs = [random_run(run_seed(6, number), False).commands for number in range(3)]
    last = fuzz(6, lambda tally: tally.runs < 1, skip=2)
    assert last.steps == execute_steps(6, 2)
    assert runs[0] != runs[1] != runs[2]


@pytest.mark.parametrize("jobs", [2, 3])
def test_processes_share_the_runs_of_one_seed(jobs: int) -> None:
    alone = fuzz(11, lambda tally: tally.runs < 8)
    shared = fuzz_together(jobs, 11, lambda tally: tally.runs < 8)
    assert (shared.runs, shared.steps, shared.found) == (alone.runs, alone.steps, None)


def test_what_is_found_does_not_depend_on_how_many_look(monkeypatch: pytest.MonkeyPatch) -> None:
    _stop_ids_are_forgotten(monkeypatch)
    alone = fuzz(3, lambda tally: tally.runs < 600)
    assert alone.found is not None
    for jobs in (2, 5):
        shared = fuzz_together(jobs, 3, lambda tally: tally.runs < 600)
        assert shared.found is not None
        assert (shared.number, shared.found.commands) == (alone.number, alone.found.commands)


def test_a_process_that_dies_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(reducer, "decide", lambda state, t: os._exit(7))
    assert _run_command("--runs", "600", "--seed", "1", "--jobs", "2") == 1
    assert "one of the processes died with exit code 7" in capsys.readouterr().err


def test_what_a_process_found_and_the_run_made_again_does_not_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _stop_ids_are_forgotten(monkeypatch)
    monkeypatch.setattr(crew, "made_again", lambda seed, number, profile: Run({}, []))
    assert _run_command("--runs", "600", "--seed", "3", "--jobs", "2") == 1
    assert "of seed 3 found something, and nothing when it was made again" in capsys.readouterr().err


def test_where_a_process_cannot_begin_those_that_did_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[ForkProcess] = []
    start = ForkProcess.start

    def one_of_two(self: ForkProcess) -> None:
        if begun:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        begun.append(self)
        start(self)

    monkeypatch.setattr(ForkProcess, "start", one_of_two)
    with pytest.raises(OSError, match="Resource temporarily unavailable"):
        fuzz_together(2, 11, lambda tally: True)
    (process,) = begun
    assert not process.is_alive()


def test_a_run_that_is_seldom_looked_at_is_the_same_run() -> None:
    looks: list[bool] = []
    runs = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        counting = SimpleNamespace(check=lambda state, thorough: looks.append(thorough))
        monkeypatch.setattr(core, "Checker", lambda: counting)
        for checks in (1, 16):
            looks.clear()
            runs.append(random_run(run_seed(6, 1), False, replace(PROFILES["lite"], checks=checks)))
            assert runs[-1].fault is None and len(looks) == runs[-1].events // checks > 0
    assert runs[0].commands == runs[1].commands and runs[0].events == runs[1].events


def execute_steps(seed: int, number: int) -> int:
    return random_run(run_seed(seed, number), False).steps


def _release_keeps_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    release = PagePool.release
    monkeypatch.setattr(PagePool, "release", lambda self, pages: release(self, pages[1:]))


def _release_one_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    release = PagePool.release
    monkeypatch.setattr(PagePool, "release", lambda self, pages: release(self, [*pages, pages[0]]))


def _share_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    share = PagePool.share

    def miscounted(self: PagePool, page: int) -> None:
        share(self, page)
        self.refs[page] = 1

    monkeypatch.setattr(PagePool, "share", miscounted)


def _publish_a_page_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    store = commit._store_chunk

    def hasty(state: Any, chunk: Any) -> None:
        store(state, chunk)
        seat, size = chunk.seat, state.config.page_size
        number, rest = divmod(chunk.start + chunk.length, size)
        if rest and seat.request.publishes:
            state.pool.publish([(seat.pages[number], b"early" + bytes([seat.pages[number]]))])

    monkeypatch.setattr(commit, "_store_chunk", hasty)


def _tokens_are_mirrored_one_off(monkeypatch: pytest.MonkeyPatch) -> None:
    store = PagePool.store

    def shifted(self: PagePool, pages: Sequence[int], start: int, tokens: Any) -> None:
        store(self, pages, start, tokens[::-1].copy())

    monkeypatch.setattr(PagePool, "store", shifted)


def _minimum_is_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(request: Any, token: int, at: int) -> FinishReason | None:
        generated = at + 1 - request.prompt_len
        if token in request.stops and generated > request.params.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if at + 1 >= request.limit else None

    monkeypatch.setattr(commit, "_reason", late)


def _stop_ids_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        commit, "_reason", lambda request, token, at: FinishReason.LENGTH if at + 1 >= request.limit else None
    )


def _pages_in_flight_are_given_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "_mark_in_flight", lambda state, seat: False)


def _pauses_are_answered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pausing, "_drained", lambda state: True)


def _a_drain_lets_everybody_join(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (admitting, validity):
        monkeypatch.setattr(module, "may_join", lambda state, request: True)


def _operations_do_not_wait_for_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    operation = controls.operation

    def hasty(state: Any) -> Any:
        kept, state.in_flight = state.in_flight, type(state.in_flight)()
        try:
            return operation(state)
        finally:
            state.in_flight = kept

    for module in (planner, validity):
        monkeypatch.setattr(module, "operation", hasty)


def _a_flush_keeps_the_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controls, "namespace", lambda generation, **others: namespace(generation=0, **others))


def _a_flush_leaves_pages_findable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagePool, "forget", lambda self: None)


def _choices_end_together(monkeypatch: pytest.MonkeyPatch) -> None:
    choices = reducer.choices
    monkeypatch.setattr(reducer, "choices", lambda state, rid, epoch: choices(state, rid, epoch)[:1])


PLANTS = [
    _pauses_are_answered_at_once, _a_drain_lets_everybody_join, _operations_do_not_wait_for_steps,
    _a_flush_keeps_the_generation, _a_flush_leaves_pages_findable, _choices_end_together,
    _release_keeps_the_first, _release_one_too_many, _share_does_not_count, _publish_a_page_too_early,
    _tokens_are_mirrored_one_off, _minimum_is_off_by_one, _stop_ids_are_forgotten, _pages_in_flight_are_given_away,
]  # fmt: skip


def _tallies() -> Iterator[Tally]:
    for name in ("lite", "swarm"):
        yield fuzz(3, lambda tally: tally.runs < 600, PROFILES[name])


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__.strip("_"))
def test_a_planted_fault_is_found_and_made_small(plant: Callable[[pytest.MonkeyPatch], None], tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        plant(monkeypatch)
        tally = next(filter(lambda tally: tally.found, _tallies()), Tally(3))
        assert tally.found is not None, "600 runs of each kind found nothing"
        small = shrink(tally.found, lambda tries: tries < 2000)
        assert small.kind == tally.found.kind
        assert small.events <= 40 and len(small.commands) <= 6, small
        path = write_test(small, source_of(small, "leftfold fuzz --seed 3"), tmp_path)
        namespace = _load(path)
        with pytest.raises(type(small.fault)):
            namespace()
        log = write_log(small, tmp_path / "logs")
    namespace()  # without the plant, the written test passes
    verdict = verify(EventLog.read(log))
    assert verdict.damage is None and verdict.events == small.events + 1


def _load(path: Path) -> Callable[[], None]:
    names: dict[str, Any] = {}
    exec(compile(path.read_text(), path, "exec"), names)
    (test,) = [value for name, value in names.items() if name.startswith("test_")]
    return test  # type: ignore[no-any-return]


def test_shrinking_keeps_the_kind_and_drops_what_plays_no_part() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        _stop_ids_are_forgotten(monkeypatch)
        config = {"num_pages": 20, "page_size": 4, "max_running": 3, "max_batch_tokens": 16, "max_model_len": 60}
        noise = [("admit", {"rid": "n", "prompt": [1, 2], "max_tokens": 5}), ("steps", {"count": 9})]
        stop = execute(config, [("admit", {"rid": "a", "prompt": [3, 4, 5]}), ("steps", {"count": 1})])
        assert stop.fault is None
        found = execute(config, [*noise, *_stopped_at_once(config), *noise, ("finish", {})])
        assert found.kind == "finish-reason"
        small = shrink(found, lambda tries: tries < 1000)
    assert small.commands[0][0] == "admit" and len(small.commands) == 2
    assert small.config["num_pages"] == 1


def test_shrinking_ends_when_its_tries_are_spent() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        _stop_ids_are_forgotten(monkeypatch)
        config = {"num_pages": 20, "page_size": 4, "max_running": 3, "max_batch_tokens": 16, "max_model_len": 60}
        found = execute(config, [*_stopped_at_once(config), ("finish", {})])
        tried: list[int] = []
        small = shrink(found, lambda tries: tried.append(tries) or tries < 2)  # type: ignore[func-returns-value]
    assert tried == [0, 1, 2] and small.kind == found.kind == "finish-reason"
    assert len(small.commands) <= len(found.commands)


def test_what_makes_no_world_is_the_finding() -> None:
    config = {"num_pages": 0, "page_size": 4, "max_running": 3, "max_batch_tokens": 16, "max_model_len": 60}
    run = execute(config, [("steps", {})])
    assert (run.kind, run.steps, run.events) == ("ConfigError", 0, 0) and "num_pages 0" in str(run.fault)


def _stopped_at_once(config: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    from leftfold.executor.oracle import expected_tokens

    (token,) = expected_tokens([1], 1, 50)
    return [("admit", {"rid": "a", "prompt": [1], "max_tokens": 4, "stop": [token]}), ("steps", {"count": 3})]


def test_a_written_test_is_readable() -> None:
    commands = [
        ("admit", {"rid": "a", "prompt": [1] * 80, "max_tokens": 2}), ("steps", {"count": 2}),
        ("start", {"kept": ["device", 'a "word"']}),
    ]  # fmt: skip
    text = source_of(
        Run({"num_pages": 2, "policy": "fcfs", "vocab_size": None}, commands, 0, 0, ValueError("x")), "again"
    )
    assert 'world = World(num_pages=2, policy="fcfs")' in text
    assert "world.steps(count=2)" in text
    assert r'world.start(kept=["device", "a \"word\""])' in text
    assert max(map(len, text.splitlines())) <= 120
    compile(text, "found", "exec")


def _run_command(*arguments: str) -> int:
    parser = ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(arguments))


def test_command_prints_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run_command("--runs", "3", "--seed", "4", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said.keys() == {"seed", "profile", "commit", "runs", "steps", "steps_per_second", "findings"}
    assert (said["seed"], said["profile"], said["runs"], said["findings"]) == (4, "lite", 3, [])


def test_command_fuzzes_for_its_default_time_where_nothing_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "DEFAULT_SECONDS", 0.05)
    assert _run_command("--seed", "4", "--json") == 0
    assert json.loads(capsys.readouterr().out)["runs"] >= 1


def test_where_there_is_no_git_the_commit_is_not_known(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command.commit_of(Path(__file__)) is None
    assert _run_command("--runs", "1", "--seed", "4") == 0
    assert capsys.readouterr().out.startswith("seed 4, profile lite, commit unknown")


@pytest.mark.parametrize(("option", "value", "said"), [
    ("--runs", "-1", "'-1' is not a whole number of at least 0"), ("--seed", "x", "'x' is not a whole number"),
    ("--seconds", "soon", "'soon' is not a positive number of seconds"), ("--seconds", "0", "'0' is not a positive"),
    ("--seconds", "nan", "'nan' is not a positive"),
])  # fmt: skip
def test_what_is_no_number_is_told(option: str, value: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        _run_command(f"{option}={value}")
    assert stop.value.code == 2 and said in capsys.readouterr().err


def test_mutants_take_no_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run_command("--mutants", "--jobs", "2") == 2
    assert "--jobs" in capsys.readouterr().err


def test_command_reports_a_finding(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _release_keeps_the_first(monkeypatch)
    folders = ["--out", str(tmp_path / "found"), "--log-dir", str(tmp_path / "logs")]
    assert _run_command("--seconds", "30", "--seed", "1", "--json", *folders) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["kind"] == "InvariantViolation"
    assert Path(finding["test"]).parent == tmp_path / "found"
    assert "def test_invariant_violation" in Path(finding["test"]).read_text()
    assert finding["events"] <= 16
    assert len(finding["list"]) == finding["events"]
    assert verify(EventLog.read(finding["log"])).events == finding["events"] + 1
    again = finding["again"].split()[2:]
    assert _run_command(*again, *folders) == 1
    said = capsys.readouterr().out
    assert finding["again"] in said and all(line in said for line in finding["list"])
