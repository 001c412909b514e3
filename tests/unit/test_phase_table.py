"""Every event in every phase that can be reached: a legal transition, or a counted no-op that changes nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from leftfold.events import (
    EVENTS,
    Abort,
    Admit,
    Event,
    ExecutorLost,
    ForwardDone,
    SamplingParams,
    Shutdown,
    Started,
    Tick,
)  # fmt: skip
from leftfold.fsm import TRANSITIONS, FinishReason, Phase, State, decide, lifecycle, step
from leftfold.replay.fuzzing import World
from leftfold.replay.fuzzing.oddities import CONTROLS, STRAYS, control_event


def world_with(phase: str) -> World:
    """A world whose request `r` is in a phase; `*` says that a step in flight names it."""
    world = World(
        num_pages=8, page_size=4, max_running=2, max_batch_tokens=8, max_model_len=40, max_chunk_tokens=4
    )
    if phase == "-":
        return world
    if phase == "PREEMPTED":
        world.admit("other", [2] * 3, 28)
        world.admit("r", [1] * 3, 20)
        while world.state.requests["r"].phase is not Phase.PREEMPTED:
            world.steps()
        return world
    world.admit("r", [1] * 9, 8)
    if phase.startswith("DECODING"):
        world.steps(4)
    elif phase.startswith("PREFILLING"):
        world.steps(1)
    if phase.endswith("*") or phase == "STOPPING":
        world.tick()
    if phase in ("STOPPING", "FINISHED"):
        world.abort("r")
    return world


def phase_of(state: State) -> str:
    request = state.requests.get("r")
    if request is None or request.phase is None:
        return "-"
    named = any(seat.request is request for flight in state.in_flight for seat in flight.rows.decode.seats) or any(
        chunk.seat.request is request for flight in state.in_flight for chunk in flight.rows.chunks
    )
    return request.phase.name + ("*" if named and request.phase is not Phase.STOPPING else "")


def _result(world: World, **fields: object) -> ForwardDone:
    if world.flight is None:
        return ForwardDone(t=world.t, step=99)
    tokens = [] if fields else world.device.execute(world.flight).tokens
    return ForwardDone(t=world.t, step=world.flight.step, tokens=tokens, **fields)  # type: ignore[arg-type]


MAKERS: dict[str, Callable[[World], Event]] = {
    "Admit": lambda w: Admit(t=w.t, rid="r", prompt=[3, 4], params=SamplingParams(max_tokens=2)),
    "Abort": lambda w: Abort(t=w.t, rid="r"),
    "AbortOld": lambda w: Abort(t=w.t, rid="r", epoch=7),
    "AbortAll": lambda w: Abort(t=w.t),
    "Tick": lambda w: Tick(t=w.t + 1),
    "Done": _result,
    "Retry": lambda w: _result(w, error={"text": "x", "retry": True, "rows": ()}),
    "Failed": lambda w: _result(w, error={"text": "x", "retry": False, "rows": ()}),
    "Spoiled": lambda w: _result(w, digest="f" * 32),
    "Lost": lambda w: ExecutorLost(t=w.t),
    "Started": lambda w: Started(t=w.t, incarnation=1),
    "Shutdown": lambda w: Shutdown(t=w.t, call="c"),
}

# Rows: the phase before (`*`: a step in flight names the request). Columns: the phase after each event; `.` is a
# no-op that is counted, `=` leaves the request where it is.
TABLE = """
phase  Admit  Abort  AbortOld  AbortAll  Tick   Done  Retry  Failed  Spoiled  Lost  Started  Shutdown
-      wait   .      .         .         =      .     .      .       .        =     =        =
wait   .      fin    .         fin       fill*  .     .      .       .        wait  wait     =
fill   .      fin    .         fin       fill*  .     .      .       .        wait  wait     =
fill*  .      stop   .         stop      =      fill  fill   fin     wait     wait  wait     =
dec    .      fin    .         fin       dec*   .     .      .       .        pre   pre      =
dec*   .      stop   .         stop      =      dec   dec    fin     pre      pre   pre      =
pre    .      fin    .         fin       =      .     .      .       .        pre   pre      =
stop   wait   .      .         .         =      fin   fin    fin     fin      fin   fin      =
fin    wait   .      .         .         =      .     .      .       .        =     =        =
"""
SHORT = {
    "wait": "WAITING", "fill": "PREFILLING", "dec": "DECODING", "pre": "PREEMPTED", "stop": "STOPPING",
    "fin": "FINISHED",
}  # fmt: skip


def _long(cell: str) -> str:
    name = cell.rstrip("*")
    return SHORT.get(name, name) + cell[len(name) :]


HEAD, *LINES = [[_long(cell) for cell in line.split()] for line in TABLE.strip().splitlines()]
CELLS = [(line[0], event, after) for line in LINES for event, after in zip(HEAD[1:], line[1:], strict=True)]


@pytest.mark.parametrize(("before", "event", "after"), CELLS)
def test_event_in_phase(before: str, event: str, after: str) -> None:
    world = world_with(before)
    state = world.state
    assert phase_of(state) == before
    counted = state.counts["ignored"]
    digest = _but_counts(state)
    effects = step(state, MAKERS[event](world))
    state.check()
    if after == ".":
        assert state.counts["ignored"] == counted + 1
        assert not len(effects.outputs) and effects.plan is None and not effects.acks
        assert _but_counts(state) == digest
    else:
        assert state.counts["ignored"] == counted
    assert phase_of(state) == (before if after in ("=", ".") else after)


def _but_counts(state: State) -> str:
    twin = state.copy()
    twin.counts = dict.fromkeys(twin.counts, 0)
    return twin.digest()


@pytest.mark.parametrize("before", [line[0] for line in LINES])
@pytest.mark.parametrize("kind", [*CONTROLS, *STRAYS])
def test_control_calls_and_strange_operations_move_no_request(before: str, kind: str) -> None:
    world = world_with(before)
    if kind in STRAYS:
        effects = step(world.state, STRAYS[kind](world.t))
        assert not effects.acks
    else:
        effects = step(world.state, control_event(kind, world.t, "call", {}))
        assert [(ack.call, ack.ok) for ack in effects.acks] in ([("call", False)], [("call", True)], [])
    world.state.check()
    assert not len(effects.outputs) and phase_of(world.state) == before


def test_the_tables_know_every_event() -> None:
    known = {type(make(world_with("DECODING*"))) for make in MAKERS.values()}
    known |= {type(make(0)) for make in STRAYS.values()} | {type(control_event(kind, 0, "c", {})) for kind in CONTROLS}
    assert known == set(EVENTS)


NO_OPS = {
    "Admit": "who lives is not admitted again",
    "Abort": "nobody of this id lives (any more)",
    "AbortOld": "another epoch of this id lives, and is not meant",
    "AbortAll": "nobody lives",
    "Done": "no step is in flight: it is void, or over",
    "Retry": "no step is in flight: it is void, or over",
    "Failed": "no step is in flight: it is void, or over",
    "Spoiled": "no step is in flight: it is void, or over",
}
"""Why an event that is counted and moves nobody is right to do so."""

UNREACHED = {
    Phase.HELD: "these laws refuse what has to be prepared first",
    Phase.LOADING: "these laws plan no transfers",
    Phase.SENDING: "these laws plan no transfers",
}
"""Phases of the vocabulary that no event leads to yet."""


def test_every_no_op_has_its_reason_and_every_reason_its_no_op() -> None:
    assert {event for _, event, after in CELLS if after == "."} == NO_OPS.keys()


def test_the_table_has_every_phase_that_can_be_reached() -> None:
    rows = {line[0].rstrip("*") for line in LINES} - {"-"}
    assert rows == {phase.name for phase in Phase if phase not in UNREACHED}


def test_no_law_leads_to_a_phase_that_is_called_unreached() -> None:
    """By the source: the triggers that lead there from elsewhere are named in the table of transitions alone."""
    into = {
        trigger for (before, trigger), after in TRANSITIONS.items() if after in UNREACHED and before not in UNREACHED
    }
    folder = Path(lifecycle.__file__).parent
    used = "".join(path.read_text() for path in sorted(folder.glob("*.py")) if path.name != "lifecycle.py")
    assert into and not [trigger for trigger in into if re.search(rf"Trigger\.{trigger.name}\b", used)]


def test_phases_after_are_those_of_the_transition_table() -> None:
    """What the table above says of a request that moves stands in `TRANSITIONS` too."""
    legal = {(None if phase is None else phase.name, target.name) for (phase, _), target in TRANSITIONS.items()}
    for before, event, after in CELLS:
        source = None if before == "-" or event == "Admit" else before.rstrip("*")
        if after not in (".", "="):
            assert (source, after.rstrip("*")) in legal, (before, event, after)


@pytest.mark.parametrize("before", ["WAITING", "PREFILLING", "PREFILLING*", "DECODING", "DECODING*", "PREEMPTED"])
def test_only_ticks_past_a_deadline_end_it_in_any_phase(before: str) -> None:
    world = world_with(before)
    request = world.state.requests["r"]
    request.deadline_at = world.t + 5
    world.state.deadlines.add((request.deadline_at, request.arrival, 0), request)
    plan = decide(world.state, world.t + 5)
    assert plan is not None
    effects = step(world.state, Tick(t=world.t + 5, plan=plan))
    assert [output.finish_reason for output in effects.outputs] == [FinishReason.DEADLINE]
    assert phase_of(world.state) == ("STOPPING" if before.endswith("*") else "FINISHED")
    world.state.check()
