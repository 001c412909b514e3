"""What clients see: times to the first token, per token and to the end, and the sums over a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from leftfold.events import Admit
from leftfold.fsm import FinishReason, Output
from leftfold.fsm.effects import Outputs, TokenBatch
from leftfold.replay.show import choices_of

Key = tuple[str, int, int]


@dataclass(slots=True)
class Service:
    """How one choice of a request was served; times in µs. `first`: its first token, -1 before; `reason`: its end."""

    arrived: int
    first: int = -1
    ended: int = -1
    tokens: int = 0
    prompt: int = 0
    cached: int = 0
    reason: str = ""

    @property
    def ttft(self) -> float:
        """Milliseconds from arrival to the first token."""
        return (self.first - self.arrived) / 1e3

    @property
    def e2e(self) -> float:
        """Milliseconds from arrival to the end."""
        return (self.ended - self.arrived) / 1e3

    @property
    def tpot(self) -> float:
        """Milliseconds for each token after the first."""
        return (self.ended - self.first) / 1e3 / (self.tokens - 1)


class Meter:
    """Hears outputs, by column where they come so, and keeps one `Service` for each choice.

    `ended`: ids of requests of which a choice ended since `take_ended`.
    """

    def __init__(self) -> None:
        self.services: dict[Key, Service] = {}
        self.ended: list[str] = []

    def came(self, event: Admit) -> None:
        """A request arrives."""
        for choice in range(choices_of(event)):
            self.services[event.rid, event.epoch, choice] = Service(event.t)

    def hear(self, t: int, outputs: Sequence[Output] | Outputs) -> None:
        """What clients hear at `t`. First tokens come one by one, later ones in batches, of which ends alone matter."""
        for part in outputs.parts if isinstance(outputs, Outputs) else outputs:
            if isinstance(part, TokenBatch):
                for index, (reason, usage) in part.ended.items():
                    request = part.seats[index].request
                    self._end(t, request.key, reason, usage)
                continue
            key = (part.rid, part.epoch, part.choice)
            service = self.services[key]
            if len(part.tokens) and service.first < 0:
                service.first = t
            if part.finish_reason is not None:
                self._end(t, key, part.finish_reason, part.usage)

    def _end(self, t: int, key: Key, reason: FinishReason, usage: Any) -> None:
        service = self.services[key]
        service.ended = t
        service.reason = reason.value
        service.prompt, service.tokens, service.cached = usage
        self.ended.append(key[0])

    def take_ended(self) -> list[str]:
        """The ids of `ended`, which is empty afterwards."""
        ended, self.ended = self.ended, []
        return ended


PERCENTILES = (50, 90, 99)


def spread(values: Iterable[float]) -> dict[str, float | None]:
    """Mean and percentiles (linear between ranks) of milliseconds, as far as there are any."""
    array = np.array(list(values), np.float64)
    if not len(array):
        return {"mean": None, **{f"p{each}": None for each in PERCENTILES}}
    points = np.percentile(array, PERCENTILES)
    named = {f"p{each}": round(float(value), 3) for each, value in zip(PERCENTILES, points, strict=True)}
    return {"mean": round(float(array.mean()), 3), **named}


@dataclass(frozen=True, slots=True)
class Figures:
    """A run's figures; `as_dict` has them under the names that `--json` gives."""

    services: Sequence[Service]
    seconds: float
    preemptions: int
    steps: int
    hits: int
    queries: int

    @property
    def answered(self) -> list[Service]:
        """Those that ended as they should."""
        return [service for service in self.services if service.reason in ("stop", "length")]

    def as_dict(self) -> dict[str, Any]:
        """Counts, times in ms, throughput per second of `virtual_seconds`, which begin with the first arrival."""
        answered = self.answered
        reasons: dict[str, int] = {}
        for service in self.services:
            reasons[service.reason or "live"] = reasons.get(service.reason or "live", 0) + 1
        seconds = max(self.seconds, 1e-9)
        output = sum(service.tokens for service in self.services)
        prompt = sum(service.prompt for service in self.services if service.first >= 0)
        return {
            "requests": len(self.services),
            "ended": dict(sorted(reasons.items())),
            "virtual_seconds": round(self.seconds, 6),
            "steps": self.steps,
            "ttft_ms": spread(service.ttft for service in answered if service.first >= 0),
            "tpot_ms": spread(service.tpot for service in answered if service.tokens > 1 and service.first >= 0),
            "e2e_ms": spread(service.e2e for service in answered),
            "prompt_tokens": prompt,
            "output_tokens": output,
            "requests_per_second": round(len(answered) / seconds, 4),
            "prompt_tokens_per_second": round(prompt / seconds, 3),
            "output_tokens_per_second": round(output / seconds, 3),
            "preemptions": self.preemptions,
            "cache_hit_share": round(self.hits / self.queries, 6) if self.queries else 0.0,
        }


def summarize(run: Any) -> Figures:
    """The figures of a `simulating.loop.Run`, all its replicas together."""
    counts = [replica.state.counts for replica in run.replicas]
    return Figures(
        list(run.meter.services.values()),
        run.t / 1e6,
        sum(count["preemptions"] for count in counts),
        sum(replica.steps for replica in run.replicas),
        sum(count["prefix_hits"] for count in counts),
        sum(count["prefix_queries"] for count in counts),
    )


__all__ = ["Figures", "Meter", "Service", "spread", "summarize"]
