"""What `leftfold serve` can be told: plain data that the command line fills and both processes read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options of one server. None means: the engine decides (from the model, the device and free memory).

    `model`: `smollm2`, a local folder, a `.gguf` file or a hub id. `log_dir`: the log itself; None is
    `logs/<model>`. `max_num_seqs`, `max_num_batched_tokens`, `max_chunk_tokens`, `max_model_len`, `kv_tokens`,
    `page_size` in sequences or tokens; `kv_memory` in bytes; `threads` of the executor. `durability`: "strict",
    "async" or "off". `shutdown_timeout` in seconds. `max_body_bytes`: largest request body.
    `max_queued_requests`, `max_queued_tokens`: None is no limit. `max_n`: most choices of one request.
    `growth_horizon`: tokens of growth that admission leaves room for, per row that runs. `request_timeout`,
    `queue_timeout`: seconds until a request ends, or must run, at the latest (0: no limit).
    `sleep_policy`: while paused or asleep new requests "wait", or the server will "refuse" them.
    """

    model: str = "smollm2"
    host: str = "127.0.0.1"
    port: int = 8000
    log_dir: str | None = None
    api_key: str | None = None
    admin_api_key: str | None = None
    served_model_name: str | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_chunk_tokens: int | None = None
    max_model_len: int | None = None
    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None
    growth_horizon: int = 0
    kv_tokens: int | None = None
    kv_memory: int | None = None
    page_size: int | None = None
    policy: str = "fcfs"
    pipeline_depth: int = 0
    prefix_cache: bool = True
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    kernels: str | None = None
    durability: str = "async"
    shutdown_timeout: float = 2.0
    request_timeout: float = 0.0
    queue_timeout: float = 600.0
    sleep_policy: str = "wait"
    max_body_bytes: int = 16 * 1024 * 1024
    max_n: int = 128
    disable_access_log: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The options as JSON-able data, for the engine process."""
        return dataclasses.asdict(self)

    def without_keys(self) -> dict[str, Any]:
        """The options as data for whoever needs no keys."""
        return dataclasses.asdict(dataclasses.replace(self, api_key=None, admin_api_key=None))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ServeOptions:
        """The options from `to_dict`; unknown keys raise TypeError."""
        return cls(**data)
