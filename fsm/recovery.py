"""When the executor is lost or begins anew: what was in flight is void, live requests are back in line."""

from __future__ import annotations

from leftfold.events.digest import START
from leftfold.events.types import Started
from leftfold.fsm.columns import Columns
from leftfold.fsm.controls import lose_control, rank_anew
from leftfold.fsm.effects import LENGTH, Ack, FinishReason, Outputs
from leftfold.fsm.ending import drain_all, end_with_output
from leftfold.fsm.gate import CLOSING, GateTrigger, move_gate
from leftfold.fsm.lifecycle import Trigger, advance
from leftfold.fsm.limits import Config
from leftfold.fsm.pages import PagePool
from leftfold.fsm.request import NEVER_LOOKED, Request
from leftfold.fsm.seating import put_back
from leftfold.fsm.state import State


def lose_executor(state: State) -> None:
    """No rows until the next `Started`."""
    _void(state)
    state.executor_present = False


def start(state: State, event: Started, outputs: Outputs, acks: list[Ack]) -> None:
    """An executor is ready, with the configuration that the event carries.

    What it remembers is in `kept`: "device" for its K/V, "weights" for those that were loaded last, which only an
    executor that began anew inside its process has; such a one does not end a shutdown either. K/V of weights that are
    not there any more is worth nothing.
    """
    config = state.config if event.config is None else Config.from_dict(event.config)
    state.incarnation = event.incarnation
    _void(state)
    stale = "weights" not in event.kept and state.version != ""
    if "weights" not in event.kept:
        state.version = ""  # before anybody is told anything: what ends here ends under these weights
    if config != state.config:
        _reconfigure(state, config, outputs)
    if "device" not in event.kept or stale:
        state.pool.forget()
    state.executor_present = True
    state.chain = START
    state.voids = 0
    state.left.clear()
    state.asleep = []
    lose_control(state, acks, "the engine was started again")
    if "weights" in event.kept:
        return
    if state.gate is CLOSING:
        acks += [Ack(call, False, "superseded: the engine was started again") for call in state.closing_calls]
    move_gate(state, GateTrigger.STARTED)
    state.closing_calls, state.closing_at, state.frozen = [], 0, False


def _void(state: State) -> None:
    drain_all(state)
    for seat in list(state.running()):
        request = seat.request
        put_back(state, seat)
        _requeue(request)


def _requeue(request: Request) -> None:
    has_tokens = len(request.tokens) > request.prompt_len
    advance(request, Trigger.REQUEUE_TOKENS if has_tokens else Trigger.REQUEUE)


def _reconfigure(state: State, config: Config, outputs: Outputs) -> None:
    """A start with other limits: nothing is seated, so pool and columns begin anew; what cannot fit any more ends."""
    state.config = config
    state.pool.forget()
    journal = state.pool.journal
    state.pool = PagePool(config.num_pages, config.page_size)
    state.pool.journal = journal
    state.columns = Columns(config.slots)
    state.free_slots = list(range(config.slots - 1, -1, -1))
    state.by_slot = [None] * config.slots
    for request in state.live.values():
        request.keys = []
        request.seen, request.looked = None, NEVER_LOOKED  # the new pool counts anew
        request.use_cache(config.prefix_cache)
        request.limit = min(request.limit, config.max_model_len, config.capacity + 1)
    rank_anew(state)
    for request in list(state.waiting):
        _end_if_too_long(state, request, outputs)


def _end_if_too_long(state: State, request: Request, outputs: Outputs) -> None:
    known = len(request.tokens)
    if known < request.limit:
        return
    if known > request.prompt_len:
        end_with_output(state, request, LENGTH, outputs)
    else:
        text = f"the prompt has {known} tokens, the restarted engine holds {request.limit - 1}"
        end_with_output(state, request, FinishReason.ERROR, outputs, {"code": "failed", "text": text})
