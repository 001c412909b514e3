"""A log in memory: any moment of it is what folding from the beginning gives; lives are what states say."""

from __future__ import annotations

from pathlib import Path

import pytest

from leftfold.events import (
    Admit,
    EventLog,
    ForwardDone,
    Pause,
    Resume,
    Retention,
    SamplingParams,
    Tick,
    encode,
    prune,
)
from leftfold.fsm import Phase, State
from leftfold.replay import worlds
from leftfold.replay.fold import fold
from leftfold.replay.snapshots import whole as beginning
from leftfold.replay.timeline import timelines
from leftfold.replay.worlds import KINDS, OutOfRange, Overview, World
from leftfold.replay.worlds import tape as tapes
from leftfold.replay.worlds import world as whole
from tests.logs import Recorder, record
from tests.unit.test_log_snapshots import NOW, log_with_snapshots
from tests.unit.test_replay_views import simulated

KIND = {Phase.WAITING: "waiting", Phase.PREFILLING: "prefill", Phase.DECODING: "decode", Phase.PREEMPTED: "preempted"}


@pytest.fixture(params=["some of everything", "many that wait"])
def log(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> EventLog:
    monkeypatch.setattr(tapes, "BLOCK", 8)
    monkeypatch.setattr(whole, "STRIDE", 4)
    monkeypatch.setattr(whole, "MOST_COPIES", 6)
    if request.param == "many that wait":
        return simulated()
    made = EventLog.memory()
    record(made)
    return made


def test_every_moment_is_what_folding_from_the_beginning_gives(log: EventLog) -> None:
    world = World.read(log)
    assert (world.first, world.last, world.done) == (1, len(log), True)
    records = dict(iter(log))
    for seq in [*range(world.last, 0, -1), *range(1, world.last + 1, 3)]:
        moment = world.moment(seq, reasons=True)
        assert moment.state.digest() == fold(log, seq).state.digest(), seq  # type: ignore[union-attr]
        assert type(moment.event) is type(records[seq]) and moment.event.t == records[seq].t
    for seq in (0, world.last + 1):
        with pytest.raises(OutOfRange, match=f"no record {seq}; there are 1 to"):
            world.moment(seq)


def test_lives_are_what_states_say_at_every_record(log: EventLog) -> None:
    check_lives(World.read(log))


def check_lives(world: World) -> None:
    for seq in range(world.first, world.last + 1):
        state = world.fold_at(seq).state
        assert state is not None
        check_seen(world.overview.until(seq, state), seq, state)


def check_seen(seen: Overview, seq: int, state: State) -> None:
    """An overview that ends with record `seq` says what `state` does."""
    spans = {key: life.spans[-1] for key, life in seen.lives.living.items()}
    kinds = {key: (KINDS[span.kind], span.slot) for key, span in spans.items()}
    slots = {key: -1 if request.seat is None else request.seat.slot for key, request in state.live.items()}
    assert kinds == {key: (KIND.get(one.phase, "other"), slots[key]) for key, one in state.live.items() if one.phase}
    assert seen.lives.slots == {seat.slot: seat.request.key for seat in state.running()}
    figures = seen.figures_at(seq)
    assert figures["waiting"] == len(state.waiting) and figures["held"] == state.pool.held


def test_a_log_whose_beginning_is_gone_begins_with_what_lived_then(tmp_path: Path) -> None:
    log_with_snapshots(tmp_path, every=3)
    assert prune(tmp_path, Retention(size=0), NOW)
    reader = EventLog.read(tmp_path)
    begun, _ = beginning(reader)
    world = World.read(reader)
    assert begun.state is not None and (world.first, world.last) == (begun.seq + 1, reader.next_seq - 1)
    lives = {life.key: life for life in world.overview.lives.all if life.seq == world.first}
    assert lives.keys() == begun.state.live.keys() and begun.state.running()
    for key, request in begun.state.live.items():
        slot = -1 if request.seat is None else request.seat.slot
        assert (lives[key].t, lives[key].prompt, lives[key].spans[0].slot) == (begun.t, request.prompt_len, slot)
    assert world.moment(world.last).state.digest() == world.end.state.digest()  # type: ignore[union-attr]
    check_lives(world)


def test_lives_go_on_through_what_nobody_planned() -> None:
    """A result of another plan, an id that comes again, a plan that only ends, a decision that failed."""
    made = Recorder(EventLog.memory())
    made.take(Admit, rid="a", prompt=[1, 2, 3], params=SamplingParams(max_tokens=9))
    made.run(2)
    made.admit("a", [9, 9])
    step = made.tick().step
    made.take(ForwardDone, step=step, tokens=[5], digest="0" * 32)
    made.flights.clear()
    assert made.state.live["a", 0, 0].phase is Phase.PREEMPTED
    made.take(Pause, mode="keep", call="x")
    made.take(Admit, rid="late", prompt=[1, 2], params=SamplingParams(max_tokens=5), deadline=5)
    assert made.tick() is None
    made.take(Tick)
    made.take(Resume, call="y")
    made.start()
    made.run()
    world = World.read(made.log)
    check_lives(world)
    found = {life.key[0]: life for life in world.overview.lives.all}
    assert len(found) == len(world.overview.lives.all) == 2
    assert (found["a"].prompt, found["a"].reason, found["a"].tokens) == (3, "length", 9)
    kinds = [KINDS[span.kind] for span in found["a"].spans]
    assert kinds == ["waiting", "prefill", "decode", "preempted", "prefill", "decode"]
    assert (found["late"].reason, world.overview.column("tokens")[found["late"].end_seq - 1]) == ("deadline", 0)


def test_a_life_has_the_times_and_counts_of_its_timeline(log: EventLog) -> None:
    world = World.read(log)
    for life in world.overview.lives.all:
        [line] = [one for one in timelines(log, life.key[0]) if one.choice == life.key[2]]
        assert (life.t, life.prompt, life.reason) == (line.arrived, line.prompt_tokens, line.reason or "")
        assert (life.first_t if life.first_t >= 0 else None) == line.first
        assert life.preempted == line.preemptions
        if life.reason in ("stop", "length"):
            assert life.tokens == line.output_tokens and life.end_t == line.ended


def test_what_was_before_goes_on_when_more_is_taken(log: EventLog) -> None:
    """A world's overview up to a record, taken on from there, is the overview of all."""
    world = World.read(log)
    middle = world.last // 2
    state = world.fold_at(middle).state
    assert state is not None
    half = world.overview.until(middle, state)
    walked = world.fold_at(middle)
    for seq, event in world.tape.between(middle + 1, world.last):
        effects = walked.take(seq, event)
        assert walked.state is not None
        half.take(seq, event, effects, walked.state)
    assert half.lives.all == world.overview.lives.all
    for name in worlds.overview.FIGURES:
        if name != "took":  # of steps that were in flight there
            assert half.column(name).tolist() == world.overview.column(name).tolist(), name


def test_an_explanation_of_a_long_life_is_of_decisions_spread_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World.read(simulated(max_running=1, num_pages=200))
    life = next(life for life in world.overview.lives.all if life.key[0] == "r9")
    every = world.explain(life).causes
    monkeypatch.setattr(whole, "MOST_DECISIONS", 4)
    some = world.explain(life).causes
    assert {cause.kind for cause in some} <= {cause.kind for cause in every}
    assert every[0].first_seq <= some[0].first_seq and some[-1].last_seq <= every[-1].last_seq
    told, known = (sum(cause.decisions for cause in causes) for causes in (some, every))
    assert told == pytest.approx(known, rel=0.4)


def test_a_tape_up_to_a_record_is_its_beginning_and_grows_apart(log: EventLog) -> None:
    tape = World.read(log).tape
    for seq in range(tape.first - 1, tape.last + 1):
        twin = tape.until(seq)
        assert twin.last == seq
        assert [twin.raw(at) for at in range(1, seq + 1)] == [tape.raw(at) for at in range(1, seq + 1)]
        assert twin.append(tape.event(1)) == seq + 1 and twin.event(seq + 1).t == tape.event(1).t
    assert tape.last == len(log)


def test_a_tape_keeps_few_blocks_decoded_and_has_no_more_records_than_it_has(
    log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tapes, "KEPT", 2)
    tape = World.read(log).tape
    for _ in range(2):
        assert [encode(one.event) for one in tape.between(1, tape.last)] == [encode(one.event) for one in log]
        assert len(tape._decoded) == 2 < tape.last // 8
    for seq in (0, tape.last + 1):
        with pytest.raises(IndexError, match=f"no record {seq}; there are 1 to {tape.last}"):
            tape.raw(seq)
