"""Prometheus metrics under the field's names. Gauges are read from the engine's state at scrape time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_LABELS = ("model_name", "engine")
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_ITL = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20)
_E2E = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)


GATES = ("running", "draining", "paused", "closing", "stopped")
REASONS = ("capacity", "paused", "asleep", "no_executor")


def waiting_by_reason(stats: Mapping[str, Any]) -> dict[str, int]:
    """The one thing that keeps all waiting requests back now: the first that would have to change."""
    reason = (
        "no_executor" if not stats.get("executor_present", True)
        else "asleep" if stats.get("asleep")
        else "paused" if stats.get("gate", "running") != "running"
        else "capacity"
    )  # fmt: skip
    return {name: int(stats.get("waiting", 0)) if name == reason else 0 for name in REASONS}


class _EngineCollector(Collector):
    """What the engine's last statistics say, in Prometheus's words."""

    def __init__(self, labels: tuple[str, ...]) -> None:
        self._labels = labels
        self.stats: Mapping[str, Any] = {}

    def collect(self) -> Iterator[Metric]:
        total, free, cached = (int(self.stats.get(key, 0)) for key in ("num_pages", "pages_free", "pages_cached"))
        held = total - free - cached
        yield self._one(GaugeMetricFamily, "num_requests_running", "Requests that hold a slot.", "running")
        yield self._one(GaugeMetricFamily, "num_requests_waiting", "Requests that wait to run.", "waiting")
        waiting = waiting_by_reason(self.stats)
        yield self._by("num_requests_waiting_by_reason", "Requests that wait, by what for.", "reason", waiting)
        gates = {gate: gate == self.stats.get("gate") for gate in GATES}
        yield self._by("engine_gate", "1 for the gate that the engine stands at.", "gate", gates)
        asleep = {part: part in str(self.stats.get("asleep", "")).split() for part in ("weights", "kv")}
        yield self._by("engine_asleep", "1 for memory that is given back.", "part", asleep)
        usage = self._family(GaugeMetricFamily, "kv_cache_usage_perc", "Share of KV pages in use (1 is all).")
        usage.add_metric(self._labels, held / total if total else 0.0)
        yield usage
        uses = {"free": free, "cached": cached, "held": held}
        yield self._by("kv_pages", "KV pages by use.", "use", uses)
        yield self._one(CounterMetricFamily, "num_preemptions", "Requests that gave back their pages.", "preemptions")
        yield self._one(CounterMetricFamily, "prefix_cache_queries", "Tokens looked up.", "prefix_queries")
        yield self._one(CounterMetricFamily, "prefix_cache_hits", "Tokens found.", "prefix_hits")
        yield self._one(CounterMetricFamily, "log_failures", "Times the log could not be written.", "log_failures")
        failing = {"log_failing": bool(self.stats.get("log_failure"))}
        yield self._of(failing, GaugeMetricFamily, "log_failing", "1 while the log cannot be written.", "log_failing")
        waiting = "Bytes that wait for the disk, estimated."
        yield self._one(GaugeMetricFamily, "log_waiting_bytes", waiting, "log_waiting_bytes")
        yield self._one(CounterMetricFamily, "log_syncs", "Times the log was made durable.", "log_syncs")
        yield self._one(CounterMetricFamily, "log_sync_seconds", "Time that took.", "log_sync_seconds")

    def _one(self, kind: Any, name: str, text: str, key: str) -> Any:
        return self._of(self.stats, kind, name, text, key)

    def _of(self, stats: Mapping[str, Any], kind: Any, name: str, text: str, key: str) -> Any:
        family: Any = self._family(kind, name, text)
        family.add_metric(self._labels, float(stats.get(key, 0)))
        return family

    def _by(self, name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
        family = GaugeMetricFamily(f"leftfold:{name}", text, labels=(*_LABELS, label))
        for value, count in values.items():
            family.add_metric((*self._labels, value), float(count))
        return family

    def _family(self, kind: Any, name: str, text: str) -> Any:
        return kind(f"leftfold:{name}", text, labels=_LABELS)


class Metrics:
    """Counters and histograms of one server; `observe_engine` takes the engine's statistics for the gauges."""

    def __init__(self, model_name: str, engine: str = "0") -> None:
        self.registry = CollectorRegistry()
        self._values = {"model_name": model_name, "engine": engine}
        self._engine = _EngineCollector(tuple(self._values.values()))
        self.registry.register(self._engine)
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts that got a first token.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated for clients that listen.")
        self._success = Counter(
            "leftfold:request_success", "Choices that ended, by reason (abort: hung up, aborted, cut off).",
            (*_LABELS, "finished_reason"), registry=self.registry,
        )  # fmt: skip
        self._rejected = Counter(
            "leftfold:admission_rejections", "Requests the engine refused.", (*_LABELS, "reason"),
            registry=self.registry,
        )  # fmt: skip
        self.time_to_first_token = self._histogram("time_to_first_token_seconds", "Until the first token.", _TTFT)
        self.inter_token_latency = self._histogram("inter_token_latency_seconds", "Between two tokens.", _ITL)
        self.e2e_latency = self._histogram("e2e_request_latency_seconds", "Until a choice ended.", _E2E)

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
        """Takes over the engine's statistics, read from its state as it is now."""
        self._engine.stats = stats

    def render(self) -> bytes:
        """The metrics in Prometheus's text format."""
        return generate_latest(self.registry)
