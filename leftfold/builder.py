"""Builds an engine from options: finds the model, sizes the KV memory, loads the executor, opens the log."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import leftfold
from leftfold.attaching import Delivery
from leftfold.cache import cache_root
from leftfold.engine import Engine
from leftfold.errors import ConfigurationError
from leftfold.events import EventLog, LogError, LogLocked, SnapshotPassedOver, TornTail
from leftfold.events.compaction import Retention
from leftfold.events.gaps import gaps, note_gap
from leftfold.executor.config import ModelConfig
from leftfold.executor.errors import ExecutorError
from leftfold.executor.models import quantized
from leftfold.executor.models.llama import KVMemory
from leftfold.executor.torch_executor import DTYPES, TorchExecutor, resolve_dtype, resolve_quantization
from leftfold.executor.weights import LoadedModel, load
from leftfold.fsm import Config, ConfigError
from leftfold.hub import ResolvedModel, resolve
from leftfold.identity import check_beginning, check_model, identity
from leftfold.keeping import Keeper, KeptLog, NoLog
from leftfold.kernels.attention import SCORE_BYTES
from leftfold.kernels.registry import KernelError, parse_overrides
from leftfold.options import EngineOptions
from leftfold.replay import policies
from leftfold.replay.errors import ReplayError

logger = logging.getLogger("leftfold.builder")

PAGE_SIZE = 16
MAX_NUM_SEQS = 64
TOKENS_PER_SEQUENCE = {"cpu": 256, "cuda": 512}
"""KV tokens per running request that the default size provides."""
SHARE = {"cpu": 0.25, "cuda": 0.85}
"""Share that the default KV size may take of what weights and work leave free."""
STEP_TOKENS = {"cpu": 128, "whole": 256, "cuda": 8192}
"""Default tokens per step, by device; "whole": of quantized models on a CPU. Whoever is being answered waits for whole
steps, so they should be short: with the default model on two cores, one of 256 takes 0.05 s. In steps of 512 prompts
are read no sooner, and each takes twice as long.
"""


@dataclass(frozen=True, slots=True)
class Machine:
    """Where and how a model runs. `free`: bytes of memory that are free there before it is loaded; `quantization`:
    "int8" or "none".
    """

    device: str
    dtype: str
    free: int
    quantization: str = "none"


def build_engine(options: Any, on_effects: Callable[[Delivery], None] | None = None) -> Engine:
    """An engine that is not started yet. `options`: `EngineOptions`, or any object with options by those names.

    Raises HubError (no such model), ConfigurationError (options that cannot be met, a model that cannot be read, a
    log that is in use or damaged); nothing is left half-written then.
    """
    chosen = EngineOptions.of(options)
    _retention(chosen.log_retention)
    for name in chosen.allow_policy:
        _policy(name, "--allow-policy", tried=False)  # its log has to be folded as it was made
    if chosen.policy is not None:
        _policy(chosen.policy)
    found = resolve(chosen.model)
    own = _identity(found)
    log = open_existing_log(chosen, found.name, own)  # before anything is loaded, so that what is wrong is known soon
    try:
        executor, config = _load(chosen, found)
        log = log or open_log(chosen, found.name)
    except BaseException:
        if log is not None:
            log.close()
        raise
    return Engine(
        log=log,
        executor=executor,
        config=config,
        model=own,
        on_effects=on_effects,
        code=leftfold.__version__,
        resume=chosen.resume,
        log_logprobs=chosen.log_logprobs,
        on_log_failure=chosen.on_log_failure,
    )


def _identity(found: ResolvedModel) -> str:
    try:
        return identity(found)
    except OSError as error:
        raise ConfigurationError(f"the model at {found.path} cannot be read: {error}") from error


def load_model(options: Any) -> tuple[TorchExecutor, Config]:
    """The executor of a model and the limits that fit it. Raises HubError, ConfigurationError."""
    chosen = EngineOptions.of(options)
    return _load(chosen, resolve(chosen.model))


def _load(chosen: EngineOptions, found: ResolvedModel) -> tuple[TorchExecutor, Config]:
    try:
        weights = load(found.path)
        machine = _quantized(machine_of(chosen), chosen, weights)
        config = size_config(chosen, weights.config, machine)
        executor = TorchExecutor(
            weights,
            num_pages=config.num_pages,
            page_size=config.page_size,
            max_model_len=config.max_model_len,
            dtype=machine.dtype,
            quantization=machine.quantization,
            cache=cache_root() / "converted",
            device=machine.device,
            threads=chosen.threads,
            kernels=parse_overrides(chosen.kernels) if chosen.kernels is not None else None,
        )
    except (ExecutorError, ConfigError, KernelError) as error:
        raise ConfigurationError(str(error)) from error
    except (MemoryError, RuntimeError) as error:  # torch says "not enough memory" as a RuntimeError
        raise ConfigurationError(f"the model or its KV memory cannot be placed on {machine.device}: {error}") from error
    return executor, config


def load_executor(options: EngineOptions) -> TorchExecutor:
    """The executor that an engine with these options has. Raises HubError, ConfigurationError."""
    return _load(options, resolve(options.model))[0]


def open_existing_log(options: EngineOptions, name: str, own: str) -> Keeper | None:
    """The log that is there already, locked, checked and of model `own`; None if there is none yet.

    Raises ConfigurationError.
    """
    if options.durability == "off" or not _log_path(options, name).exists():
        return None
    log, path = open_log(options, name), _log_path(options, name)
    try:
        with _told(path):
            fold, records = log.begin()
        if fold.last is not None:
            check_model(fold.last, own)
        elif isinstance(log, KeptLog):
            check_beginning(log, own)
    except (LogError, ReplayError) as error:
        log.close()
        raise ConfigurationError(f"the log {path} cannot be read: {error}") from error
    except ConfigurationError:
        log.close()
        raise
    return log


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """What a log warns of (a torn tail, a snapshot that is passed over) is logged."""
    with warnings.catch_warnings(record=True) as caught:
        for kind in (TornTail, SnapshotPassedOver):
            warnings.simplefilter("always", kind)
        try:
            yield
        finally:
            for warning in caught:
                logger.warning("%s: %s", path, warning.message)


def _log_path(options: EngineOptions, name: str) -> Path:
    return Path(options.log_dir) if options.log_dir is not None else Path("logs") / name


def open_log(options: EngineOptions, name: str) -> NoLog | KeptLog:
    """The log that the options ask for; a torn tail is cut off and said so, as is a gap. Raises ConfigurationError."""
    if options.durability == "off":
        return NoLog()
    path = _log_path(options, name)
    try:
        with _told(path):
            log = EventLog.open(path, segment_bytes=options.log_segment_bytes)
    except LogLocked as error:
        raise ConfigurationError(str(error)) from error
    except (LogError, OSError) as error:
        if options.on_log_failure == "serve" and isinstance(error, OSError) and not isinstance(error, LogError):
            logger.error("the log %s cannot be opened, so none is kept: %s", path, error)
            return NoLog(f"{path} cannot be opened: {error.strerror or error}")
        raise ConfigurationError(f"the log {path} cannot be opened: {error}") from error
    _tell_gaps(path, log.next_seq - 1)
    return KeptLog(
        log,
        path,
        snapshot_every=options.snapshot_every,
        retention=_retention(options.log_retention),
        strict=options.durability == "strict",
    )


def _tell_gaps(path: Path, end: int) -> None:
    """Say once that events are missing after the log's last record, `end`, and note there that it goes on."""
    try:
        for gap in gaps(path):
            if gap.resumed is None:
                here = gap._replace(resumed=end)
                logger.warning("%s: %s", path, here)
                note_gap(path, here)
    except OSError as error:
        logger.warning("%s: a note of a gap cannot be read or written: %s", path, error)


def _retention(text: str) -> Retention:
    try:
        return Retention.parse(text)
    except ValueError as error:
        raise ConfigurationError(f"log_retention: {error}") from error


def size_config(options: EngineOptions, model: ModelConfig, machine: Machine) -> Config:
    """The engine's limits, resolved. Raises ConfigurationError for limits that the model or the memory cannot meet."""
    page_size = options.page_size or PAGE_SIZE
    max_model_len = options.max_model_len or model.max_positions
    if max_model_len > model.max_positions:
        raise ConfigurationError(f"--max-model-len {max_model_len} is beyond the model's {model.max_positions}")
    max_running = options.max_num_seqs or MAX_NUM_SEQS
    step_tokens = options.max_num_batched_tokens or _step_tokens(machine, max_running)
    bits = quantized.BITS.get(machine.quantization)
    taken = weight_bytes(model, machine.dtype) if bits is None else quantized.weight_bytes(model, bits)
    room = replace(machine, free=max(0, machine.free - taken - work_bytes(model, step_tokens, max_running)))
    tokens = _kv_tokens(options, model, room, page_size, max_running, max_model_len)
    if tokens < page_size:
        raise ConfigurationError(f"KV memory for {tokens} tokens is less than one page of {page_size}")
    if tokens < max_model_len:
        logger.warning(
            "KV memory holds %d tokens, less than max_model_len %d: longer requests end early or are refused",
            tokens // page_size * page_size,
            max_model_len,
        )
    cuda, depth = machine.device.startswith("cuda"), options.pipeline_depth
    if depth is None:  # on a CPU planning takes under 1 % of a step, and a plan made early knows less
        depth = 1 if cuda else 0
    return Config(
        num_pages=tokens // page_size,
        page_size=page_size,
        max_running=max_running,
        max_batch_tokens=step_tokens,
        max_model_len=max_model_len,
        max_chunk_tokens=options.max_chunk_tokens,
        pipeline_depth=depth,
        policy=_policy(options.policy or ("fcfs" if cuda else "spf")),
        prefix_cache=options.prefix_cache,
        max_queued_requests=options.max_queued_requests,
        max_queued_tokens=options.max_queued_tokens,
        growth_horizon=options.growth_horizon,
        vocab_size=model.vocab_size,
    )


def _step_tokens(machine: Machine, max_running: int) -> int:
    """As many as the device does soon, and room for prompts beside a token for each row."""
    kind = machine.device.partition(":")[0]
    return max(STEP_TOKENS["whole" if machine.quantization in quantized.BITS else kind], 2 * max_running)


def _policy(name: str, option: str = "--policy", tried: bool = True) -> str:
    try:
        return policies.load(name, tried=tried)
    except policies.PolicyError as error:
        raise ConfigurationError(f"{option}: {error}") from error


def weight_bytes(model: ModelConfig, dtype: str) -> int:
    """Bytes that the weights will take: the matrices, the head with its own copy where it is tied."""
    heads = model.head_dim * (2 * model.num_heads + 2 * model.num_kv_heads)
    layer = model.hidden_size * (heads + 3 * model.intermediate_size)
    return (2 * model.vocab_size * model.hidden_size + model.num_layers * layer) * DTYPES[dtype].itemsize


def work_bytes(model: ModelConfig, step_tokens: int, rows: int) -> int:
    """Bytes that a step may take beside weights and KV memory, roughly: activations, scores, attention's scratch."""
    activations = step_tokens * (4 * model.intermediate_size + 8 * model.hidden_size) * 4
    scores = 4 * rows * model.vocab_size * 4
    return activations + scores + 8 * SCORE_BYTES


def _kv_tokens(
    options: EngineOptions, model: ModelConfig, machine: Machine, page_size: int, max_running: int, longest: int
) -> int:
    """Tokens of KV memory: as asked, or enough for every row at a modest length and one at full, if memory allows."""
    each = _bytes_per_token(model, machine, page_size)
    kind = machine.device.partition(":")[0]
    if options.kv_tokens is not None and options.kv_memory is not None:
        raise ConfigurationError("--kv-tokens and --kv-memory say the same thing: give one of them")
    if options.kv_tokens is not None:
        tokens = options.kv_tokens
    elif options.kv_memory is not None:
        tokens = options.kv_memory // each
        if tokens < page_size:
            raise ConfigurationError(
                f"--kv-memory {options.kv_memory} is less than one page of {page_size} tokens, {page_size * each} bytes"
            )
    else:
        wanted = max(longest + page_size, max_running * min(longest, TOKENS_PER_SEQUENCE[kind]))
        return max(page_size, min(wanted, int(machine.free * SHARE[kind]) // each))
    if tokens * each > machine.free:
        raise ConfigurationError(
            f"KV memory for {tokens} tokens takes {tokens * each >> 20} MiB, but only {machine.free >> 20} MiB are "
            "free beside the weights and the work of a step (less of it with a lower --max-num-batched-tokens)"
        )
    return tokens


def _bytes_per_token(model: ModelConfig, machine: Machine, page_size: int) -> int:
    if machine.quantization in quantized.BITS:
        return -(-quantized.QuantizedMemory.bytes_per_page(model, page_size) // page_size)
    return KVMemory.bytes_per_page(model, 1, DTYPES[machine.dtype])


def _quantized(machine: Machine, options: EngineOptions, model: LoadedModel) -> Machine:
    kind, reach = machine.device.partition(":")[0], options.max_model_len or model.config.max_positions
    chosen = resolve_quantization(options.quantization, kind, options.dtype, model, reach)
    return replace(machine, quantization=chosen)


def machine_of(options: EngineOptions) -> Machine:
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = device.partition(":")[0]
    if kind not in SHARE:
        raise ConfigurationError(f"device {device!r} is unknown: choose auto, cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError("--device cuda: PyTorch finds no CUDA device here")
    free = torch.cuda.mem_get_info(torch.device(device))[0] if kind == "cuda" else free_memory()
    return Machine(device, resolve_dtype(options.dtype, kind), free)


def free_memory() -> int:
    """Bytes of main memory that can be had without swapping."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass  # not Linux: ask for the physical memory instead
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


__all__ = [
    "Machine", "build_engine", "load_executor", "open_existing_log", "open_log", "size_config", "weight_bytes",
    "work_bytes",
]  # fmt: skip
