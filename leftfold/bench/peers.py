"""Schedulers of other engines, measured as their own event loops call them; only what is installed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from time import perf_counter
from typing import Any

PAGE = 16
PROMPT = 64
STEPS = 200
WARM_UP = 20


def installed() -> Mapping[str, Callable[[int], float]]:
    """Peers by name: each takes a number of rows and gives its median µs per decode step."""
    return {"tokenspeed": tokenspeed} if find_spec("tokenspeed_scheduler") else {}


def tokenspeed(rows: int) -> float:
    """Plan, read the batch, report one token a row to the C++ scheduler of the PyPI package `tokenspeed-scheduler`."""
    import tokenspeed_scheduler as peer

    scheduler = _tokenspeed_scheduler(peer, rows)
    times = []
    for number in range(STEPS):
        begun = perf_counter()
        batch = scheduler.next_execution_plan().forward[0]
        rids, _, _ = batch.request_ids, batch.input_lengths, batch.block_tables_arrays
        done = peer.ExecutionEvent()
        for rid in rids:
            _tokenspeed_result(peer, done, rid, number % 1000 + 7)
            reserve = peer.ForwardEvent.UpdateReserveNumTokens()
            reserve.request_id = rid
            reserve.reserve_num_tokens_in_next_schedule_event = 1
            done.add_event(reserve)
        scheduler.advance(done)
        times.append(perf_counter() - begun)
        if len(rids) != rows:
            raise RuntimeError(f"the peer planned {len(rids)} rows, not {rows}")
    return round(statistics.median(times[WARM_UP:]) * 1e6, 2)


def _tokenspeed_result(peer: Any, event: Any, rid: str, token: int) -> None:
    result = peer.ForwardEvent.ExtendResult()
    result.request_id = rid
    result.tokens = [token]
    event.add_event(result)


def _tokenspeed_scheduler(peer: Any, rows: int) -> Any:
    """A scheduler whose `rows` requests all decode."""
    config = peer.SchedulerConfig()
    pages = rows * (PROMPT + STEPS + 64) // PAGE + 4096
    settings = {
        "prefix_granularity": PAGE, "max_scheduled_tokens": 8192, "max_batch_size": rows, "num_device_pages": pages,
        "num_snapshot_pages": 1, "disable_l2_cache": True, "decode_input_tokens": 1,
    }  # fmt: skip
    for name, value in settings.items():
        setattr(config, name, value)
    config.cache_groups = [
        peer.CacheGroupConfig(group_id="full", block_granularity=PAGE, total_pages=pages, attn_kind=peer.AttnKind.Full)
    ]
    scheduler = peer.Scheduler(config)
    scheduler.submit_requests([_tokenspeed_request(peer, index) for index in range(rows)])
    for _ in range(1000):
        if scheduler.decoding_size() == rows:
            return scheduler
        plan = scheduler.next_execution_plan()
        if plan.forward:
            batch, done = plan.forward[0], peer.ExecutionEvent()
            for rid in batch.request_ids[: batch.num_extends()]:
                _tokenspeed_result(peer, done, rid, 5)
            scheduler.advance(done)
    raise RuntimeError("the peer did not finish its prefill in 1,000 plans")


def _tokenspeed_request(peer: Any, index: int) -> Any:
    request = peer.RequestSpec()
    request.request_id = f"r{index}"
    request.tokens = [(index * 7919 + position) % 50_000 for position in range(PROMPT)]
    return request
