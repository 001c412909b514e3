"""Prometheus metrics under the field's names. Gauges are read from the engine's state at scrape time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_LABELS = ("model_name", "engine")
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_ITL = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20)
_E2E = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)


class Metrics:
    """Counters and histograms of one server; `observe_engine` sets the gauges from the engine's statistics."""

    def __init__(self, model_name: str, engine: str = "0") -> None:
        self.registry = CollectorRegistry()
        self._values = {"model_name": model_name, "engine": engine}
        self._running = self._gauge("num_requests_running", "Requests that hold a slot.")
        self._waiting = self._gauge("num_requests_waiting", "Requests that wait for a slot, pages or budget.")
        self._kv_usage = self._gauge("kv_cache_usage_perc", "Share of KV pages that requests hold (1 is all).")
        self._pages = Gauge("leftfold:kv_pages", "KV pages by use.", (*_LABELS, "use"), registry=self.registry)
        self._preemptions = self._gauge("num_preemptions_total", "Preemptions since the engine started.")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that were answered.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated for clients.")
        self._success = Counter(
            "leftfold:request_success", "Choices that ended, by reason.", (*_LABELS, "finished_reason"),
            registry=self.registry,
        )  # fmt: skip
        self._rejected = Counter(
            "leftfold:admission_rejections", "Requests the engine refused.", (*_LABELS, "reason"),
            registry=self.registry,
        )  # fmt: skip
        self.time_to_first_token = self._histogram("time_to_first_token_seconds", "Until the first token.", _TTFT)
        self.inter_token_latency = self._histogram("inter_token_latency_seconds", "Between two tokens.", _ITL)
        self.e2e_latency = self._histogram("e2e_request_latency_seconds", "Until a choice ended.", _E2E)

    def _gauge(self, name: str, text: str) -> Any:
        return Gauge(f"leftfold:{name}", text, _LABELS, registry=self.registry).labels(**self._values)

    def _counter(self, name: str, text: str) -> Any:
        return Counter(f"leftfold:{name}", text, _LABELS, registry=self.registry).labels(**self._values)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Any:
        name = f"leftfold:{name}"
        return Histogram(name, text, _LABELS, buckets=buckets, registry=self.registry).labels(**self._values)

    def finished(self, reason: str, seconds: float) -> None:
        """A choice has ended with one of the engine's finish reasons."""
        self._success.labels(**self._values, finished_reason=reason).inc()
        self.e2e_latency.observe(seconds)

    def rejected(self, reason: str) -> None:
        """The engine refused a request; `reason` is its error code."""
        self._rejected.labels(**self._values, reason=reason).inc()

    def observe_engine(self, stats: Mapping[str, Any]) -> None:
        """Sets the gauges from the engine's state as it is now."""
        total, free, cached = (int(stats.get(key, 0)) for key in ("num_pages", "pages_free", "pages_cached"))
        self._running.set(stats.get("running", 0))
        self._waiting.set(stats.get("waiting", 0))
        self._preemptions.set(stats.get("preemptions", 0))
        self._kv_usage.set((total - free - cached) / total if total else 0.0)
        for use, pages in (("free", free), ("cached", cached), ("held", total - free - cached)):
            self._pages.labels(**self._values, use=use).set(pages)

    def render(self) -> bytes:
        """The metrics in Prometheus's text format."""
        return generate_latest(self.registry)
