"""Runs a model from the stream of execution plans, on a CPU or a CUDA device with the same code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from leftfold.events import Control, Copy, ExecutionPlan, chain_digest
from leftfold.events.digest import START
from leftfold.executor.base import NO_TOKENS, Attachment, Result, void
from leftfold.executor.config import ModelConfig
from leftfold.executor.controls import Controls
from leftfold.executor.errors import ModelError, PlanError, RowError
from leftfold.executor.mirrors import DeviceState, StepRows
from leftfold.executor.models import quantized
from leftfold.executor.models.llama import StepInput
from leftfold.executor.resident import AnyMemory, AnyModel, Resident
from leftfold.executor.sampler import Sampler
from leftfold.executor.scorer import Scorer
from leftfold.executor.weights import LoadedModel, load
from leftfold.kernels.attention import PagedLayout
from leftfold.kernels.registry import Kernels

QUANTIZATIONS = ("auto", "none", *quantized.BITS)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_dtype(dtype: str, kind: str) -> str:
    """A name in `DTYPES`: "auto" is float32 on a CPU and bfloat16 on devices of another kind. Raises `ModelError`."""
    name = ("float32" if kind == "cpu" else "bfloat16") if dtype == "auto" else dtype
    if name not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is unknown; there are: auto, {', '.join(DTYPES)}")
    return name


def resolve_quantization(quantization: str, kind: str, dtype: str, model: LoadedModel, max_len: int) -> str:
    """ "int8", "int4" or "none". "auto" is int8 on a CPU where the model's file is quantized already and no dtype is
    asked for.

    Raises `ModelError` for an unknown name, or for what cannot be.
    """
    if quantization not in QUANTIZATIONS:
        raise ModelError(f"quantization {quantization!r} is unknown; there are: {', '.join(QUANTIZATIONS)}")
    if quantization == "none":
        return "none"
    reason = quantized.unsupported(model.config, max_len)
    if not reason and kind != "cpu":
        reason = f"quantized weights run on a CPU only, not on {kind}"
    if not reason and dtype not in ("auto", "float32"):
        reason = f"dtype {dtype} is asked for"
    if quantization == "auto":
        return "int8" if model.quantized and dtype == "auto" and not reason else "none"
    if reason:
        raise ModelError(f"quantization {quantization} cannot be: {reason}")
    return quantization


class TorchExecutor:
    """Model and paged KV memory (`resident`), mirrors, sampler, control verbs (`controls`).

    `model`: a path (`weights.load`) or an opened model. `num_pages`, `page_size`: the KV memory. `max_model_len`:
    positions a row may reach. `max_running`: rows to make room for at once (more are fine). `dtype`: "auto" is
    float32 on a CPU and bfloat16 elsewhere. `quantization`: see `resolve_quantization`. `cache`: a folder that keeps
    quantized weights (None: they are made anew). `threads`: PyTorch's, for the whole process (None: as it is).
    `kernels`: implementation by operation name. Raises `ModelError`, and `KernelError` for unknown kernels.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel,
        *,
        num_pages: int,
        page_size: int,
        max_model_len: int,
        max_running: int = 1,
        dtype: str = "auto",
        quantization: str = "none",
        cache: Path | None = None,
        device: str = "cpu",
        threads: int | None = None,
        kernels: Mapping[str, str] | None = None,
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        kind = torch.device(device).type
        name = resolve_dtype(dtype, kind)
        loaded = model if isinstance(model, LoadedModel) else load(model)
        chosen = Kernels(kind, name, kernels)
        self.resident = Resident(
            loaded,
            chosen,
            dtype=DTYPES[name],
            device=device,
            max_len=max_model_len,
            num_pages=num_pages,
            page_size=page_size,
            quantization=resolve_quantization(quantization, kind, dtype, loaded, max_model_len),
            cache=cache,
        )
        self.controls = Controls(self.resident)
        self.device = torch.device(device)
        self.max_model_len = max_model_len
        self.state = DeviceState(num_pages, page_size, max_running)
        self.sampler = Sampler(chosen.get("sampling", vocabulary=loaded.config.vocab_size))
        self._digest = START
        self._failures = 0
        self._planned_failure: tuple[str, tuple[int, ...]] | None = None

    def reset(self) -> None:
        """Forget all rows and KV content, wake what sleeps, restart the digest chain. Raises what a wake does."""
        self.state.reset()
        self._digest = START
        self._failures = 0
        self.resident.clear()

    @property
    def model(self) -> AnyModel:
        return self.resident.model

    @property
    def memory(self) -> AnyMemory:
        return self.resident.memory

    @property
    def config(self) -> ModelConfig:
        return self.resident.config

    def fail_next(self, text: str, rows: tuple[int, ...] = ()) -> None:
        """Let the next step fail after its deltas, as a fault of the device would; for tests and drills."""
        self._planned_failure = (text, rows)

    def execute(self, plan: ExecutionPlan) -> Result:
        """Apply one plan. `Result.error` says what went wrong and whether to try again.

        Raises only what leaves the device unusable: then nothing works until it is set up anew.
        """
        self._digest = chain_digest(self._digest, plan)
        controls: list[tuple[int, Any, str | None]] = []
        try:
            self.state.apply_deltas(plan)
            if plan.voids < self._failures:
                return void(plan, self._digest)
            self.controls.before_step()
            with torch.inference_mode():
                self._run_operations(plan, controls)
                rows = self.state.lay_out(plan)
                tokens, attachments = self._run_rows(rows)
            self.state.commit(rows, tokens)
        except Exception as error:  # the boundary: whatever a kernel throws becomes a failed step
            if is_device_fault(error):
                raise
            self._failures += 1
            return Result(plan.step, NO_TOKENS, self._digest, _told(error), controls)
        return Result(plan.step, tokens, self._digest, None, controls, attachments)

    def _run_operations(self, plan: ExecutionPlan, controls: list[tuple[int, Any, str | None]]) -> None:
        for operation in plan.ops:
            if isinstance(operation, Control):
                controls.append(self.controls.run(operation))
                continue
            if not isinstance(operation, Copy) or operation.group != 0:
                raise PlanError(f"step {plan.step}: this executor does not know the operation {operation}")
            source, target = (torch.tensor(pages, device=self.device) for pages in (operation.src, operation.dst))
            self.memory.copy(source, target)

    def _run_rows(self, rows: StepRows) -> tuple[npt.NDArray[np.int32], list[Attachment]]:
        if self._planned_failure is not None:
            (text, culprits), self._planned_failure = self._planned_failure, None
            raise RowError(text, culprits)
        if not len(rows.slots):
            return NO_TOKENS, []
        if int(rows.positions.max()) >= self.max_model_len:
            raise PlanError(f"a row computes position {int(rows.positions.max())} of {self.max_model_len}")
        hidden = self.model.forward(self._input(rows), self.memory)
        scorer = Scorer(self.state, rows) if self.state.wanted else None
        if scorer is not None and (broken := scorer.prompts(hidden, self.model.logits)):
            raise RowError("the model's scores are not finite", tuple(broken))
        tokens = self._draw(hidden, rows, scorer)
        return tokens, [] if scorer is None else scorer.attachments()

    def _draw(self, hidden: torch.Tensor, rows: StepRows, scorer: Scorer | None) -> npt.NDArray[np.int32]:
        sampling = np.flatnonzero(rows.samples)
        if not len(sampling):
            return NO_TOKENS
        last = (np.cumsum(rows.lengths) - 1)[sampling]
        chosen = hidden.index_select(0, self._tensor(last))  # which, unlike `[…]`, wakes no other threads
        logits = self.model.logits(chosen)
        best, top = self.model.best(logits)
        unusable = ~np.isfinite(top.cpu().numpy())
        if unusable.any():
            culprits = sampling[unusable]
            raise RowError("the model's scores are not finite", tuple(culprits.tolist()))
        ends = (rows.starts + rows.lengths)[sampling]
        score = scorer.before_draw(logits, sampling) if scorer is not None else None
        try:
            drawn = self.sampler.draw(logits, self.state, rows.slots[sampling], ends, best).cpu().numpy()
        except RowError as error:
            raise RowError(str(error), tuple(sampling[list(error.rows)].tolist())) from None
        if score is not None:
            score(drawn)
        return drawn.astype(np.int32)

    def _input(self, rows: StepRows) -> StepInput:
        state, size = self.state, self.state.page_size
        owners = np.repeat(rows.slots, rows.lengths)
        places = state.table[owners, rows.positions // size] * size + rows.positions % size
        layout = PagedLayout(rows.starts, rows.lengths, state.table[rows.slots], size)
        return StepInput(self._tensor(rows.tokens), self._tensor(rows.positions), self._tensor(places), layout)

    def _tensor(self, values: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device)


def is_device_fault(error: BaseException) -> bool:
    """Whether the device itself failed. Such an error sticks: every later call on the device raises it again."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    return isinstance(error, torch.AcceleratorError) or (isinstance(error, RuntimeError) and "CUDA error" in str(error))


def _told(error: Exception) -> dict[str, Any]:
    """A failed step's error: what a plan's fault or named rows mean, and that anything else may go well again."""
    if isinstance(error, PlanError):
        return {"text": str(error), "retry": False, "rows": ()}
    if isinstance(error, RowError):
        return {"text": str(error), "retry": True, "rows": error.rows}
    return {"text": f"{type(error).__name__}: {error}", "retry": True, "rows": ()}
