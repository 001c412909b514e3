"""What each invariant says when it does not hold: one thing is made wrong, and the message names that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from leftfold.fsm import InvariantViolation, State, step
from leftfold.fsm.audit import audit
from leftfold.fsm.gate import GateTrigger, move_gate
from leftfold.fsm.lifecycle import Phase, Trigger, advance
from leftfold.fsm.request import Seat
from leftfold.fsm.rows import RowSet
from tests.unit.test_check import CONFIG, busy, first_page, live, seat


def under_another_name(state: State) -> None:
    state.live["x", 0, 0] = state.live.pop(("d", 0, 0))


def seat_that_somebody_else_has(state: State) -> None:
    state.by_slot[seat(state, "a").slot] = seat(state, "b")


def waits_with_tokens(state: State) -> None:
    live(state, "d").prompt_len -= 1


def line_by_arrival_misses_one(state: State) -> None:
    state.waiting._by_arrival.remove((live(state, "d").arrival,))


def deadline_of_somebody_else(state: State) -> None:
    request = live(state, "a")
    state.deadlines.remove((request.deadline_at, request.arrival, 0))
    state.deadlines.add((request.deadline_at, request.arrival, 0), live(state, "e"))


def no_newest_token(state: State) -> None:
    state.columns.last[seat(state, "a").slot] = -1


def row_twice_in_a_step(state: State) -> None:
    rows = state.in_flight[1].rows
    rows.chunks = [*rows.chunks, *rows.chunks]


def planned_beyond_what_flies(state: State) -> None:
    state.columns.planned[seat(state, "c").slot] += 1


def operation_that_is_to_come(state: State) -> None:
    state.in_flight[0].ops = (state.next_op,)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (under_another_name, r"live request \('x', 0, 0\) is \('d', 0, 0\)"),
        (seat_that_somebody_else_has, r"live request \('a', 0, 0\) has a seat that is not in the rows"),
        (waits_with_tokens, r"live request \('d', 0, 0\) waits as if it had never run, and has tokens"),
        (line_by_arrival_misses_one, "the line by arrival holds not those that have no seat"),
        (deadline_of_somebody_else, r"deadline .* leads to \('e', 0, 0\)"),
        (no_newest_token, "row 'a' has -1 for its newest token"),
        (row_twice_in_a_step, "names slots .*, its column says"),
        (planned_beyond_what_flies, "row 'c': .* planned, .* computed or in flight"),
        (operation_that_is_to_come, "operations .* are known, 1 is next"),
    ],
    ids=lambda one: one.__name__ if callable(one) else "",
)
def test_the_audit_alone_names_what_is_wrong(spoil: Callable[[State], None], says: str) -> None:
    """The cheaper checks before it may find the same, so it is asked directly."""
    state = busy()
    audit(state)
    spoil(state)
    with pytest.raises(InvariantViolation, match=says):
        audit(state)


def slot_leads_nowhere(state: State) -> None:
    state.by_slot[seat(state, "a").slot] = None


def slot_free_twice(state: State) -> None:
    state.free_slots.append(state.free_slots[0])


def page_lost(state: State) -> None:
    state.pool.free.popitem()


def held_page_free(state: State) -> None:
    state.pool.free.popitem()
    state.pool.free[first_page(state, "a")] = None


def findable(state: State, page: int) -> None:
    state.pool.keys[page] = b"k" * 16
    state.pool.published[b"k" * 16] = page


def key_of_nothing_published(state: State) -> None:
    state.pool.keys[seat(state, "a").pages[-1]] = b"k" * 16


def cached_without_key(state: State) -> None:
    page, _ = state.pool.free.popitem()
    state.pool.cached[page] = None


def free_page_findable(state: State) -> None:
    findable(state, next(iter(state.pool.free)))


def joined_later(state: State) -> None:
    seat(state, "a").order = 99


def prompt_not_computed(state: State) -> None:
    seat(state, "a").target += 50


def edge_off(state: State) -> None:
    seat(state, "a").edge += 4


def prefilling_in_another_phase(state: State) -> None:
    live(state, "c").phase = Phase.DECODING


def page_too_many(state: State) -> None:
    page, _ = state.pool.free.popitem()
    state.pool.refs[page] = 1
    seat(state, "c").pages.append(page)


def page_to_write_findable(state: State) -> None:
    findable(state, seat(state, "c").pages[-1])


def waiting_in_another_phase(state: State) -> None:
    live(state, "d").phase = Phase.DECODING


def more_rows_than_may_run(state: State) -> None:
    state.config = replace(CONFIG, max_running=2)


def suspect_that_is_gone(state: State) -> None:
    state.suspects["x", 0, 0] = 5


def stopping_in_another_phase(state: State) -> None:
    state.stopping[0].request.phase = Phase.DECODING


def steps_too_many(state: State) -> None:
    state.config = replace(CONFIG, pipeline_depth=0)


def row_in_flight_given_on(state: State) -> None:
    rows = state.in_flight[0].rows
    others = [Seat(row.request, row.slot, row.order, row.pages, row.start) for row in rows.decode.seats]
    rows.decode = RowSet(others, rows.decode.slots)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (slot_leads_nowhere, "slot .* does not lead to its seat"),
        (slot_free_twice, "slots are not each free or held once"),
        (page_lost, r"free \+ 0 cached pages, .* are not held"),
        (held_page_free, "held pages .* are unheld"),
        (key_of_nothing_published, "pages have keys, .* are published"),
        (cached_without_key, "cached pages .* are not findable"),
        (free_page_findable, "free pages .* are findable"),
        (joined_later, "row 'b' is out of order"),
        (prompt_not_computed, "row 'a' is .*DECODING.* planned"),
        (edge_off, "row 'a': computed .*, edge"),
        (prefilling_in_another_phase, "row 'c' is .*DECODING"),
        (page_too_many, "row 'c': .* for 30 tokens"),
        (page_to_write_findable, "row 'c' will write to page .*, which is shared"),
        (waiting_in_another_phase, r"request \('d', 0, 0\) has no seat and is .*DECODING"),
        (more_rows_than_may_run, r"3 rows \(at most 2\) and 2 waiting"),
        (suspect_that_is_gone, r"some of the suspects \[\('x', 0, 0\)\] do not live"),
        (stopping_in_another_phase, "request 'f' is stopping and .*DECODING"),
        (steps_too_many, "2 steps are in flight at depth 0"),
        (row_in_flight_given_on, "a step in flight names slot .*, which was given on"),
    ],
    ids=lambda one: one.__name__ if callable(one) else "",
)
def test_the_cheap_part_names_what_is_wrong(spoil: Callable[[State], None], says: str) -> None:
    state = busy()
    spoil(state)
    with pytest.raises(InvariantViolation, match=says):
        state.check(thorough=False)


def test_where_nobody_runs_nobody_needs_a_page() -> None:
    state = State(CONFIG)
    state.at_edge = [0]
    with pytest.raises(InvariantViolation, match=r"at the end of their pages are \[\], noted are \[0\]"):
        state.check(thorough=False)


def test_what_the_machines_do_not_have_is_told_by_its_names() -> None:
    state = busy()
    with pytest.raises(InvariantViolation, match="request 'd': no transition from WAITING on DRAINED"):
        advance(live(state, "d"), Trigger.DRAINED)
    with pytest.raises(InvariantViolation, match="no transition from gate RUNNING on CLOSED"):
        move_gate(state, GateTrigger.CLOSED)
    with pytest.raises(TypeError, match="int is no event"):
        step(state, 5)  # type: ignore[arg-type]
