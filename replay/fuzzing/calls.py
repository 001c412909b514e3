"""Control calls that a run may make, some of them as nobody should send them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from leftfold.replay.fuzzing.oddities import CONTROLS

CALLS: Sequence[Sequence[str]] = (
    ("FlushCache",),
    ("Pause", "Pause", "Resume"),
    ("Pause", "Resume", "Sleep", "Wake"),
    ("UpdateWeights", "FlushCache"),
    ("Reconfigure", "Call"),
    tuple(name for name in CONTROLS if name != "Shutdown"),
)
"""Kinds of control calls that a run knows."""
_TAGS: Sequence[dict[str, Any]] = ({}, {"tags": ["kv"]}, {"tags": ["weights"]}, {"tags": ["kv", "weights"]})
FIELDS: dict[str, Sequence[dict[str, Any]]] = {
    "Pause": ({"mode": "wait"}, {"mode": "wait"}, {"mode": "keep"}, {"mode": "keep"}, {"mode": "abort"}, {"mode": "?"}),
    "Sleep": (*_TAGS, *_TAGS, {"tags": []}, {"tags": ["disk"]}),
    "Wake": (*_TAGS, {"tags": ["all"]}),
    "UpdateWeights": (
        {"version": "2"},
        {"version": "3"},
        {"version": "2", "live": "keep"},
        {"source": "missing"},
        {"source": "missing", "live": "keep"},
        {"live": "perhaps"},
        {"version": ""},
    ),
    "Reconfigure": (
        {"set": {"max_running": 1}},
        {"set": {"max_running": 2, "policy": "sjf"}},
        {"set": {"max_running": 4, "max_batch_tokens": 8}},
        {"set": {"policy": "priority", "max_chunk_tokens": 2}},
        {"set": {"policy": "edf"}},
        {"set": {"policy": "spf"}},
        {"set": {"pipeline_depth": 2}},
        {"set": {"pipeline_depth": 0, "growth_horizon": 4}},
        {"set": {"prefix_cache": False}},
        {"set": {"max_queued_requests": 1}},
        {"set": {}},
        {"set": {"num_pages": 3}},
        {"set": {"max_running": 2, "page_size": 4}},
        {"set": {"max_running": 0}},
        {"set": {"policy": "nobody"}},
        {"set": {"policy": []}},
        {"set": {"speed": 9}},
    ),
    "Call": ({"verb": "profile"}, {"verb": "slow_down", "args": {"factor": 2}}),
}
"""Fields of control calls, some of them as nobody should send them."""
