"""Steps of few rows, one by one: what a column costs to begin with is more than a few rows cost in all."""

from __future__ import annotations

from leftfold.fsm.effects import TokenBatch
from leftfold.fsm.request import Seat
from leftfold.fsm.rows import RowSet
from leftfold.fsm.state import InFlight, State

FEW = 32
"""Up to so many rows. The result is the same: the fuzzer runs both ways."""


def plan_few(state: State, decode: RowSet) -> tuple[list[int], list[int] | None, list[Seat]]:
    """Plan each row on by a token, and note those that need a page to be planned on again.

    The position behind that token, the input token (None for all if an earlier step brings them), and the rows that are
    planned up to their limit.
    """
    cells, seats = state.columns.cells, decode.seats
    planned, runway, last = cells.planned, cells.runway, cells.last
    ends: list[int] = []
    through: list[Seat] = []
    for seat in seats:
        slot = seat.slot
        planned[slot] = end = planned[slot] + 1
        ends.append(end)
        if end >= runway[slot]:
            if end >= seat.last:
                through.append(seat)
            else:
                state.at_edge.append(slot)
    return ends, None if state.in_flight else [last[seat.slot] for seat in seats], through


def commit_few(state: State, flight: InFlight, ends: list[int], tokens: list[int]) -> tuple[TokenBatch, list[int]]:
    """Commit a token to each row that goes on: those rows, and the indices of those that have to be looked at."""
    rows, mirror, watchers, cells = flight.rows, state.pool.cells, state.columns.watchers, state.columns.cells
    computed, last, base, alarm = cells.computed, cells.last, cells.base, cells.alarm
    seats = rows.decode.seats
    if flight.ended:
        going = [index for index, seat in enumerate(seats) if seat.slot not in flight.ended]
        seats = [seats[index] for index in going]
        ends, tokens = [[column[index] for index in going] for column in (ends, tokens)]
    marked: list[int] = []
    for index, (seat, end, token) in enumerate(zip(seats, ends, tokens, strict=True)):
        slot = seat.slot
        mirror[base[slot] + end] = last[slot]  # what the step was fed, whether it was there or came meanwhile
        computed[slot] = end
        last[slot] = token
        if end >= alarm[slot] or token in watchers:
            marked.append(index)
    return TokenBatch(seats, ends, tokens, state.version), marked
