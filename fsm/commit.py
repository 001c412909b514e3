"""What a step's result does: tokens are committed, full pages published, rows moved on or ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from leftfold.events.plan import Column, IntArray, as_list
from leftfold.fsm import few
from leftfold.fsm.controls import lose_control
from leftfold.fsm.effects import LENGTH, STOP, Ack, FinishReason, Output, Outputs, TokenBatch, usage_of
from leftfold.fsm.ending import drain, drain_all, end, end_with_output
from leftfold.fsm.lifecycle import CHUNK, PREFILLED, Trigger, advance
from leftfold.fsm.limits import MAX_TOKEN
from leftfold.fsm.pages import Entry
from leftfold.fsm.prefix import extend_keys, page_key
from leftfold.fsm.recovery import lose_executor
from leftfold.fsm.request import Request, Seat
from leftfold.fsm.rows import ChunkRow, items
from leftfold.fsm.seating import begin_decoding, rewind
from leftfold.fsm.state import InFlight, State

_NO_TOKENS = np.empty(0, np.int64)
_INT32 = np.dtype(np.int32)
_INT = {int}

MAX_LONE_FAILURES = 3
"""Failed steps in which a request was the only row, after which it is taken for the culprit."""


def forward_done(state: State, event: Any, outputs: Outputs, acks: list[Ack]) -> None:
    """Fold a `ForwardDone`, whose fields may hold anything. One of a step that is not in flight is a no-op; one that is
    wrong loses the executor.
    """
    in_flight = state.in_flight
    if not in_flight or not in_flight[0].step <= event.step <= in_flight[-1].step:
        state.count("ignored")
        return
    flight = in_flight[0]
    tokens = _attested(state, flight, event)
    if tokens is None:
        lose_executor(state)
        lose_control(state, acks, "the executor was lost")
    elif event.error is not None:
        if any(state.controls and state.controls[0].op in step.ops for step in in_flight):
            lose_control(state, acks, "the step that carried it out failed")
        _fail(state, event.error, outputs)
    else:
        in_flight.popleft()
        state.counts["steps"] += 1
        _commit(state, flight, tokens, outputs)
        if flight.ended:
            drain(state, flight)


def _attested(state: State, flight: InFlight, event: Any) -> Column | None:
    """The result's tokens if it is the oldest step's, of the right plan and of the right count."""
    if event.step != flight.step or (event.digest is not None and event.digest != flight.digest):
        return None
    if event.error is not None:
        return _NO_TOKENS
    tokens = _tokens(event.tokens)
    ended = event.ended
    if tokens is None or (ended if type(ended) is tuple else _holds(ended)):
        return None
    if event.counts is not None:
        tokens = _firsts(state, flight, tokens, event.counts)
    return tokens if tokens is not None and len(tokens) == flight.expected else None


def _holds(value: object) -> bool:
    """Whether a field that may be a list or an array holds anything."""
    return value.size > 0 if isinstance(value, np.ndarray) else bool(value)


def _firsts(state: State, flight: InFlight, tokens: Column, counts: Any) -> Column | None:
    """The first token of each sampling row, as if they came one by one: none follows the one that ends a row.

    A row of width 1 has no K/V for a second token, so what brings more to a row that goes on is wrong.
    """
    many = counts.ndim > 0 if isinstance(counts, np.ndarray) else isinstance(counts, Sequence)
    given: list[Any] = [*counts] if many else []
    plain = all(isinstance(count, (int, np.integer)) and count >= 1 for count in given)
    if not plain or len(given) != flight.expected or sum(given) != len(tokens):
        return None
    listed = as_list(tokens)
    firsts = [listed[at] for at in accumulate([0, *given[:-1]])] if given else listed
    sampling = [chunk for chunk in flight.rows.chunks if chunk.samples]
    ends = [*as_list(flight.rows.ends), *(chunk.start + chunk.length for chunk in sampling)]
    seats = [*flight.rows.decode.seats, *(chunk.seat for chunk in sampling)]
    for seat, token, at, count in zip(seats, firsts, ends, given, strict=True):
        goes_on = seat.slot not in flight.ended and _reason(seat.request, token, at) is None
        if count > 1 and goes_on:
            return None
    return firsts


def _tokens(raw: object) -> Column | None:
    """Token ids, int64 or a list where they are few; None for what are none."""
    if type(raw) is np.ndarray and raw.dtype is _INT32 and raw.ndim == 1:
        if len(raw) > few.FEW:
            return None if raw.item(raw.argmin()) < 0 else raw.astype(np.int64)
        listed: list[int] = raw.tolist()
        return None if listed and min(listed) < 0 else listed
    if type(raw) is list and 0 < len(raw) <= few.FEW and set(map(type, raw)) == _INT:  # as it is read from a log
        return [*raw] if min(raw) >= 0 and max(raw) <= MAX_TOKEN else None
    try:
        tokens = np.asarray(raw)
    except (TypeError, ValueError, OverflowError):
        return None
    if not tokens.size:
        return _NO_TOKENS
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or (tokens < 0).any() or (tokens > MAX_TOKEN).any():
        return None
    return tokens.astype(np.int64)


def _commit(state: State, flight: InFlight, tokens: Column, outputs: Outputs) -> None:
    rows = flight.rows
    over: list[tuple[Request, FinishReason]] = []
    decoded = len(rows.decode.seats)
    if decoded:
        _commit_decode(state, flight, tokens[:decoded] if rows.chunks else tokens, outputs, over)
    if rows.chunks:
        _commit_chunks(state, flight, as_list(tokens[decoded:]), outputs, over)
    if over:
        end(state, over)
    if state.suspects:
        _clear(state, flight)


def _commit_decode(
    state: State, flight: InFlight, tokens: Column, outputs: Outputs, over: list[tuple[Request, FinishReason]]
) -> None:
    ends = flight.rows.ends
    if isinstance(ends, list):
        batch, marked = few.commit_few(state, flight, ends, as_list(tokens))
    else:
        batch, marked = _commit_many(state, flight, ends, np.asarray(tokens))
    if marked:
        _look_at(state, batch, marked)
    if batch.ended:
        over += [(batch.seats[index].request, reason) for index, (reason, _) in batch.ended.items()]
    state.counts["generation_tokens"] += len(batch.seats)
    outputs.parts.append(batch)


def _commit_many(state: State, flight: InFlight, computed: IntArray, tokens: IntArray) -> tuple[TokenBatch, list[int]]:
    """As `few.commit_few`, by column."""
    rows, columns = flight.rows, state.columns
    seats: Sequence[Seat] = rows.decode.seats
    slots = rows.decode.slots
    inputs = columns.last[slots] if rows.inputs is None else np.asarray(rows.inputs)  # None: a step brought them since
    if flight.ended:
        over = rows.decode.indices([state.by_slot[slot] for slot in flight.ended])
        going = np.ones(len(seats), np.bool_)
        going[over] = False
        kept = rows.decode.without(over)
        seats, slots, computed, inputs, tokens = kept.seats, kept.slots, computed[going], inputs[going], tokens[going]
    state.pool.behind[columns.base[slots] + computed] = inputs
    columns.computed[slots] = computed
    columns.last[slots] = tokens
    marked = computed >= columns.alarm[slots]
    if columns.watchers:
        marked |= columns.watch.take(tokens, None, None, "clip")
    return TokenBatch(seats, computed, tokens, state.version), marked.nonzero()[0].tolist()


def _look_at(state: State, batch: TokenBatch, marked: Sequence[int]) -> None:
    """Rows that filled a page, reached their limit or may have met a stop id, one by one; `batch` notes who ends.

    A row that filled a page publishes it and goes on with the next one, if that is granted yet.
    """
    cells, size, seats = state.columns.cells, state.config.page_size, batch.seats
    raw, alarm, base, width = state.pool.raw, cells.alarm, cells.base, size * 4
    positions, tokens = items(batch.positions), items(batch.tokens)
    full: list[Entry] = []
    for index in marked:
        seat, at, token = seats[index], positions[index], tokens[index]
        final = seat.final
        if at == seat.edge:
            pages, parent, number = seat.pages, seat.parent, at // size
            if parent is not None:
                page = pages[number - 1]
                begin = page * width
                seat.parent = key = page_key(parent, raw[begin : begin + width])
                full.append((page, key, parent if number > 1 else None))
            if number < len(pages):
                base[seat.slot] = pages[number] * size - at
            seat.edge = edge = at + size
            alarm[seat.slot] = edge if edge < final else final
        if at >= final or token in seat.stops:
            reason = _reason(seat.request, token, at)
            if reason is not None:
                batch.ended[index] = (reason, usage_of(seat.request, at + 1 - seat.request.prompt_len))
    if full:  # in the order of rows: of equal pages the first one is found from now on
        state.pool.publish(full)


def _commit_chunks(
    state: State, flight: InFlight, tokens: list[int], outputs: Outputs, over: list[tuple[Request, FinishReason]]
) -> None:
    sampled = iter(tokens)
    for chunk in flight.rows.chunks:
        token = next(sampled) if chunk.samples else None
        if chunk.seat.slot in flight.ended or not chunk.length:
            continue
        _store_chunk(state, chunk)
        request = chunk.seat.request
        state.counts["prompt_tokens"] += chunk.length
        if token is None:
            advance(request, CHUNK)
            continue
        at = chunk.start + chunk.length
        advance(request, PREFILLED)
        begin_decoding(state, chunk.seat, token, at)
        reason = _reason(request, token, at)
        usage = None if reason is None else usage_of(request, at + 1 - request.prompt_len)
        outputs.parts.append(
            Output(request.rid, request.epoch, request.choice, at, (token,), reason, None, usage, state.version)
        )
        state.counts["generation_tokens"] += 1
        if reason is not None:
            over.append((request, reason))


def _store_chunk(state: State, chunk: ChunkRow) -> None:
    """Mirror a chunk's tokens into its pages, and publish those that it filled."""
    size, seat = state.config.page_size, chunk.seat
    end = chunk.start + chunk.length
    first, full = chunk.start // size, end // size
    state.pool.store(seat.pages, chunk.start, chunk.tokens)
    state.columns.cells.computed[seat.slot] = end
    if seat.publishes and full > first:
        request = seat.request
        keys = request.keys
        if full > len(keys):
            extend_keys(keys, request.root, request.tokens, full, size)
        parents = keys[first - 1 : full] if first else (None, *keys[:full])
        state.pool.publish(zip(seat.pages[first:full], keys[first:full], parents, strict=False))


def _reason(request: Request, token: int, at: int) -> FinishReason | None:
    """Why a request ends with `token` at position `at`, if it does."""
    generated = at + 1 - request.prompt_len
    if token in request.stops and generated >= request.params.min_tokens:
        return STOP
    return LENGTH if at + 1 >= request.limit else None


def _fail(state: State, told: Any, outputs: Outputs) -> None:
    """This step and all later ones are void: named rows end, the others keep what is committed and run again.

    With `apart` each of the others is a suspect from now on, and runs alone (fsm/planner.py) until it is cleared.
    """
    error: Mapping[str, Any] = told if isinstance(told, Mapping) else {"text": told}
    flight = state.in_flight[0]
    gone = set(flight.ended)
    seats, ends = _seats(flight), _ends(flight)
    drain_all(state)
    rewind(state)
    state.voids += 1
    state.count("failed_steps")
    named = error.get("rows")
    rows = named if isinstance(named, Sequence) else ()
    culprits = {index for index in rows if isinstance(index, int) and 0 <= index < len(seats)}
    if not error.get("retry", False) and not culprits:
        culprits = set(range(len(seats)))
    failed = {"code": "failed", "text": str(error.get("text", "the step failed"))}
    alone, apart = sum(seat.slot not in gone for seat in seats) == 1, error.get("apart", False)
    for index, seat in enumerate(seats):
        if seat.slot in gone:
            continue
        request = seat.request
        request.failures += alone
        if index in culprits or request.failures >= MAX_LONE_FAILURES:
            end_with_output(state, request, FinishReason.ERROR, outputs, failed)
        else:
            advance(request, Trigger.RETRY)
            if apart:
                state.suspects[request.key] = ends[index]


def _clear(state: State, flight: InFlight) -> None:
    """Suspects that a step got past where they were when steps failed are suspects no more."""
    for seat in _seats(flight):
        key = seat.request.key
        if seat.slot not in flight.ended and state.columns.computed[seat.slot] >= state.suspects.get(key, MAX_TOKEN):
            del state.suspects[key]


def _seats(flight: InFlight) -> Sequence[Seat]:
    return [*flight.rows.decode.seats, *(chunk.seat for chunk in flight.rows.chunks if chunk.length)]


def _ends(flight: InFlight) -> Sequence[int]:
    """The position behind what the step computes, for each of `_seats`."""
    chunks = [chunk.start + chunk.length for chunk in flight.rows.chunks if chunk.length]
    return [*as_list(flight.rows.ends), *chunks]
