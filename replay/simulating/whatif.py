"""What if: a log's own requests, when they came and as long as they were answered, under other settings.

Both simulations run the real reducer with a cost model fitted to the log's own steps. What is not taken over: control
calls, failures and losses, and how long an answer would have become that was cut short (it ends where it ended).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from leftfold.events import Abort, Admit, ForwardDone, Record, SamplingParams, Started, Tick
from leftfold.executor.cost import CostModel
from leftfold.executor.sim import Tape
from leftfold.fsm import Config, ConfigError
from leftfold.replay.errors import NotStarted, SettingsError
from leftfold.replay.show import choices_of
from leftfold.replay.simulating.figures import Figures, Service, summarize
from leftfold.replay.simulating.jobs import Job
from leftfold.replay.simulating.loop import simulate
from leftfold.replay.walking import walk

END = 0
"""Where choices of one request differ in length, this id ends each; a 0 that was said becomes a 1."""

_Address = tuple[str, int]


@dataclass(slots=True)
class _Request:
    """One request of a log. `said`: tokens by choice; `left_at`: when its client left without a token, in µs."""

    event: Admit
    said: dict[int, list[int]] = field(default_factory=dict)
    services: dict[int, Service] = field(default_factory=dict)
    left_at: int | None = None


@dataclass(frozen=True, slots=True)
class Recording:
    """A log as a workload. `figures`: what it was like; `left_out`: events by type that are not taken over."""

    jobs: list[Job]
    tape: Tape
    config: Config
    figures: Figures
    left_out: Mapping[str, int]


def recording(records: Iterable[Record]) -> Recording:
    """Read a log. Raises `ReplayError` for one that does not fold, a `LogError` for damage."""
    live: dict[_Address, _Request] = {}
    requests: list[_Request] = []
    left_out: Counter[str] = Counter()
    config: Config | None = None
    steps = last = 0
    first: int | None = None
    counts: dict[str, int] = {}
    for (_, event), effects, state in walk(records):
        last, counts = event.t, state.counts
        config = state.config
        if isinstance(event, Admit):
            if (event.rid, event.epoch) not in live:
                live[event.rid, event.epoch] = _Request(event)
                requests.append(live[event.rid, event.epoch])
            first = event.t if first is None else first
        elif isinstance(event, Tick):
            steps += effects.plan is not None
        elif not isinstance(event, (ForwardDone, Abort, Started)):
            left_out[type(event).__name__] += 1
        for output in effects.outputs:
            request = live.get((output.rid, output.epoch))
            if request is not None:
                _hear(request, event.t, output)
                if output.finish_reason is not None and not _lives(request):
                    del live[output.rid, output.epoch]
    if config is None:
        raise NotStarted("the log holds no Started")
    first = 0 if first is None else first
    services = [service for request in requests for service in request.services.values()]
    for request in live.values():  # what still lives has no end to be compared
        left_out["unfinished requests"] += 1
        services += [] if request.services else [Service(request.event.t)]
    figures = Figures(services, (last - first) / 1e6, counts["preemptions"], steps, counts["prefix_hits"],
                      counts["prefix_queries"])  # fmt: skip
    return Recording(*_workload(requests, first), replace(config, vocab_size=None), figures, dict(left_out))


def _hear(request: _Request, t: int, output: Any) -> None:
    service = request.services.setdefault(output.choice, Service(request.event.t))
    if len(output.tokens):
        request.said.setdefault(output.choice, []).extend(int(token) for token in output.tokens)
        if service.first < 0:
            service.first = t
    if output.finish_reason is not None:
        service.ended, service.reason = t, output.finish_reason.value
        service.prompt, service.tokens, service.cached = output.usage
        if service.reason == "abort" and not request.said:
            request.left_at = t - request.event.t


def _lives(request: _Request) -> bool:
    ended = sum(service.ended >= 0 for service in request.services.values())
    return ended < choices_of(request.event)


def _workload(requests: list[_Request], first: int) -> tuple[list[Job], Tape]:
    jobs, said = [], {}
    for number, request in enumerate(requests):
        event = request.event
        rid = f"{number}:{event.rid}"  # an id may have come twice
        lengths = {len(tokens) for tokens in request.said.values()}
        choices = choices_of(event)
        asked = len(request.said) < choices
        longest = max(lengths, default=event.params.max_tokens if asked else 1)
        uneven = len(lengths) > 1 or (bool(lengths) and asked)
        for choice in range(choices):
            tokens = np.array(request.said.get(choice, [END + 1]), np.int32)
            if uneven:
                tokens = np.where(tokens == END, END + 1, tokens)
                tokens[-1] = END
            said[rid, event.epoch, choice] = tokens
        params = SamplingParams(max_tokens=longest, n=event.params.n, stop_token_ids=(END,) if uneven else ())
        jobs.append(_job(rid, request, params, first))
    return jobs, Tape(said)


def _job(rid: str, request: _Request, params: SamplingParams, first: int) -> Job:
    event = request.event
    size = len(event.prompt) if hasattr(event.prompt, "__len__") else 0

    def admit(now: int) -> Admit:
        return replace(event, t=now, rid=rid, params=params)

    return Job(rid, event.t - first, admit, size, params.max_tokens, abort_after=request.left_at)


def changed(config: Config, settings: Mapping[str, Any]) -> Config:
    """`config` with other settings. Raises `SettingsError`."""
    try:
        return Config.from_dict({**config.as_dict(), **settings})
    except ConfigError as error:
        raise SettingsError(str(error)) from error


def what_if(recorded: Recording, cost: CostModel, settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Figures of the log as `recorded`, `simulated` with the same settings, and `changed` with others.

    Raises `SettingsError`, and `Stalled` for settings under which a request can never run.
    """
    other = changed(recorded.config, settings)
    found = {"recorded": recorded.figures.as_dict()}
    for name, config in (("simulated", recorded.config), ("changed", other)):
        run = simulate(recorded.jobs, config, cost, tape=recorded.tape)
        found[name] = summarize(run).as_dict()
    return found


__all__ = ["Recording", "changed", "recording", "what_if"]
