"""What a run does next: configurations, requests and commands, drawn from one seeded source.

Each run draws its own rates (most faults are off in most runs), so that rare situations are not drowned in noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from random import Random
from typing import Any

from leftfold.executor.oracle import expected_tokens
from leftfold.fsm import Gate
from leftfold.fsm.policy import POLICIES
from leftfold.replay.fuzzing.oddities import CONTROLS, ODD_ADMITS, SPOILED_PLANS, SPOILS, STRAYS
from leftfold.replay.fuzzing.world import Command, World

RIDS = "abcdefgh"
VOCABULARIES = (2, 9, 50, 50, 50, 1 << 20)
"""Few tokens make equal pages likely; many make stop ids that no column watches."""


def draw_config(rng: Random) -> dict[str, Any]:
    """Arguments of a `World`: small limits in every proportion, pools of at most 64 pages."""
    vocab = rng.choice(VOCABULARIES)
    page_size = rng.choice((1, 2, 3, 4, 4, 5, 8, 8, 16))
    tokens = rng.choice((1, 12, 40, 60, 80, 120, 200)) * (0.5 + rng.random())
    return {
        "vocab": vocab,
        "num_pages": max(1, min(64, round(tokens / page_size))),
        "page_size": page_size,
        "max_running": rng.choice((1, 2, 2, 3, 3, 4, 8)),
        "max_batch_tokens": rng.choice((1, 2, 4, 8, 16, 64)),
        "max_model_len": rng.choice((2, 20, 20, 60, 60, 60, 90, 90, 90, 120, 120, 120)),
        "max_chunk_tokens": rng.choice((None, None, 1, 3, 8)),
        "pipeline_depth": rng.choice((0, 0, 1, 2)),
        "policy": rng.choice(sorted(POLICIES)),
        "prefix_cache": rng.random() < 0.8,
        "max_queued_requests": rng.choice((None, None, None, 2)),
        "max_queued_tokens": rng.choice((None, None, None, 30)),
        "vocab_size": rng.choice((None, None, vocab)),
        "growth_horizon": rng.choice((0, 0, 0, 3, 20)),
        "routers": rng.random() < 0.3,
    }


class Rules:
    """Draws the commands of one run. `rates`: how often each rule comes, in this run."""

    def __init__(self, rng: Random, config: dict[str, Any]) -> None:
        self.rng = rng
        self.config = config
        vocab = min(config["vocab"], 50)
        longest = min(config["max_model_len"], config["num_pages"] * config["page_size"] + 1)
        self.longest = longest
        self.bases = [[rng.randrange(vocab) for _ in range(longest)] for _ in range(rng.choice((1, 1, 2, 3)))]
        self.crowd = 1 + rng.choice((0, 0, 0, 1, 1, 2, 3))
        self.tenants = config["policy"] == "fair" and rng.random() < 0.8
        self.controls = rng.choice(_CALLS)
        self.rids = RIDS[: rng.choice((2, 3, 8))]
        faulty = [rule for rule in _FAULTS if rng.random() < 0.3]
        self.rules: list[Callable[[Rules, World], Command]] = [*_WORK, *faulty]
        weights = [*_WORK.values(), *(_FAULTS[rule] for rule in faulty)]
        self.scale = list(accumulate(weights))

    def next(self, world: World) -> Command:
        """The next command, perhaps chosen by looking at the world."""
        state = world.state
        if (not state.executor_present or state.gate is Gate.STOPPED) and self.rng.random() < 0.5:
            return self.start(world)
        if (world.desk.asleep or state.gate is Gate.PAUSED) and self.rng.random() < 0.25:
            return self.let_go(world)
        crowd = self.crowd + (state.gate is Gate.DRAINING)
        if len(world.clients) < crowd and state.gate in (Gate.RUNNING, Gate.DRAINING):
            return self.admit(world)
        at = self.rng.random() * self.scale[-1]
        for rule, bound in zip(self.rules, self.scale, strict=True):
            if at < bound:
                return rule(self, world)
        return self.steps(world)

    def _below(self, bound: int) -> int:
        return int(self.rng.random() * bound)

    # Work

    def steps(self, world: World) -> Command:
        return ("steps", {"count": 1 + self._below(48)})

    def tick(self, world: World) -> Command:
        return ("tick", {})

    def done(self, world: World) -> Command:
        return ("done", {})

    def admit(self, world: World) -> Command:
        """Prefixes of few bases, with and without a tail; sometimes an earlier request with its answer."""
        prompt = self._prompt()
        room = max(1, self.longest - len(prompt))
        request: dict[str, Any] = {"rid": self.rng.choice(self.rids), "prompt": prompt}
        request["max_tokens"] = 1 + self._below(min(80, room + 2))
        if self.rng.random() < 0.3:
            self._garnish(request)
        if self.tenants:
            request["tenant"] = self.rng.choice("xyz")
        return ("admit", request)

    def _prompt(self) -> list[int]:
        rng, base = self.rng, self.rng.choice(self.bases)
        length = 1 + self._below(max(1, len(base) - 1) if rng.random() < 0.2 else min(12, len(base)))
        if rng.random() < 0.04:
            length = len(base) + self._below(2)  # at the limit, or over it
        prompt = base[:length]
        if rng.random() < 0.3:
            prompt = prompt + expected_tokens(prompt, self._below(8), self.config["vocab"])
        if rng.random() < 0.3:
            prompt = prompt + [self._below(2)]
        return prompt

    def _garnish(self, request: dict[str, Any]) -> None:
        rng = self.rng
        which = rng.random()
        if which < 0.4:
            tokens = expected_tokens(request["prompt"], request["max_tokens"], self.config["vocab"])
            request["stop"] = [rng.choice(tokens), *([7] if rng.random() < 0.3 else [])]
            request["min_tokens"] = rng.choice((0, 0, 2, 5))
        elif which < 0.5:
            request["epoch"] = self._below(3)
        elif which < 0.6:
            request["cache"] = rng.choice(("read", "off"))
        elif which < 0.7:
            request["salt"] = "s"
        elif which < 0.8:
            request["priority"] = self._below(3)
        elif which < 0.9:
            request["n"] = 2 + self._below(2)
        else:
            request[rng.choice(("deadline", "queue_deadline"))] = 1 + self._below(30)

    # What goes wrong

    def abort(self, world: World) -> Command:
        rid = self.rng.choice(self.rids)
        if world.clients and self.rng.random() < 0.8:
            rid = self.rng.choice(list(world.clients))[0]
        command: dict[str, Any] = {"rid": rid}
        if self.rng.random() < 0.2:
            command["epoch"] = self._below(3)
        if self.rng.random() < 0.2:
            command |= {"reason": "stop_string", "keep": self._below(4)}
        if self.rng.random() < 0.2:
            command["choice"] = self._below(2)
        return ("abort", command)

    def abort_in_flight(self, world: World) -> Command:
        return self.abort(world) if world.flight is not None else ("tick", {})

    def abort_all(self, world: World) -> Command:
        return ("abort_all", {})

    def wait(self, world: World) -> Command:
        return ("wait", {"us": 1 + self._below(40)})

    def fail(self, world: World) -> Command:
        if world.flight is None:
            return ("tick", {})
        rows = [self._below(4)] if self.rng.random() < 0.3 else []
        return ("fail", {"retry": self.rng.random() < 0.8, "rows": rows, "apart": self.rng.random() < 0.4})

    def spoiled(self, world: World) -> Command:
        return ("spoiled", {"kind": self.rng.choice(SPOILS)}) if world.flight is not None else ("tick", {})

    def spoiled_plan(self, world: World) -> Command:
        return ("spoiled_plan", {"kind": self.rng.choice(SPOILED_PLANS)})

    def stray_done(self, world: World) -> Command:
        return ("stray_done", {"behind": self._below(4) - 2})

    def lose(self, world: World) -> Command:
        return ("lose", {})

    def start(self, world: World) -> Command:
        command: dict[str, Any] = {}
        if self.rng.random() < 0.5:
            command["kept"] = self.rng.choice((["device"], ["weights"], ["device", "weights"]))
        if self.rng.random() < 0.3:
            other = draw_config(self.rng)
            name = self.rng.choice(_RESTARTED)
            command[name] = other[name]
        return ("start", command)

    def shutdown(self, world: World) -> Command:
        return ("shutdown", {"deadline": self.rng.choice((0, 0, 20))})

    def odd_admit(self, world: World) -> Command:
        return ("odd_admit", {"kind": self.rng.choice(ODD_ADMITS)})

    def stray(self, world: World) -> Command:
        return ("stray", {"kind": self.rng.choice(list(STRAYS))})

    def control(self, world: World) -> Command:
        """One of the control calls that this run knows."""
        kind = self.rng.choice(self.controls)
        fields = FIELDS.get(kind)
        return ("control", {"kind": kind, **(self.rng.choice(fields) if fields else {})})

    def let_go(self, world: World) -> Command:
        """Wake or resume."""
        return ("control", {"kind": "Wake" if world.desk.asleep else "Resume"})

    def late_done(self, world: World) -> Command:
        return ("done", {"late": True})

    def late_ends(self, world: World) -> Command:
        return ("late_ends", {})

    def stray_control(self, world: World) -> Command:
        return ("stray_control", {"behind": self._below(3) - 1})

    def copy(self, world: World) -> Command:
        return ("copy", {})


_RESTARTED = (
    "num_pages", "page_size", "max_running", "max_batch_tokens", "max_model_len", "policy", "prefix_cache",
    "pipeline_depth", "growth_horizon",
)  # fmt: skip
_CALLS: Sequence[Sequence[str]] = (
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
    ),
    "Reconfigure": (
        {"set": {"max_running": 1}},
        {"set": {"max_running": 4, "max_batch_tokens": 8}},
        {"set": {"policy": "priority", "max_chunk_tokens": 2}},
        {"set": {"policy": "edf"}},
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
_WORK = {Rules.steps: 12, Rules.admit: 1.5, Rules.tick: 2, Rules.done: 1}
_FAULTS = {
    Rules.abort: 2, Rules.abort_in_flight: 2, Rules.abort_all: 0.3, Rules.wait: 1, Rules.fail: 2, Rules.spoiled: 0.5,
    Rules.spoiled_plan: 0.5, Rules.stray_done: 1, Rules.lose: 0.5, Rules.start: 0.7, Rules.shutdown: 0.3,
    Rules.odd_admit: 1, Rules.stray: 0.5, Rules.control: 1, Rules.copy: 0.3, Rules.late_done: 0.5,
    Rules.late_ends: 0.5, Rules.stray_control: 0.5,
}  # fmt: skip
RULES: Sequence[str] = tuple(rule.__name__ for rule in (*_WORK, *_FAULTS))
