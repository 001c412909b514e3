"""Plans that nobody decided, tried on a state: wrong ones must be refused, lawful ones taken."""

from __future__ import annotations

from dataclasses import replace

from leftfold.events import Evict, Plan, Tick
from leftfold.events.plan import as_list
from leftfold.fsm import PlanRefused, State, apply
from leftfold.fsm.check import check
from leftfold.replay.fuzzing.errors import Violation
from leftfold.replay.fuzzing.tampering import TAMPERINGS


def must_refuse(state: State, t: int, kind: str, wrong: Plan, closely: bool) -> None:
    """`closely`: also compare digests. Raises `Violation`."""
    before = state.digest() if closely else ""
    try:
        apply(state, Tick(t=t, plan=wrong), wrong)
    except PlanRefused:
        check(state)
    else:
        raise Violation("taken", f"a plan with a wrong {kind} was taken: {wrong}")
    if before and before != state.digest():
        raise Violation("refused", f"a refused plan (wrong {kind}) changed the state")


def tamper(state: State, t: int, plan: Plan, turn: int, closely: bool) -> None:
    """`plan` with one thing wrong is refused; `turn`: says which, or the next for which there is an occasion."""
    names = [*TAMPERINGS]
    at = turn % len(names)
    for name in names[at:] + names[:at]:
        wrong = TAMPERINGS[name](plan, state)
        if wrong is not None:
            return must_refuse(state, t, name, wrong, closely)


def drop_more(state: State, t: int, plan: Plan) -> None:
    """A planner may drop cached pages that nobody gets, as `decide` never does: on a copy, since it decided otherwise.

    Raises `Violation`.
    """
    taken = [page for join in plan.join for page in as_list(join.pages[0])]
    taken += [page for row in plan.grow for page in as_list(row.pages)]
    taken += [page for row in plan.evict for page in as_list(row.pages)]
    page = next((page for page in reversed(state.pool.cached) if page not in taken), None)
    if plan.step is None or page is None:
        return
    twin, more = state.copy(), replace(plan, evict=(*plan.evict, Evict("device", 0, [page])))
    apply(twin, Tick(t=t, plan=more), more)
    twin.check()
    if page not in twin.pool.free:
        raise Violation("evict", f"page {page} is not free after {more}")
