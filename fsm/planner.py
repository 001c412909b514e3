"""The choice: which rows run, which pages they get, who is preempted, who is admitted, who has run out of time.

`decide` only reads. A plan takes shape in a `Sketch` (fsm/sketch.py); `fsm/room.py` finds pages for rows that run,
`fsm/admitting.py` says who joins them.
"""

from __future__ import annotations

from collections.abc import Sequence

from leftfold.events.plan import Control, Grow, Plan
from leftfold.fsm.admitting import admit, eligible
from leftfold.fsm.controls import gives_back_rows, operation
from leftfold.fsm.draft import next_pages
from leftfold.fsm.gate import STOPPED, rows_pass
from leftfold.fsm.reasons import Reason
from leftfold.fsm.request import Request
from leftfold.fsm.room import grow, make_way
from leftfold.fsm.sketch import Sketch, deadline_ends, evictions, idle
from leftfold.fsm.state import State


def decide(state: State, t: int, trace: list[Reason] | None = None) -> Plan | None:
    """The plan for now (`t` in µs), or None when there is nothing to do.

    `trace`: a list that gets the reasons why requests wait and rows give way; it changes no decision.
    """
    overdue: Sequence[Request] = ()
    if state.deadlines.keys or state.closing_at:
        wake_at = state.wake_at
        overdue = () if wake_at is None or wake_at > t else state.deadlines.upto(t)
        if state.closing_at and wake_at is not None and state.closing_at <= t:
            return Plan(ends=deadline_ends(overdue), memo=dict(state.memo))  # the `Tick` at which the engine stops
    if state.gate is STOPPED or len(state.in_flight) > state.config.pipeline_depth:
        return Plan(ends=deadline_ends(overdue)) if overdue else None
    control, passing = operation(state) if state.controls else None, rows_pass(state)
    if not passing and trace is not None:
        trace += _shut(state)
    if control is not None and (state.controls[0].barrier or not passing):
        return _control_alone(state, overdue, control)
    if not passing:
        return Plan(ends=deadline_ends(overdue)) if overdue else None
    busy = overdue or state.suspects or state.waiting.keys or state.prefilling or control is not None
    if busy or (state.at_edge and len(state.at_edge) > state.pool.usable):
        return (_apart if state.suspects else _plan)(Sketch(state, overdue, control, trace))
    return _same_rows(state) if state.decoding.seats else None


def _plan(sketch: Sketch) -> Plan | None:
    """Rows in this order: those that decode, prefill chunks in progress, admissions."""
    state = sketch.state
    if state.policy.preempts and state.waiting.keys and not state.suspects:
        make_way(sketch)
    enough = grow(sketch) if state.at_edge else True
    sketch.chunks = idle([*sketch.resting, *sketch.left_out])
    sketch.budget = sketch.config.max_batch_tokens - len(sketch.decoding) + len(sketch.left_out)
    for seat in sketch.prefilling:
        if seat in sketch.held_back:
            sketch.chunks += idle((seat.slot,))
        else:
            sketch.chunk(seat.slot, state.columns.cells.planned[seat.slot], seat.target)
    if state.waiting.keys and enough:
        admit(sketch)
    elif sketch.trace is not None:
        for request in state.waiting:
            sketch.why(request, "pages", 1, 0, "rows that run have not enough pages")
    return sketch.plan()


def _apart(sketch: Sketch) -> Plan | None:
    """A step of one suspect alone, the best ranked of those that run, else the next in line that can join.

    Where there is none (its result is awaited, or it lacks pages that others hold) the others run without suspects;
    nobody joins them while a suspect might.
    """
    state, suspects = sketch.state, sketch.state.suspects
    seats = [seat for seat in sketch.rows if seat.request.key in suspects]
    lone = seats[-1].request if seats else next((who for who in eligible(sketch) if who.key in suspects), None)
    if lone is not None:
        for request in state.waiting if sketch.trace is not None else ():
            sketch.why(request, "apart", 0, 0, f"{lone.rid!r} is to run alone first, since steps with it failed")
        trial = Sketch(state, sketch.overdue, None, None)
        for seat in trial.rows:
            if seat.request is not lone:
                trial.leave_out(seat)
        trial.joining = () if seats else (lone,)
        plan = _plan(trial)
        if plan is not None and plan.step is not None:
            return plan
        sketch.joining = ()
    for seat in seats:
        sketch.leave_out(seat)
    return _plan(sketch)


def _shut(state: State) -> list[Reason]:
    """Why nobody who waits runs."""
    if not state.executor_present:
        text = "the executor is absent"
    elif state.asleep:
        text = f"{' and '.join(state.asleep)} asleep"
    elif state.controls and state.controls[0].barrier:
        text = f"a {type(state.controls[0].event).__name__} waits for its barrier"
    else:
        text = f"the engine is {state.gate.value}"
    return [Reason(who.rid, who.epoch, who.choice, "gate", 0, 0, text) for who in state.waiting]


def _control_alone(state: State, overdue: Sequence[Request], control: Control) -> Plan:
    """A plan for one operation: rows are left out, or give their pages back where it takes their K/V."""
    dropped = [request.seat for request in overdue]
    rows = [seat for seat in state.running() if seat not in dropped]
    gone = gives_back_rows(control, state.controls[0])
    return Plan(
        step=state.next_step,
        preempt=[seat.slot for seat in rows] if gone else (),
        chunks=() if gone else idle([seat.slot for seat in rows]),
        ops=(control,),
        ends=deadline_ends(overdue),
    )


def _same_rows(state: State) -> Plan:
    """One more token for every row that has not come to rest; a page for those that need one."""
    needing, resting = state.at_edge, idle(state.resting) if state.resting else ()
    if not needing:
        return Plan(step=state.next_step, chunks=resting)
    pages, evicted = next_pages(state.pool, len(needing))
    grown = (Grow(needing.copy(), pages),)
    return Plan(step=state.next_step, chunks=resting, grow=grown, evict=evictions(evicted))
