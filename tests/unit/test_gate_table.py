"""Every event behind every gate: the gate it leads to and what it is answered, or a written no-op."""

from __future__ import annotations

import pytest

from leftfold.events import (
    EVENTS,
    Abort,
    Admit,
    Event,
    ExecutorLost,
    ForwardDone,
    SamplingParams,
    Started,
    Tick,
)  # fmt: skip
from leftfold.fsm import GATES, FinishReason, Gate, Phase, step
from leftfold.replay.fuzzing import World
from leftfold.replay.fuzzing.oddities import STRAYS, control_event


def world_behind(gate: Gate) -> World:
    """An engine with a live request, and with a step of it in flight where the gate allows one."""
    world = World(
        num_pages=8, page_size=4, max_running=2, max_batch_tokens=8, max_model_len=40, max_chunk_tokens=4
    )
    world.admit("r", [1] * 9, 8)
    world.steps(3)
    if gate is Gate.PAUSED:
        world.control("Pause", mode="keep")
    elif gate is Gate.STOPPED:
        world.shutdown(deadline=5)
        world.wait(9)
        world.tick()
    else:
        world.tick()
        if gate is Gate.DRAINING:
            world.control("Pause", mode="wait")
        elif gate is Gate.CLOSING:
            world.shutdown()
    assert world.state.gate is gate and world.state.requests["r"].phase is not Phase.FINISHED
    return world


def event_for(name: str, world: World) -> Event:
    t = world.t + 1
    if name == "Started":
        return Started(t=t, incarnation=1)
    if name == "ExecutorLost":
        return ExecutorLost(t=t)
    if name == "Admit":
        return Admit(t=t, rid="s", prompt=[3, 4], params=SamplingParams(max_tokens=2))
    if name == "Abort":
        return Abort(t=t, rid="r")
    if name == "Tick":
        return Tick(t=t)
    if name == "ForwardDone":
        flight = world.flight
        if flight is None:
            return ForwardDone(t=t, step=99)
        return ForwardDone(t=t, step=flight.step, tokens=world.device.execute(flight).tokens)
    return STRAYS[name](t) if name in STRAYS else control_event(name, t, "call", {})


# Where the gate leads to (`=`: nowhere else), then the answers: `+` yes, `-` no (of calls that waited first), `q` in
# the queue, `x` refused with a terminal output, `.` a no-op that is counted and changes nothing else.
TABLE = """
event          RUNNING    DRAINING  PAUSED    CLOSING    STOPPED
Started        =          =         =         RUNNING-   RUNNING
ExecutorLost   =          =         =         =          =
Shutdown       CLOSING    CLOSING-  STOPPED+  =          =+
Admit          =          =         =         =x         =x
Abort          =          =         =         =          =
Session        =-         =-        =-        =-         =-
Tick           =          =         =         =          =
ForwardDone    =          =         =.        =          =.
Prepared       =.         =.        =.        =.         =.
CacheOpDone    =.         =.        =.        =.         =.
TransferDone   =.         =.        =.        =.         =.
ControlDone    =.         =.        =.        =.         =.
Pause          DRAINING   =         =+        =-         =-
Resume         =+         RUNNING-+ RUNNING+  =-         =-
FlushCache     =+         =+        =+        =-         =-
Sleep          =q         =q        =q        =-         =-
Wake           =q         =q        =q        =q         =-
UpdateWeights  =q         =q        =q        =-         =-
Reconfigure    =q         =q        =+        =-         =-
Adapter        =-         =-        =-        =-         =-
Call           =q         =q        =q        =-         =-
"""
HEAD, *LINES = [line.split() for line in TABLE.strip().splitlines()]
CELLS = [(line[0], gate, after) for line in LINES for gate, after in zip(HEAD[1:], line[1:], strict=True)]

NO_OPS = {
    "ForwardDone": "no step is in flight, so it is the result of one that is void",
    "Prepared": "these laws start no operation that prepares anything",
    "CacheOpDone": "these laws start no operation that moves pages",
    "TransferDone": "these laws start no operation that sends or receives",
    "ControlDone": "no call has this operation: it is over, or belongs to an executor that is gone",
}
"""Why an event that is counted and changes nothing else is right to do so."""


@pytest.mark.parametrize(("name", "before", "cell"), CELLS)
def test_event_behind_gate(name: str, before: str, cell: str) -> None:
    world = world_behind(Gate[before])
    state = world.state
    ignored, queued, digest = state.counts["ignored"], len(state.controls), _but_counts(world)
    effects = step(state, event_for(name, world))
    state.check()
    answers = "".join("+" if ack.ok else "-" for ack in effects.acks)
    answers += "q" * (len(state.controls) - queued)
    answers += "x" * sum(output.finish_reason is FinishReason.ERROR for output in effects.outputs)
    answers += "." * (state.counts["ignored"] - ignored)
    assert ("=" if state.gate is Gate[before] else state.gate.name) + answers == cell
    if cell == "=.":
        assert _but_counts(world) == digest and effects.plan is None and not len(effects.outputs)


def _but_counts(world: World) -> str:
    twin = world.state.copy()
    twin.counts = dict.fromkeys(twin.counts, 0)
    return twin.digest()


def test_the_table_has_every_event_and_every_gate() -> None:
    assert [line[0] for line in LINES] == [event.__name__ for event in EVENTS]
    assert HEAD[1:] == [gate.name for gate in Gate]


def test_every_no_op_has_its_reason_and_every_reason_its_no_op() -> None:
    assert {name for name, _, cell in CELLS if cell == "=."} == NO_OPS.keys()


def test_gates_move_along_their_table() -> None:
    """`PAUSED` to `STOPPED` is two moves of one event: closing, and closed since nothing is in flight."""
    legal = {(before.name, after.name) for (before, _), after in GATES.items()} | {("PAUSED", "STOPPED")}
    for name, before, cell in CELLS:
        after = cell.rstrip("+-q.x")
        assert after == "=" or (before, after) in legal, (name, before, cell)
