"""Pages for rows that run, and who gives theirs back when there are too few."""

from __future__ import annotations

from collections.abc import Sequence

from leftfold.events.plan import Grow
from leftfold.fsm.admitting import eligible, growth_reserve, need
from leftfold.fsm.draft import Draft
from leftfold.fsm.policy import MAX_OVERTAKEN
from leftfold.fsm.request import Request, Seat
from leftfold.fsm.sketch import Sketch


def grow(sketch: Sketch) -> bool:
    """A page for every row that needs one; whether there was one for each without anybody's making room."""
    needing = _needing(sketch)
    short = len(needing) > sketch.draft.usable
    if short:
        needing = _make_room(sketch, needing)
    if needing:
        sketch.grow = (Grow(needing, sketch.draft.take(len(needing))),)
    return not short


def _needing(sketch: Sketch) -> list[int]:
    needing, away = sketch.state.at_edge, {*sketch.gone, *sketch.left_out}
    return needing.copy() if away.isdisjoint(needing) else [slot for slot in needing if slot not in away]


def _make_room(sketch: Sketch, needing: list[int]) -> list[int]:
    """Preempt from the worst rank until the rows that need a page can have one; the slots that get one.

    A row that a step in flight names cannot be a victim: it is left out of this plan, so that it can be one when
    its result is in. Every victim adds usable pages or needs one itself. With nothing in flight the best ranked
    row is never reached: alone, it can always grow, since its limit is at most what the pool holds.
    """
    draft, rows = sketch.draft, sketch.rows
    hoped = 0  # pages of rows that are left out to become victims
    for seat in rows:
        if len(needing) <= draft.usable + hoped:
            break
        needs, gain = seat.slot in needing, draft.gain(seat.pages)
        if not needs and not gain:
            continue
        if needs:
            needing.remove(seat.slot)
        if sketch.state.flies(seat):
            hoped += gain
            _hold_back(sketch, seat, "a row of a better rank needs its pages")
        else:
            sketch.why(seat.request, "victim", len(needing), draft.usable, f"preempted: {gain} pages become usable")
            sketch.preempt(seat)
    by_rank = [seat for seat in reversed(rows) if seat.slot in needing]
    for seat in by_rank[draft.usable :]:
        sketch.why(seat.request, "no_page", 1, 0, "no page is usable until a result is in")
        sketch.leave_out(seat)
    fed = [seat.slot for seat in by_rank[: draft.usable]]
    return [slot for slot in needing if slot in fed]


def _hold_back(sketch: Sketch, seat: Seat, why: str) -> None:
    sketch.why(seat.request, "held_back", 0, 0, f"left out of this step to give way after it: {why}")
    sketch.leave_out(seat)


def make_way(sketch: Sketch) -> None:
    """Where the policy preempts: rows of a lower class give way to the first in line, if that makes it fit.

    Looked at before anything is spent, so a row that gives way has taken nothing in this plan. Rows that a step in
    flight names are left out, and give way when its result is in. Who was preempted `MAX_OVERTAKEN` times stays.
    """
    head = next(eligible(sketch), None)
    if head is None:
        return
    classes = [seat.request.rank[0] for seat in (*sketch.prefilling, *sketch.resting.values())]
    if max([sketch.decoding.last_class(least=head.rank[0]), *classes]) <= head.rank[0]:
        return
    if _fits(sketch, head, sketch.draft, ()):
        return
    lower = [seat for seat in sketch.rows if seat.request.rank[0] > head.rank[0]]
    yielding = _enough(sketch, head, [seat for seat in lower if seat.request.preemptions < MAX_OVERTAKEN])
    for seat in yielding:
        if sketch.state.flies(seat):
            _hold_back(sketch, seat, f"{head.rid!r} is of a higher class")
        else:
            sketch.why(seat.request, "given_way", 0, 0, f"preempted for {head.rid!r}, which is of a higher class")
            sketch.preempt(seat)


def _enough(sketch: Sketch, head: Request, lower: list[Seat]) -> list[Seat]:
    """The fewest rows, the worst ranked first, without which `head` fits; none if it does not fit without them all."""
    trial = Draft(sketch.state.pool)
    for seat in sketch.state.running():
        if seat.slot in sketch.gone and not sketch.state.flies(seat):
            trial.release(seat.pages)
    yielding: list[Seat] = []
    for seat in lower:
        trial.release(seat.pages)
        yielding.append(seat)
        if _fits(sketch, head, trial, yielding):
            return yielding
    return []


def _fits(sketch: Sketch, head: Request, draft: Draft, without: Sequence[Seat]) -> bool:
    """Whether `head` could join if the rows `without` had left, with what is kept for the growth of the others."""
    wanted, found = need(sketch, head, draft)
    away = [seat.slot for seat in without]
    growth = sum(slot not in away for slot in _needing(sketch)) + growth_reserve(sketch, away)
    room = sketch.config.rows - sketch.row_count + len(without)
    return room > 0 and wanted + growth <= draft.usable - draft.unheld(found)
