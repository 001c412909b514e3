"""With a strict log nothing is told before it is on disk: whenever the machine goes down, the log has what was told."""

from __future__ import annotations

import threading
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leftfold.events import Event, EventLog, Plan, Tick, encode
from leftfold.events.stores import MemoryStore
from leftfold.fsm import Output
from leftfold.keeping import KeptLog
from leftfold.replay.fold import Fold
from leftfold.replay.verify import verify
from tests.disks import Disk
from tests.engines import CONFIG, Listener, admit, alone, engine
from tests.watching import runs, watch

Said = tuple[str, int, Any, Any]
REQUESTS = st.lists(
    st.tuples(st.integers(1, 12), st.integers(1, 10)), min_size=1, max_size=5
)  # lengths of prompt and answer
ANY_DISK = {"depth": st.integers(0, 2), "requests": REQUESTS, "seed": st.integers(0, 2**16)}


def said(output: Output) -> Said:
    return output.rid, output.position, tuple(int(token) for token in output.tokens), output.finish_reason


def outputs_of(store: MemoryStore) -> set[Said]:
    """Everything that a log says was to be told."""
    fold = Fold()
    return {said(output) for record in EventLog(store=store) for output in fold.take(*record).outputs}


class Slow(Disk):
    """Takes its time for each sync, more or less, and fails for good at the `fails_at`-th (0: never)."""

    def __init__(self, seed: int, fails_at: int = 0) -> None:
        super().__init__(before_sync=self._linger)
        self.seed = seed
        self._rng = Random(seed)
        self._syncs = 0
        self._fails_at = fails_at

    def _linger(self) -> None:
        self._syncs += 1
        threading.Event().wait(self._rng.choice((0, 0, 0.0005, 0.002)))
        if self._syncs == self._fails_at:
            self.unsynced = True


class Doubter(Listener):
    """Brings the machine down in thought at each delivery: what was told by then must be in the log that is left."""

    def __init__(self, disk: Slow, count: int) -> None:
        super().__init__(count)
        self._disk = disk
        self._rng = Random(disk.seed)
        self.crashes: list[tuple[list[Output], MemoryStore]] = []
        self.missing: list[Said] = []

    def __call__(self, effects: Any) -> None:
        left = self._disk.after_crash()  # before anything of this is told
        super().__call__(effects)
        told = [output for output in self.outputs if output.finish_reason != "error"]
        if not effects.outputs:
            return
        self.missing += sorted({said(output) for output in told} - outputs_of(left))
        if self._rng.random() < 0.4:
            torn = self._disk.after_crash(torn=self._rng.randrange(300))
            self.crashes.append((told, torn))


def serve(disk: Slow, requests: list[tuple[int, int]], depth: int) -> Doubter:
    heard = Doubter(disk, len(requests))
    log = KeptLog(EventLog(store=disk), strict=True, seconds=0.0, retry=0.001)
    made = engine(heard, log=log, config=replace(CONFIG, pipeline_depth=depth))
    for number, (prompt, count) in enumerate(requests):
        admit(made, f"r{number}", range(prompt), max_tokens=count)
    made.run()
    return heard


@settings(deadline=None, max_examples=25)
@given(**ANY_DISK)
@pytest.mark.filterwarnings("ignore::leftfold.events.TornTail")
def test_whenever_the_machine_goes_down_what_was_told_is_in_the_log_and_the_rest_follows(
    depth: int, requests: list[tuple[int, int]], seed: int
) -> None:
    heard = serve(Slow(seed), requests, depth)
    assert not heard.missing
    for told, left in heard.crashes[:6]:
        _check_going_on(told, left, requests)


def _check_going_on(told: list[Output], left: MemoryStore, requests: list[tuple[int, int]]) -> None:
    """A start on what is left tells what is missing, and the same as without the crash."""
    before = {number: [t for o in told if o.rid == f"r{number}" for t in o.tokens] for number in range(len(requests))}
    log = EventLog(store=left)
    again = Listener(count=10**6)
    made = engine(again, log=log)
    in_log = [output for output in outputs_of(left) if output[3] != "error"]
    live = len(made.state.live)
    again.left = live
    if live:
        made.run()
    for number, (prompt, count) in enumerate(requests):
        rid = f"r{number}"
        kept = {o[1]: o[2] for o in in_log if o[0] == rid}
        logged = [token for at in sorted(kept) for token in kept[at]]
        assert logged[: len(before[number])] == before[number]
        if logged or again.tokens(rid):
            assert logged + again.tokens(rid) == alone(tuple(range(prompt)), max_tokens=count)
    assert verify(log).clean


@settings(deadline=None, max_examples=25)
@given(fails_at=st.integers(1, 30), **ANY_DISK)
def test_when_a_sync_fails_nothing_more_is_told_as_if_it_were_kept(
    depth: int, requests: list[tuple[int, int]], seed: int, fails_at: int
) -> None:
    disk = Slow(seed, fails_at)
    heard = serve(disk, requests, depth)
    assert not heard.missing
    told = {said(output) for output in heard.outputs if output.finish_reason != "error"}
    assert told <= outputs_of(disk.after_crash())
    for number in range(len(requests)):
        assert heard.end(f"r{number}"), "everybody hears an end, an error if there is no other"


# What the log's thread relies on: records and effects can be read later than they were made


def _fresh(event: Event, plan: Plan | None) -> bytes:
    """How the log would write it, nothing remembered of earlier encodings."""
    if isinstance(event, Tick):
        return encode(replace(event, plan=None if plan is None else replace(plan)))
    return encode(event)


def test_events_and_outputs_say_the_same_however_late_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    later: list[tuple[Event, Plan | None, bytes, Any, list[Output]]] = []

    def look(world: Any, event: Event, plan: Plan | None, take: Any) -> Any:
        chosen = plan if plan is not None else getattr(event, "plan", None)
        now = _fresh(event, chosen)
        effects = take()
        later.append((event, chosen, now, effects.outputs, list(effects.outputs)))
        return effects

    watch(monkeypatch, look)
    runs(seed=7, count=25)
    assert len(later) > 1000 and sum(bool(entry[4]) for entry in later) > 300
    for event, plan, now, outputs, heard in later:
        assert _fresh(event, plan) == now and list(outputs) == heard
