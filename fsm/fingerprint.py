"""The digest of a whole state: what two folds of one log must agree on."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from leftfold.events.codec import encode, params_json
from leftfold.events.digest import canonical

if TYPE_CHECKING:
    from leftfold.fsm.request import Request, Seat
    from leftfold.fsm.state import InFlight, State


def digest(state: State) -> str:
    """BLAKE2b-128 over everything that can influence the future or be asked for; 32 hex digits."""
    hasher = blake2b(digest_size=16)
    hasher.update(canonical(_record(state)))
    pool = state.pool
    held = [page for page in range(len(pool)) if pool.refs[page] or pool.keys[page] is not None]
    hasher.update(pool.tokens[held].tobytes())
    return hasher.hexdigest()


def _record(state: State) -> list[Any]:
    columns, running = state.columns, state.running()
    slots = np.array([seat.slot for seat in running], np.int64)
    decoding = np.array([seat.slot for seat in running if seat.slot not in state.prefilling], np.int64)
    return [
        state.config.as_dict(),
        [state.gate.value, state.executor_present, state.incarnation, state.generation],
        [state.drain_mode, state.gate_seq, state.pause_calls, state.frozen, state.asleep, state.version, state.next_op],
        [[encode(control.event).decode(), control.barrier, control.op] for control in state.controls],
        [state.next_step, state.next_arrival, state.next_order, state.chain, state.voids],
        [state.closing_calls, state.closing_at],
        [_request(request) for request in state.live.values()],
        [[*request.key, request.arrival] for request in state.finished],
        [[request.arrival for request in state.waiting], state.waiting.overtakers],
        [list(state.tenants.served.items()), list(state.tenants.live.items())],
        [[*key, request.arrival] for key, request in state.deadlines.items()],
        [list(state.prefilling), decoding, state.at_edge, list(state.resting), state.free_slots, state.left],
        [_seat(seat) for seat in (*running, *state.stopping)],
        columns.computed[slots],
        columns.last[decoding],
        [list(state.pool.free), list(state.pool.cached), state.pool.refs],
        [key.hex() if key else None for key in state.pool.keys],
        [_step(step) for step in state.in_flight],
        [sorted(state.memo.items()), sorted(state.counts.items())],
        *([list(state.suspects.items())] if state.suspects else ()),  # so that digests of old logs stay
    ]


def _request(request: Request) -> list[Any]:
    return [
        request.rid, request.epoch, request.choice, request.arrival, request.phase.value if request.phase else "",
        request.tokens, request.prompt_len, params_json(request.params).decode(), request.priority, request.tenant,
        request.limit, request.deadline_at, request.queue_deadline_at, *request.wishes, request.reads_cache,
        request.leader.choice if request.leader else None, request.root.hex(), request.cached, request.preemptions,
        request.failures, request.want,
    ]  # fmt: skip


def _seat(seat: Seat) -> list[Any]:
    return [seat.slot, seat.order, seat.start, seat.target, seat.publishes, seat.request.arrival, seat.pages]


def _step(step: InFlight) -> list[Any]:
    rows = step.rows
    chunks = [[chunk.seat.slot, chunk.start, chunk.length, chunk.samples] for chunk in rows.chunks]
    return [step.step, step.digest, step.ended, list(step.ops), rows.decode.slots, rows.starts, rows.inputs, chunks]
