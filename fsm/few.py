"""Steps of few rows, one by one: what a column costs to begin with is more than a few rows cost in all."""

from __future__ import annotations

from leftfold.events.plan import as_list
from leftfold.fsm.request import Seat
from leftfold.fsm.rows import RowSet
from leftfold.fsm.state import InFlight, State

FEW = 10
"""Up to so many rows. The result is the same: the fuzzer runs both ways."""

Look = tuple[int, int, int]
"""A row to look at: its index, the positions that it has computed, its new token."""


def plan_few(state: State, decode: RowSet) -> tuple[list[int], list[int], list[int] | None]:
    """Plan each row on by a token, and note those that cannot simply be planned on again.

    The position of each, the one behind it, and its input token (None for all if an earlier step brings them).
    """
    cells = state.columns.cells
    planned, runway, last = cells.planned, cells.runway, cells.last
    starts: list[int] = []
    ends: list[int] = []
    inputs: list[int] = []
    for seat in decode.seats:
        slot = seat.slot
        start = planned[slot]
        planned[slot] = end = start + 1
        starts.append(start)
        ends.append(end)
        inputs.append(last[slot])
        if end >= runway[slot]:
            (state.resting if end >= seat.last else state.at_edge).append(slot)
    return starts, ends, None if state.in_flight else inputs


def commit_few(
    state: State, flight: InFlight, tokens: list[int]
) -> tuple[list[Seat], list[int], list[int], list[Look]]:
    """Commit a token to each row that goes on: those rows, positions that they have computed now, tokens, whom to look
    at.
    """
    rows, columns, mirror = flight.rows, state.columns, state.pool.cells
    cells, watch = columns.cells, columns.watch
    computed, last, base, alarm = cells.computed, cells.last, cells.base, cells.alarm
    seats = rows.decode.seats
    ends, inputs = as_list(rows.ends), [] if rows.inputs is None else as_list(rows.inputs)
    if rows.inputs is None:  # an earlier step brought them meanwhile
        inputs = [last[seat.slot] for seat in seats]
    if flight.ended:
        going = [index for index, seat in enumerate(seats) if seat.slot not in flight.ended]
        seats = [seats[index] for index in going]
        ends, inputs, tokens = [[column[index] for index in going] for column in (ends, inputs, tokens)]
    watched = len(watch) if columns.watchers else 0
    looks: list[Look] = []
    for index, seat in enumerate(seats):
        slot, end, token = seat.slot, ends[index], tokens[index]
        mirror[base[slot] + end - 1] = inputs[index]
        computed[slot] = end
        last[slot] = token
        if end >= alarm[slot] or (token < watched and watch.item(token)):
            looks.append((index, end, token))
    return seats, ends, tokens, looks
