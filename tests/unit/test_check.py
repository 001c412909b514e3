"""Each invariant is really looked at: one thing is made wrong in a healthy state, and `check` says so."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import orjson
import pytest

from leftfold.events import Abort, Admit, ForwardDone, SamplingParams, Tick
from leftfold.fsm import Config, InvariantViolation, State, step
from leftfold.fsm.audit import audit
from leftfold.fsm.request import Request, Seat
from leftfold.fsm.snapshot import encode

CONFIG = Config(
    num_pages=32, page_size=4, max_running=4, max_batch_tokens=12, max_model_len=64, pipeline_depth=1, policy="priority"
)


def busy() -> State:
    """Two rows decode ("a" publishes, "b" stops at 900), "c" prefills; "d" and "e" wait; "f" is stopping.

    Two steps are in flight.
    """
    state = State(CONFIG)

    def admit(rid: str, length: int, **fields: object) -> None:
        params = SamplingParams(max_tokens=20, stop_token_ids=(900,) if rid == "b" else ())
        first = ord(rid) * 7
        prompt = [*range(first, first + length)]
        step(state, Admit(t=0, rid=rid, prompt=prompt, params=params, **fields))  # type: ignore[arg-type]

    admit("a", 6, deadline=500)
    admit("b", 3)
    admit("f", 3)
    flying = []
    for token in range(20, 25):
        while (plan := step(state, Tick(t=1)).plan) is not None:
            flying.append(plan)
        plan = flying.pop(0)
        tokens = [token + row.slot for row in plan.rows if row.samples]
        step(state, ForwardDone(t=1, step=plan.step, tokens=tokens, digest=plan.digest))
    admit("c", 30)
    admit("d", 5, queue_deadline=400, deadline=600)
    admit("e", 9, tenant="t")
    step(state, Tick(t=2))
    step(state, Abort(t=2, rid="f"))
    return state


def live(state: State, rid: str) -> Request:
    return state.live[rid, 0, 0]


def seat(state: State, rid: str) -> Seat:
    found = live(state, rid).seat
    assert found is not None
    return found


def first_page(state: State, rid: str) -> int:
    return seat(state, rid).pages[0]


def test_the_state_that_is_spoiled_below_is_sound_and_has_some_of_everything() -> None:
    state = busy()
    state.check()
    assert [row.request.rid for row in state.decoding.seats] == ["a", "b"]
    assert [row.request.rid for row in state.prefilling.values()] == ["c"]
    assert [request.rid for request in state.waiting] == ["d", "e"]
    assert [row.request.rid for row in state.stopping] == ["f"] and state.left
    assert len(state.in_flight) == 2 and state.pool.published and len(state.deadlines) == 3
    assert state.in_flight[1].rows.chunks and state.in_flight[0].ended


def add_to(name: str, rid: str, by: int = 1) -> Callable[[State], None]:
    def spoil(state: State) -> None:
        getattr(state.columns, name)[seat(state, rid).slot] += by

    return spoil


def spoil_token(state: State) -> None:
    state.pool.tokens[first_page(state, "a"), 1] += 1


def spoil_generated_token(state: State) -> None:
    """One that only pages and keys know of."""
    state.pool.tokens[seat(state, "a").pages[1], 3] += 1


def forget_rid(state: State) -> None:
    del state.requests["d"]


def hide_rid(state: State) -> None:
    state.by_rid["e"] = []


def lose_deadline(state: State) -> None:
    key, _ = next(iter(state.deadlines.items()))
    state.deadlines.remove(key)


def keep_deadline(state: State) -> None:
    state.deadlines.add((77, 99, 0), live(state, "b"))


def keep_queue_deadline(state: State) -> None:
    request = live(state, "b")
    request.queue_deadline_at = 800
    state.deadlines.add((800, request.arrival, 1), request)


def swap_column(state: State) -> None:
    state.decoding.slots[:] = state.decoding.slots[::-1].copy()


def leave_running_slot(state: State) -> None:
    state.left.append(seat(state, "a").slot)


def watch_more(state: State) -> None:
    state.columns.watch[3] = not state.columns.watch[3]


def watch_less(state: State) -> None:
    state.columns.watchers[900] += 1


def final_off(state: State) -> None:
    seat(state, "a").final -= 1


def parent_off(state: State) -> None:
    seat(state, "a").parent = b"x" * 16


def parent_missing(state: State) -> None:
    seat(state, "a").parent = None


def key_off(state: State) -> None:
    pool, page = state.pool, first_page(state, "a")
    old = pool.keys[page]
    assert old is not None
    pool.keys[page] = b"y" * 16
    del pool.published[old]
    pool.published[b"y" * 16] = page


def request_key_off(state: State) -> None:
    live(state, "a").keys[0] = b"z" * 16


def ended_names_a_runner(state: State) -> None:
    state.in_flight[0].ended.append(seat(state, "a").slot)


def ended_is_not_noted(state: State) -> None:
    for flight in state.in_flight:
        flight.ended.clear()


def ended_is_noted_once_too_few(state: State) -> None:
    state.in_flight[0].ended.clear()


def steps_with_a_gap(state: State) -> None:
    state.in_flight[0].step -= 1


def chunk_slot_given_on(state: State) -> None:
    flight = state.in_flight[1]
    other = Seat(live(state, "e"), seat(state, "c").slot, 99, [], 0)
    flight.rows.chunks = [chunk._replace(seat=other) for chunk in flight.rows.chunks]


def expects_more(state: State) -> None:
    state.in_flight[0].expected += 1


def starts_off(state: State) -> None:
    state.in_flight[1].rows.ends[0] += 1


def inputs_off(state: State) -> None:
    state.in_flight[0].rows.inputs = state.columns.last[state.in_flight[0].rows.decode.slots] + 1


def prefilling_out_of_order(state: State) -> None:
    ((slot, row),) = state.prefilling.items()
    del state.prefilling[slot]
    state.prefilling[slot + 1] = row


def tenants_off(state: State) -> None:
    state.tenants.live["t"] = 2


def line_out_of_order(state: State) -> None:
    live(state, "e").rank = (-1, 0)


def publishes_although_it_may_not(state: State) -> None:
    live(state, "a").publishes = False


def two_operations(state: State) -> None:
    state.in_flight[0].ops = (1, 1)


def ended_is_noted_twice(state: State) -> None:
    for flying in state.in_flight:
        flying.ended = [*flying.ended, *flying.ended]


def seat_of_one_who_is_stopping(state: State) -> None:
    live(state, "a").seat = state.stopping[0]


def rests_without_a_limit(state: State) -> None:
    state.resting[seat(state, "a").slot] = seat(state, "a")


def queued_tokens_off(state: State) -> None:
    state.waiting.tokens += 1


def runs_on_at_its_limit(state: State) -> None:
    request = live(state, "b")
    slot = seat(state, "b").slot
    request.limit = int(state.columns.computed[slot]) + 1
    state.columns.limit[slot] = request.limit


def a_column_apart_from_its_view(state: State) -> None:
    state.columns.last = state.columns.last.copy()


def joined_and_hurries_to_join(state: State) -> None:
    live(state, "d").cached = 0


SPOILS: tuple[Callable[[State], None], ...] = (
    spoil_token, spoil_generated_token, forget_rid, hide_rid, lose_deadline, keep_deadline, keep_queue_deadline,
    swap_column, leave_running_slot, watch_more, watch_less, final_off, parent_off, parent_missing, key_off,
    request_key_off, ended_names_a_runner, ended_is_not_noted, ended_is_noted_once_too_few, steps_with_a_gap,
    chunk_slot_given_on, expects_more, starts_off, inputs_off, prefilling_out_of_order, tenants_off, line_out_of_order,
    publishes_although_it_may_not, two_operations, ended_is_noted_twice, seat_of_one_who_is_stopping,
    rests_without_a_limit, queued_tokens_off, runs_on_at_its_limit, joined_and_hurries_to_join,
    a_column_apart_from_its_view,
)  # fmt: skip


@pytest.mark.parametrize("spoil", SPOILS, ids=lambda spoil: spoil.__name__)
def test_one_thing_that_is_wrong_is_found(spoil: Callable[[State], None]) -> None:
    state = busy()
    spoil(state)
    with pytest.raises(InvariantViolation):
        state.check()


@pytest.mark.parametrize("name", ["computed", "planned", "limit", "runway", "base", "alarm"])
@pytest.mark.parametrize("by", [-1, 1])
def test_a_column_that_is_off_by_one_is_found(name: str, by: int) -> None:
    state = busy()
    add_to(name, "a", by)(state)
    with pytest.raises(InvariantViolation):
        state.check()


def test_the_cheap_part_counts_both_lines() -> None:
    for line in ("_by_rank", "_by_arrival"):
        state = busy()
        queue = getattr(state.waiting, line)
        queue.remove(queue.keys[0])
        with pytest.raises(InvariantViolation):
            state.check(thorough=False)


def test_the_cheap_part_leaves_the_mirror_to_the_thorough_one() -> None:
    state = busy()
    spoil_token(state)
    state.check(thorough=False)
    state.pool.refs[int(np.argmax(state.pool.refs))] += 1
    with pytest.raises(InvariantViolation):
        state.check(thorough=False)


def test_a_bound_on_what_a_request_finds_that_is_too_low_is_found() -> None:
    state = busy()
    first = ord("a") * 7
    step(state, Admit(t=3, rid="g", prompt=[*range(first, first + 6), 1, 2, 3], params=SamplingParams(max_tokens=1)))
    request, published = live(state, "g"), state.pool.published_ever
    found = state.cached_pages(request)
    request.seen = (found, published)
    state.check()
    request.seen = (found - 1, published - 1)
    state.check()
    request.seen = (found - 1, published)
    with pytest.raises(InvariantViolation, match="'g'.* finds"):
        state.check()


def test_a_check_leaves_the_state_as_it_was_in_all_that_a_snapshot_holds() -> None:
    state = busy()
    before = dumps(encode(state))
    state.check()
    assert dumps(encode(state)) == before


def test_rows_that_rest_in_each_others_slots_are_found() -> None:
    state = busy()
    first, second = seat(state, "a"), seat(state, "b")
    state.resting = {first.slot: second, second.slot: first}
    with pytest.raises(InvariantViolation, match=r"resting rows \[0, 1\] are in slots \[1, 0\]"):
        audit(state)


def dumps(raw: object) -> bytes:
    return orjson.dumps(raw, option=orjson.OPT_SERIALIZE_NUMPY)


def test_a_count_of_cached_pages_that_is_remembered_wrongly_is_found() -> None:
    state = busy()
    first = ord("a") * 7
    step(state, Admit(t=3, rid="g", prompt=[*range(first, first + 6), 1, 2, 3], params=SamplingParams(max_tokens=1)))
    request = live(state, "g")
    found = state.cached_pages(request)
    assert found and state.cached_pages(request) == found
    state.check()
    request.looked = (request.looked[0], found - 1)
    with pytest.raises(InvariantViolation, match="'g'.* remembered"):
        state.check()
