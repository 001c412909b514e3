"""What an engine can be told, whoever builds it; the server's options hold the same names and more."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any

from leftfold.checking import Functions, Named, OneOf, Threads, Whole, check

MOST_RUNNING = 1 << 16
MOST_AHEAD = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options of one engine. None means: decided from the model, the device and free memory.

    `model`: `smollm2`, a local folder, a `.gguf` file or a hub id. `log_dir`: the log itself; None is
    `logs/<model>`. `kv_tokens`, `page_size`, `max_*` in tokens or sequences; `kv_memory` in bytes. `threads` of the
    executor. `growth_horizon`: tokens of growth that admission leaves room for, per row that runs. `durability`:
    nothing is told before its event is on disk ("strict"), or with the operating system and synced soon ("async"), or
    no log is kept ("off"). `on_log_failure`: "stop" admitting while the log cannot be written, or "serve" on.
    `log_segment_bytes`: size at which a segment is closed. `log_retention`: how much of the log is kept beyond what a
    recovery needs, such as "7d" or "10GiB"; "none": everything. `snapshot_every`: events between snapshots, 0 for none.
    `resume`: requests that were live when the log ended go on; else they are aborted at the start. `quantization`:
    "int8", "int4", "none", or "auto": int8 on a CPU for files that are quantized already. `log_logprobs`: scores that
    clients were told are in the log, too. `pipeline_depth` None: 1 on CUDA, 0 on a CPU. `policy` None: "fcfs" on
    CUDA, "spf" on a CPU. `allow_policy`: policies of a user's own (module:function) that the log was made with. Raises
    ConfigurationError for a value of another type, or out of its range.
    """

    model: Annotated[str, Named()] = "smollm2"
    log_dir: Annotated[str | None, Named()] = None
    max_num_seqs: Annotated[int | None, Whole(1, MOST_RUNNING)] = None
    max_num_batched_tokens: Annotated[int | None, Whole()] = None
    max_chunk_tokens: Annotated[int | None, Whole()] = None
    max_model_len: Annotated[int | None, Whole()] = None
    max_queued_requests: Annotated[int | None, Whole()] = None
    max_queued_tokens: Annotated[int | None, Whole()] = None
    growth_horizon: Annotated[int, Whole(0)] = 0
    kv_tokens: Annotated[int | None, Whole()] = None
    kv_memory: Annotated[int | None, Whole()] = None
    page_size: Annotated[int | None, Whole()] = None
    policy: Annotated[str | None, Named()] = None
    allow_policy: Annotated[list[str], Functions()] = field(default_factory=list)
    pipeline_depth: Annotated[int | None, Whole(0, MOST_AHEAD)] = None
    prefix_cache: bool = True
    dtype: str = "auto"
    quantization: str = "auto"
    device: str = "auto"
    threads: Annotated[int | None, Threads()] = None
    kernels: Annotated[str | None, Named()] = None
    durability: Annotated[str, OneOf(("off", "async", "strict"))] = "async"
    on_log_failure: Annotated[str, OneOf(("stop", "serve"))] = "stop"
    log_segment_bytes: Annotated[int, Whole(4096)] = 64 << 20
    log_retention: str = "none"
    snapshot_every: Annotated[int, Whole(0)] = 20_000
    resume: bool = True
    log_logprobs: bool = False

    def __post_init__(self) -> None:
        check(self)

    @classmethod
    def of(cls, options: Any) -> EngineOptions:
        """The engine's part of any object that has options by these names."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: getattr(options, name) for name in names if hasattr(options, name)})
