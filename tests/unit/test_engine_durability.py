"""Engines whose log is slow, full, read-only or gone: what is told, what is refused, what is in the log afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from leftfold.engine import Engine
from leftfold.events import Abort, Admit, EventLog, ForwardDone, Pause, Started
from leftfold.events.stores import MemoryStore
from leftfold.events.writer import Bounds
from leftfold.keeping import KeptLog
from leftfold.recall import Recall
from leftfold.replay.verify import verify
from tests.disks import Disk
from tests.engines import Listener, Spied, admit, alone, engine


def writer(disk: MemoryStore, strict: bool = True, **options: Any) -> KeptLog:
    return KeptLog(EventLog(store=disk), **{"strict": strict, "seconds": 0.0, "retry": 0.001, **options})


class Heard(Listener):
    """Keeps what it hears until somebody wants to see it; `until(what)` waits for that."""

    def __init__(self, count: int = 99) -> None:
        super().__init__(count)
        self._news = threading.Condition()

    def __call__(self, effects: Any) -> None:
        with self._news:
            super().__call__(effects)
            self._news.notify_all()

    def wait(self, what: Callable[[], Any]) -> None:
        with self._news:
            assert self._news.wait_for(what, 20)

    def ends(self, rid: str) -> list[Any]:
        return [output for output in self.outputs if output.rid == rid and output.finish_reason is not None]


class Running:
    """An engine that runs in a thread of its own until the block is left."""

    def __init__(self, heard: Heard, disk: MemoryStore, strict: bool = True, **options: Any) -> None:
        self.log = writer(disk, strict, **options.pop("bounds", {}))
        self.engine = engine(heard, log=self.log, **options)
        self._thread = threading.Thread(target=self.engine.run)

    def __enter__(self) -> Engine:
        self._thread.start()
        return self.engine

    def __exit__(self, *_: Any) -> None:
        self.engine.stop()
        self._thread.join(20)
        assert not self._thread.is_alive()


def idle(made: Engine) -> Callable[[], bool]:
    """Whether everything is computed, told or not."""
    return lambda: made.stats()["live"] == 0


def until(what: Callable[[], Any]) -> None:
    for _ in range(20_000):
        if what():
            return
        threading.Event().wait(0.001)
    raise AssertionError("it never happened")


@pytest.mark.parametrize("strict", [True, False])
def test_an_engine_with_a_thread_for_its_log_gives_the_same_answers(strict: bool) -> None:
    heard, disk = Listener(count=2), Disk()
    made = engine(heard, log=writer(disk, strict))
    admit(made, "a", max_tokens=9)
    admit(made, "b", (9, 8, 7), max_tokens=4)
    made.run()
    assert heard.tokens("a") == alone(max_tokens=9) and heard.tokens("b") == alone((9, 8, 7), max_tokens=4)
    assert verify(EventLog(store=disk.after_crash())).clean


def test_the_engine_computes_on_while_a_strict_log_holds_its_answers_back() -> None:
    held = threading.Event()
    heard, disk = Heard(), Disk()
    with Running(heard, disk) as made:
        until(lambda: made.stats()["log_durable_seq"] == 1)
        disk.before_sync = lambda: held.wait(20) and None
        admit(made, "a", max_tokens=20)
        made.submit(Pause, call="p", mode="wait")
        until(lambda: made.stats()["gate"] == "paused")
        assert idle(made)() and heard.outputs == heard.acks == []
        held.set()
        heard.wait(lambda: heard.acks)
        assert heard.tokens("a") == alone(max_tokens=20) and heard.end("a").finish_reason == "length"


def test_without_strictness_only_writing_is_waited_for() -> None:
    held = threading.Event()
    heard, disk = Heard(), Disk()
    with Running(heard, disk, strict=False, bounds={"seconds": 3600}) as made:
        admit(made, "a", max_tokens=5)
        heard.wait(lambda: heard.ends("a"))
        assert [event for _, event in EventLog(store=MemoryLike(disk))][-1].step == 5  # type: ignore[attr-defined]
        held.set()


def MemoryLike(disk: Disk) -> MemoryStore:
    """What the operating system holds now."""
    copy = MemoryStore()
    copy.data = {name: bytearray(data) for name, data in disk.data.items()}
    return copy


def test_a_slow_disk_slows_admission_and_keeps_the_order() -> None:
    held = threading.Event()
    heard, disk = Heard(), Disk()
    with Running(heard, disk, bounds={"behind": Bounds(6, 1 << 20)}) as made:
        until(lambda: made.stats()["log_durable_seq"] == 1)
        disk.before_sync = lambda: held.wait(20) and None
        admit(made, "a", max_tokens=8)
        until(lambda: made.stats()["finished_length"] == 1)
        for rid in "bcd":
            admit(made, rid, max_tokens=2)
        made.submit(Abort, rid="c", reason="gone")
        until(lambda: made._inbox.empty())
        assert made.stats()["live"] == 0, "nobody is admitted while the disk is behind"
        held.set()
        heard.wait(lambda: all(heard.ends(rid) for rid in "abcd"))
    assert heard.tokens("b") == heard.tokens("d") == alone(max_tokens=2)
    assert heard.end("c").finish_reason == "abort", "the abort of what waited came after it"
    order = [event.rid for _, event in EventLog(store=disk) if isinstance(event, Admit | Abort)]
    assert order == ["a", "b", "c", "d", "c"]


def test_what_is_asked_about_a_request_that_waits_for_the_disk_is_answered_once_it_is_in_the_log() -> None:
    held = threading.Event()
    heard, disk = Heard(), Disk()
    with Running(heard, disk, bounds={"behind": Bounds(3, 1 << 20)}) as made:
        until(lambda: made.stats()["log_durable_seq"] == 1)
        disk.before_sync = lambda: held.wait(20) and None
        admit(made, "a", max_tokens=4)
        until(lambda: made.stats()["finished_length"] == 1)
        admit(made, "b", max_tokens=30)
        made.recall(Recall("where", [(("b", 0, 0), 3)]))
        until(lambda: made._inbox.empty())
        held.set()
        heard.wait(lambda: heard.acks)
        assert heard.acks[0].info == {"unknown": [], "calls": []}
        assert "b" in [event.rid for _, event in EventLog(store=disk.after_crash()) if isinstance(event, Admit)]


def test_with_too_much_unwritten_nothing_more_is_planned() -> None:
    held = threading.Event()
    heard, disk = Heard(), Disk()
    with Running(heard, disk, bounds={"full": Bounds(10, 1 << 20)}) as made:
        until(lambda: made.stats()["log_durable_seq"] == 1)
        disk.before_sync = lambda: held.wait(20) and None
        admit(made, "a", max_tokens=30)
        until(lambda: made.log.full)
        until(lambda: made.stats()["in_flight"] == 0)
        assert made.stats()["log_seq"] <= 1 + 10 + 2 and made.stats()["live"] == 1
        held.set()
        heard.wait(lambda: heard.ends("a"))
        assert heard.tokens("a") == alone(max_tokens=30)


def test_what_waits_for_the_disk_is_told_at_a_stop() -> None:
    heard, disk = Listener(count=99), Disk()
    made = engine(heard, log=writer(disk))
    slow = threading.Event()
    disk.before_sync = lambda: slow.wait(20) and None
    admit(made, "a", max_tokens=2)
    executor = made._executor
    assert isinstance(executor, Spied)
    executor.before = lambda plan: made.stop() if plan.step == 2 else None
    threading.Timer(0.05, slow.set).start()
    made.run()
    assert heard.tokens("a") == alone(max_tokens=2)[: len(heard.tokens("a"))] and len(heard.tokens("a")) >= 1
    done = [event for _, event in EventLog(store=disk.after_crash()) if isinstance(event, ForwardDone)]
    assert len(done) == len(heard.tokens("a")), "everything in the log is told"


# A disk that takes nothing


@pytest.mark.parametrize("strict", [True, False])
def test_while_the_disk_is_full_nothing_is_admitted_and_what_runs_loses_nothing(strict: bool) -> None:
    heard, disk = Heard(), Disk()
    go_on = threading.Event()

    def full(plan: Any) -> None:
        if plan.step == 3:
            until(lambda: len(heard.tokens("a")) == 2)
            disk.room = 50
            go_on.wait(20)

    with Running(heard, disk, strict, executor=Spied(before=full)) as made:
        admit(made, "a", max_tokens=8)
        until(lambda: disk.room is not None)
        go_on.set()
        until(idle(made))
        until(lambda: made.stats()["log_failure"])
        admit(made, "b")
        made.submit(Pause, call="p", mode="keep")
        heard.wait(lambda: heard.ends("b") and heard.acks)
        error = heard.end("b").error
        assert error is not None and error["code"] == "closing" and "No space left on device" in error["text"]
        assert not heard.acks[0].ok and "No space left" in heard.acks[0].info and "No space left" in made.refusing
        if strict:
            assert len(heard.tokens("a")) == 2 and not heard.ends("a"), "what is not on disk is not told"
        else:
            heard.wait(lambda: heard.ends("a"))
        disk.room = None
        heard.wait(lambda: heard.ends("a"))
        until(lambda: not made.refusing)
        assert heard.tokens("a") == alone(max_tokens=8)
        admit(made, "c", max_tokens=3)
        heard.wait(lambda: heard.ends("c"))
    log = EventLog(store=disk.after_crash())
    assert [event.rid for _, event in log if isinstance(event, Admit)] == ["a", "c"]
    assert verify(log).clean and heard.tokens("c") == alone(max_tokens=3)


def failing_sync(heard: Heard, disk: Disk, strict: bool, **options: Any) -> Running:
    """An engine whose syncs fail from the third step on."""

    def fail(plan: Any) -> None:
        if plan.step == 3:
            until(lambda: len(heard.tokens("a")) == 2)
            disk.unsynced = True

    return Running(heard, disk, strict, executor=Spied(before=fail), **options)


def test_a_strict_log_whose_sync_failed_tells_nothing_more_as_if_it_were_kept() -> None:
    heard, disk = Heard(), Disk()
    with failing_sync(heard, disk, strict=True) as made:
        admit(made, "a", max_tokens=8)
        heard.wait(lambda: heard.ends("a"))
        disk.unsynced = False
        end = heard.end("a")
        assert end.finish_reason == "error" and end.error is not None and "Input/output error" in end.error["text"]
        assert heard.tokens("a") == alone(max_tokens=8)[:2]
        admit(made, "b")
        heard.wait(lambda: heard.ends("b"))
        assert heard.end("b").error["code"] == "failed"
        assert made.stats()["log_durable_seq"] in (6, 7) and "Input/output" in made.stats()["log_failure"]
    again = Listener()
    made = engine(again, log=writer(disk.after_crash()))
    made.run()
    assert heard.tokens("a") + again.tokens("a") == alone(max_tokens=8), "the next start goes on from what is on disk"


def test_a_log_that_ends_lets_what_runs_finish_and_admits_nothing() -> None:
    heard, disk = Heard(), Disk()
    with failing_sync(heard, disk, strict=False) as made:
        admit(made, "a", max_tokens=8)
        heard.wait(lambda: heard.ends("a"))
        until(lambda: made.refusing)
        assert heard.tokens("a") == alone(max_tokens=8) and heard.end("a").finish_reason == "length"
        admit(made, "b")
        heard.wait(lambda: heard.ends("b"))
        assert heard.end("b").error["code"] == "closing"


@pytest.mark.parametrize("strict", [True, False])
def test_told_to_serve_an_engine_goes_on_without_its_log_and_leaves_word(strict: bool) -> None:
    heard, disk = Heard(), Disk()
    noted: list[Any] = []
    with failing_sync(heard, disk, strict, on_log_failure="serve", bounds={"note": noted.append}) as made:
        admit(made, "a", max_tokens=8)
        heard.wait(lambda: heard.ends("a"))
        until(lambda: made.stats()["log_failure"])
        admit(made, "b", max_tokens=3)
        heard.wait(lambda: heard.ends("b"))
        assert heard.tokens("a") == alone(max_tokens=8) and heard.tokens("b") == alone(max_tokens=3)
        assert not made.refusing and made.stats()["log_failures"] == 1
    assert [gap.seq for gap in noted] == [made.stats()["log_durable_seq"]]
    left = [event for _, event in EventLog(store=disk.after_crash())]
    assert isinstance(left[0], Started) and "b" not in [event.rid for event in left if isinstance(event, Admit)]


def test_told_to_serve_a_full_disk_is_given_up_when_too_much_waits() -> None:
    heard, disk = Heard(), Disk()
    bounds = {"full": Bounds(12, 1 << 20)}
    with Running(heard, disk, strict=False, on_log_failure="serve", bounds=bounds) as made:
        until(lambda: made.stats()["log_durable_seq"] == 1)
        disk.room = 0
        admit(made, "a", max_tokens=25)
        heard.wait(lambda: heard.ends("a"))
        assert heard.tokens("a") == alone(max_tokens=25)
        assert made.log.failure is not None and made.log.failure.lasting
    assert len(EventLog(store=disk.after_crash())) == 1


def test_while_the_log_fails_nobody_waits_for_a_disk_that_is_behind() -> None:
    heard, disk = Heard(), Disk()
    with Running(heard, disk, bounds={"behind": Bounds(3, 1 << 20)}) as made:
        until(lambda: made.stats()["log_durable_seq"] == 1)
        disk.room = 0
        admit(made, "a", max_tokens=4)
        until(lambda: made.stats()["log_failure"] and made.log.behind)
        admit(made, "b")
        made.submit(Pause, call="p", mode="keep")
        heard.wait(lambda: heard.ends("b") and heard.acks)
        assert heard.end("b").error["code"] == "closing" and not heard.acks[0].ok
        disk.room = None
        heard.wait(lambda: heard.ends("a"))
        assert heard.tokens("a") == alone(max_tokens=4)


def test_told_to_serve_an_engine_admits_although_its_failing_log_is_behind() -> None:
    heard, disk = Heard(), Disk()
    with Running(heard, disk, strict=False, on_log_failure="serve", bounds={"behind": Bounds(3, 1 << 20)}) as made:
        until(lambda: made.stats()["log_durable_seq"] == 1)
        disk.room = 0
        admit(made, "a", max_tokens=4)
        heard.wait(lambda: heard.ends("a"))
        assert made.log.behind
        admit(made, "b", max_tokens=3)
        heard.wait(lambda: heard.ends("b"))
        assert heard.tokens("b") == alone(max_tokens=3)
        disk.room = None
        until(lambda: not made.log.behind)
    assert verify(EventLog(store=disk.after_crash())).clean, "the disk had room again: nothing is missing"


def test_everybody_hears_how_the_log_stands_when_that_changes() -> None:
    said: list[str] = []
    disk = Disk()
    heard = Heard()

    class Says(Heard):
        def __call__(self, effects: Any) -> None:
            said.append(made.refusing)
            super().__call__(effects)

    heard = Says()
    running = Running(heard, disk)
    made = running.engine
    with running:
        until(lambda: made.stats()["log_durable_seq"] == 1)
        disk.room = 0
        made.submit(Abort, rid="nobody")
        until(lambda: said and said[-1])
        disk.room = None
        until(lambda: said and not said[-1])
    assert sum(bool(a) != bool(b) for a, b in zip(said, said[1:], strict=False)) <= 2
