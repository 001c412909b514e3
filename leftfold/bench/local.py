"""An engine in this process that a benchmark asks: requests in, the time of every token out."""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from leftfold.attaching import Delivery
from leftfold.bench.presets import Preset
from leftfold.builder import build_engine
from leftfold.commands.common import UsageError
from leftfold.errors import EngineError
from leftfold.events import Admit, SamplingParams
from leftfold.hub import HubError
from leftfold.options import EngineOptions


@dataclass(slots=True)
class Timeline:
    """When a request was put in and when its tokens came out, in seconds of one clock."""

    sent: float
    tokens: list[float] = field(default_factory=list)
    ended: bool = False

    @property
    def ttft(self) -> float:
        return self.tokens[0] - self.sent

    @property
    def tpot(self) -> float:
        """Seconds per token after the first."""
        return (self.tokens[-1] - self.tokens[0]) / max(1, len(self.tokens) - 1)


class LocalEngine:
    """An engine with an asynchronous log in a temporary folder; use it in a `with` statement. Raises UsageError."""

    def __init__(self, args: argparse.Namespace, preset: Preset) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="leftfold-bench-")
        self._lock = threading.Condition()
        self._timelines: dict[str, Timeline] = {}
        self._failure = ""
        begun = time.perf_counter()
        options = EngineOptions(
            model=args.model, threads=args.threads, quantization=args.quantization, max_num_seqs=preset.running,
            max_num_batched_tokens=args.max_num_batched_tokens, log_dir=f"{self._folder.name}/log",
            kv_tokens=preset.running * (preset.reach + 32) + 2048, max_model_len=preset.reach + 32,
        )  # fmt: skip
        try:
            self.engine = build_engine(options, self._deliver)
            self.engine.start()
        except (EngineError, HubError) as error:
            self._folder.cleanup()
            raise UsageError(str(error)) from None
        self.ready_seconds = time.perf_counter() - begun
        self.vocabulary = int(self.engine.config.vocab_size or 0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def ask(self, prompts: Sequence[Sequence[int]], output: int, name: str) -> list[Timeline]:
        """All prompts at once, `output` tokens each; returns when the last has ended."""
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        asked = [f"{name}-{index}" for index in range(len(prompts))]
        for rid, prompt in zip(asked, prompts, strict=True):
            self._timelines[rid] = Timeline(time.perf_counter())
            self.engine.submit(Admit, rid=rid, prompt=list(prompt), params=params)
        with self._lock:
            self._lock.wait_for(lambda: self._failure or all(self._timelines[rid].ended for rid in asked))
        if self._failure:
            raise UsageError(self._failure)
        return [self._timelines.pop(rid) for rid in asked]

    def _deliver(self, delivery: Delivery) -> None:
        now = time.perf_counter()
        with self._lock:
            for output in delivery.outputs:
                timeline = self._timelines[output.rid]
                timeline.tokens.extend([now] * len(output.tokens))
                if output.finish_reason is not None:
                    timeline.ended = True
                    if output.error is not None:
                        self._failure = str(output.error)
            self._lock.notify_all()

    def _run(self) -> None:
        try:
            self.engine.run()
        except Exception as error:  # whoever waits must hear of it
            with self._lock:
                self._failure = str(error)
                self._lock.notify_all()

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.engine.stop()
        self._thread.join()
        self._folder.cleanup()


def rates(timelines: Sequence[Timeline], prompt_tokens: int) -> dict[str, Any]:
    """Throughput of requests that were put in together."""
    begun, ended = min(t.sent for t in timelines), max(t.tokens[-1] for t in timelines)
    seconds, out = ended - begun, sum(len(t.tokens) for t in timelines)
    return {
        "duration": seconds,
        "request_throughput": len(timelines) / seconds,
        "output_throughput": out / seconds,
        "total_token_throughput": (out + prompt_tokens) / seconds,
    }
