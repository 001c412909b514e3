"""Engines whose process dies of a request: the log remembers for them, and the request is found out."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from leftfold.engine import Engine
from leftfold.events import Event, EventLog, ExecutorLost, ForwardDone, Tick
from leftfold.fsm import FinishReason
from leftfold.keeping import KeptLog
from leftfold.replay.verify import verify
from leftfold.server import deaths
from tests.engines import CONFIG, Listener, Spied, admit, alone

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
WHY = "the engine process ended with code -11"
PROMPTS = {"a": [1, 2, 3], "b": [4, 5, 6, 7, 8], "c": [9] * 6}


class Life:
    """One engine process after the other on one log; a step that computes position `at` of `rid` kills it.

    A process that dies takes no snapshot, and here none is taken at its stop.
    """

    def __init__(self, folder: Path, at: dict[str, int], depth: int = 0) -> None:
        self.log, self._at, self._depth = folder / "log", at, depth
        self.listener = Listener(count=len(PROMPTS))
        self.rows: list[list[str]] = []
        """Those of the steps that killed."""

    def run(self, died: str, first: bool = False) -> bool:
        """Whether it died."""
        made = Engine(
            log=KeptLog(EventLog.open(self.log), self.log, snapshot_every=0),
            executor=Spied(before=self._before), config=replace(CONFIG, pipeline_depth=self._depth), model="oracle",
            on_effects=self.listener, backoff=0.0,
        )  # fmt: skip
        made.died = died
        self.listener.engine, self._made = made, made
        deaths_before = len(self.rows)
        made.start()
        if first:
            for rid, prompt in PROMPTS.items():
                admit(made, rid, prompt)
        made.run()
        return len(self.rows) > deaths_before

    def _before(self, plan: Any) -> None:
        if any(row.start < self._at.get(row.rid, 0) <= row.start + row.length for row in plan.rows):
            self.rows.append([row.rid for row in plan.rows])
            self._made.stop()
            raise SystemExit  # ends the executor's thread without a word, as the end of the process would

    def until_over(self, why: str = WHY, most: int = 9) -> int:
        """How often it died."""
        died, count = self.run("", first=True), 0
        while died:
            count += 1
            assert count < most, self.rows
            died = self.run(why)
        return count

    def ends(self) -> dict[str, Any]:
        return {rid: self.listener.end(rid) for rid in PROMPTS}

    def events(self, kind: type[Event]) -> list[Any]:
        return [record.event for record in EventLog.read(self.log) if isinstance(record.event, kind)]


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("at", [3, 7], ids=["prompt", "answer"])
def test_a_request_that_kills_the_process_ends_after_the_third_time(tmp_path: Path, depth: int, at: int) -> None:
    life = Life(tmp_path, {"b": at}, depth)
    assert life.until_over() == 3
    assert life.rows[-1] == ["b"], "the third time it was alone"
    ends = life.ends()
    assert ends["b"].finish_reason is FinishReason.ERROR and ends["b"].error["text"] == WHY
    for rid in ("a", "c"):
        assert ends[rid].finish_reason is FinishReason.LENGTH
        assert life.listener.tokens(rid)[-6:] == alone(PROMPTS[rid])[-6:]
    assert [event.error for event in life.events(ExecutorLost)] == [WHY] * 3
    apart, last = [event.error for event in life.events(ForwardDone) if event.error is not None]
    assert (apart["apart"], apart["retry"], last["retry"]) == (True, True, False)
    assert verify(EventLog.read(life.log)).divergence is None


def test_two_that_kill_are_found_out_one_after_the_other(tmp_path: Path) -> None:
    life = Life(tmp_path, {"a": 4, "b": 6})
    assert life.until_over() <= 5, "the restarts that a server has"
    ends = life.ends()
    assert {rid for rid, end in ends.items() if end.finish_reason is FinishReason.ERROR} == {"a", "b"}
    assert life.listener.tokens("c")[-6:] == alone(PROMPTS["c"])


def test_a_process_that_was_killed_from_outside_blames_nobody(tmp_path: Path) -> None:
    life = Life(tmp_path, {"b": 7})
    with pytest.raises(AssertionError, match=r"\['a', 'b'"):
        life.until_over(why="", most=7)
    assert life.events(ExecutorLost) == []


def test_whoever_gets_past_the_place_is_forgiven(tmp_path: Path) -> None:
    life = Life(tmp_path, {"b": 7})
    assert life.run("", first=True) and life.run(WHY)
    life._at.clear()  # it was the machine
    assert not life.run(WHY)
    assert {end.finish_reason for end in life.ends().values()} == {FinishReason.LENGTH}
    made = Engine(log=EventLog.open(life.log), executor=Spied(), config=CONFIG, model="oracle")
    made.start()
    assert not made._results.losses
    made.close()


def test_after_a_death_no_step_begins_that_is_not_in_the_log(tmp_path: Path) -> None:
    """The log's thread is slow: without waiting for it the next death would leave no trace."""
    seen: list[tuple[int, int]] = []

    def look(plan: Any) -> None:
        ticks = [event.plan.step for event in life.events(Tick) if event.plan.step is not None]
        seen.append((plan.step, max(ticks, default=0)))

    life = Life(tmp_path, {"b": 7})
    assert life.run("", first=True)
    life._before = look  # type: ignore[method-assign]
    assert not life.run(WHY)
    assert seen and all(step == logged for step, logged in seen)


@pytest.mark.parametrize(("code", "own"), [
    (None, False), (0, False), (1, False), (2, False), (3, True), (-signal.SIGSEGV, True), (-signal.SIGABRT, True),
    (-signal.SIGBUS, True), (-signal.SIGKILL, False), (-signal.SIGTERM, False), (-signal.SIGINT, False),
])  # fmt: skip
def test_whose_doing_a_death_is(code: int | None, own: bool) -> None:
    assert deaths.own_doing(code, deaths.oom_kills()) == own


def test_what_the_machine_kills_for_memory_is_its_own_doing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deaths, "_VMSTAT", tmp_path / "vmstat")
    assert deaths.oom_kills() == 0
    (tmp_path / "vmstat").write_text("pgfault 7\noom_kill 4\n")
    assert deaths.own_doing(-signal.SIGKILL, killed_before=3)
    assert not deaths.own_doing(-signal.SIGKILL, killed_before=4)
