"""What a run does next: configurations, requests and commands, drawn from one seeded source.

Each run draws its own rates (most faults are off in most runs), so that rare situations are not drowned in noise.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random
from typing import Any

from leftfold.executor.oracle import expected_tokens
from leftfold.fsm.gate import DRAINING, PAUSED, RUNNING, STOPPED
from leftfold.replay.fuzzing.calls import CALLS, FIELDS
from leftfold.replay.fuzzing.disk import DAMAGES
from leftfold.replay.fuzzing.drawing import Habits, draw_config, draw_tokens, lite_habits
from leftfold.replay.fuzzing.oddities import ODD_ADMITS, SPOILED_PLANS, STRAYS
from leftfold.replay.fuzzing.results import FORMS, SPOILS
from leftfold.replay.fuzzing.world import Command, World

RIDS = "abcdefgh"
THEMED = 0.4
"""How many runs are about faults that belong together, which chance alone would rarely bring into one run."""
HURRIED = 0.15
"""In how many runs every other request has a deadline."""
INSISTENCE = (0, 0, 0.4, 0.7)
"""How likely a fault comes again at once, in one run or another: what fails once mostly fails some times in a row."""
FEW = 4
"""Steps at once at most, where much may happen between them."""
FAR = 1 << 40
"""µs by which a clock may jump."""


class Rules:
    """Draws the commands of one run. `scale`: how often each rule comes, in this run."""

    def __init__(
        self,
        rng: Random,
        config: dict[str, Any],
        habits: Callable[[Random], Habits] = lite_habits,
        draw: Callable[[Random], dict[str, Any]] = draw_config,
    ) -> None:
        self.rng = rng
        self.config = config
        self.draw = draw
        vocab = min(config["vocab"], 50)
        longest = min(config["max_model_len"], config["num_pages"] * config["page_size"] + 1)
        self.longest = longest
        self.bases = [draw_tokens(rng, longest, vocab) for _ in range(rng.choice((1, 1, 2, 3)))]
        self.habits = habits(rng)
        self.tenants = config["policy"] == "fair" and rng.random() < 0.8
        self.hurried = rng.random() < HURRIED
        self.classes = config["policy"] == "priority" and rng.random() < 0.8
        self.rids = [*RIDS, *(f"r{number}" for number in range(self.habits.rids - len(RIDS)))][: self.habits.rids]
        known = {**_FAULTS, **_DISK_FAULTS} if "sync_every" in config else _FAULTS
        theme = rng.choice(_THEMES) if rng.random() < THEMED else None
        faulty: dict[Rule, float] = {}
        faulty |= {rule: self._rate(rate) for rule, rate in known.items() if rng.random() < self.habits.faults}
        self.controls = _calls(rng)
        self.themed = theme is not None
        if theme is not None:
            faulty |= {rule: self._rate(rate) for rule, rate in theme.rates.items()}
            self.controls = theme.calls or _calls(rng)
            crowd, stride = max(self.habits.crowd, theme.crowd), min(self.habits.stride, theme.stride)
            self.habits = replace(self.habits, crowd=crowd, stride=stride)
        work = {rule: self._rate(rate) for rule, rate in _WORK.items()}
        self.insistence = rng.choice(INSISTENCE)
        self.last: Rule | None = None
        self.rules: list[Rule] = [*work, *faulty]
        self.scale = list(accumulate([*work.values(), *faulty.values()]))

    def _rate(self, usual: float) -> float:
        spread = self.habits.spread
        return usual * 10 ** (spread * (2 * self.rng.random() - 1)) if spread else usual

    def next(self, world: World) -> Command:
        """The next command, perhaps chosen by looking at the world."""
        state = world.state
        if (not state.executor_present or state.gate is STOPPED) and self.rng.random() < 0.4:
            return self.start(world)
        if (world.desk.asleep or state.gate is PAUSED) and self.rng.random() < 0.25:
            return self.let_go(world)
        seldom = state.gate is not RUNNING or world.desk.asleep or world.desk.queue or not state.executor_present
        if seldom and self.rng.random() < 0.15:
            return self.rng.choice(_SELDOM)(self, world)
        crowd = self.habits.crowd + (state.gate is DRAINING)
        if len(world.clients) < crowd and state.gate in (RUNNING, DRAINING):
            if not self.themed or self.rng.random() < 0.5:
                return self.admit(world)
        return self._drawn()(self, world)

    def _drawn(self) -> Rule:
        """A rule by its rate, or the last one once more if that was a fault."""
        if self.last is not None and self.rng.random() < self.insistence:
            return self.last
        at = self.rng.random() * self.scale[-1]
        number = bisect(self.scale, at, hi=len(self.rules) - 1)
        rule = self.rules[number]
        self.last = rule if number >= len(_WORK) else None
        return rule

    def _below(self, bound: int) -> int:
        return int(self.rng.random() * bound)

    # Work

    def steps(self, world: World) -> Command:
        """Many at once, but few where the engine is on its way to another state, which has to last for a while."""
        calm = world.state.gate is RUNNING and not world.desk.queue
        return ("steps", {"count": 1 + self._below(self.habits.stride if calm else FEW)})

    def tick(self, world: World) -> Command:
        return ("tick", {})

    def done(self, world: World) -> Command:
        return ("done", {})

    def admit(self, world: World) -> Command:
        """Prefixes of few bases, with and without a tail; sometimes an earlier request with its answer."""
        prompt = self._prompt()
        room = max(1, self.longest - len(prompt))
        request: dict[str, Any] = {"rid": self.rng.choice(self.rids), "prompt": prompt}
        request["max_tokens"] = 1 + self._below(min(self.habits.answer, room + 2))
        if self.rng.random() < self.habits.garnish:
            self._garnish(request)
        if self.hurried and self.rng.random() < 0.5:
            self._hurry(request, 60)
        if self.tenants:
            request["tenant"] = self.rng.choice("xyz")
        if self.classes:
            request["priority"] = self._below(3)
        return ("admit", request)

    def _prompt(self) -> list[int]:
        rng, base = self.rng, self.rng.choice(self.bases)
        length = 1 + self._below(max(1, len(base) - 1) if rng.random() < 0.2 else min(self.habits.prompt, len(base)))
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
            self._hurry(request, 30)

    def _hurry(self, request: dict[str, Any], most: int) -> None:
        request[self.rng.choice(("deadline", "queue_deadline"))] = 1 + self._below(most)

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
        return ("fail", {"retry": self.rng.random() < 0.8, "rows": rows, "apart": self.rng.random() < 0.6})

    def spoiled(self, world: World) -> Command:
        if world.flight is None:
            return ("tick", {})
        overtakes = len(world.flights) > 1 and self.rng.random() < 0.5
        return ("spoiled", {"kind": "order" if overtakes else self.rng.choice(SPOILS)})

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
            command |= self._other_limits()
        return ("start", command)

    def _other_limits(self) -> dict[str, Any]:
        name = self.rng.choice(_RESTARTED)
        return {name: self.draw(self.rng)[name]}

    def shutdown(self, world: World) -> Command:
        return ("shutdown", {"deadline": self.rng.choice((0, 0, 5, 20, 60))})

    def odd_admit(self, world: World) -> Command:
        command: dict[str, Any] = {"kind": self.rng.choice(ODD_ADMITS)}
        if self.rng.random() < 0.5:
            command |= {"rid": self.rng.choice(self.rids), "epoch": self._below(3)}
        return ("odd_admit", command)

    def stray(self, world: World) -> Command:
        return ("stray", {"kind": self.rng.choice(list(STRAYS))})

    def control(self, world: World) -> Command:
        """One of the control calls that this run knows."""
        kind = self.rng.choice(self.controls)
        fields = FIELDS.get(kind)
        return ("control", {"kind": kind, **(self.rng.choice(fields) if fields else {})})

    def any_control(self, world: World) -> Command:
        """One of all control calls, whichever kinds this run knows."""
        kind = self.rng.choice(CALLS[-1])
        return ("control", {"kind": kind, **self.rng.choice(FIELDS.get(kind) or ({},))})

    def let_go(self, world: World) -> Command:
        """Wake or resume."""
        if not world.desk.asleep:
            return ("control", {"kind": "Resume"})
        return ("control", {"kind": "Wake", **(self.rng.choice(FIELDS["Wake"]) if self.rng.random() < 0.6 else {})})

    def late_done(self, world: World) -> Command:
        return ("done", {"late": True})

    def formed_done(self, world: World) -> Command:
        return ("done", {"form": self.rng.choice(FORMS)})

    def late_ends(self, world: World) -> Command:
        return ("late_ends", {})

    def stray_control(self, world: World) -> Command:
        return ("stray_control", {"behind": self._below(3) - 1})

    def refused_operation(self, world: World) -> Command:
        return ("done", {"refuse": True})

    def jump(self, world: World) -> Command:
        """The clock jumps far ahead."""
        return ("wait", {"us": 1 + self._below(FAR)})

    def copy(self, world: World) -> Command:
        return ("copy", {})

    # What goes wrong with the log

    def flush(self, world: World) -> Command:
        return ("flush", {})

    def sync(self, world: World) -> Command:
        return ("sync", {})

    def snapshot(self, world: World) -> Command:
        return ("snapshot", {})

    def lying_disk(self, world: World) -> Command:
        return ("lying_disk", {})

    def full_disk(self, world: World) -> Command:
        return ("full_disk", {"room": self._below(400)})

    def space(self, world: World) -> Command:
        return ("space", {})

    def clock_back(self, world: World) -> Command:
        return ("clock_back", {"us": 1 + self._below(40)})

    def crash(self, world: World) -> Command:
        """The process dies, and perhaps the machine."""
        rng, how = self.rng, {}
        if rng.random() < 0.5:
            how = {"power": True, "keep": self._below(2000)}
            if rng.random() < 0.3:
                how["hole"] = self._below(30)
            if rng.random() < 0.3:
                how["earlier"] = self._below(60)
        elif rng.random() < 0.6:
            how["torn"] = self._below(300)
        if rng.random() < 0.1:
            how["failed_sync"] = True
        if rng.random() < 0.1:
            how["read_error"] = self._below(1 << 16)
        if rng.random() < 0.1:
            how["old"] = True
        if rng.random() < 0.2:
            how["back"] = self._below(30)
        if rng.random() < 0.3:
            how |= self._other_limits()
        return ("crash", how)

    def damage(self, world: World) -> Command:
        """The process dies, and its disk returns something else than what was written."""
        name, how = self.crash(world)
        how = {**how, "damage": self.rng.choice(DAMAGES), "at": self._below(1 << 16), "other": self._below(1 << 16)}
        return (name, how)


def _calls(rng: Random) -> Sequence[str]:
    """Kinds of control calls for one run: a set that belongs together, or any few."""
    return rng.choice(CALLS) if rng.random() < 0.6 else rng.sample(CALLS[-1], 3)


Rule = Callable[[Rules, World], Command]
_RESTARTED = (
    "num_pages", "page_size", "max_running", "max_batch_tokens", "max_model_len", "policy", "prefix_cache",
    "pipeline_depth", "growth_horizon",
)  # fmt: skip
_WORK = {Rules.steps: 12, Rules.admit: 1.5, Rules.tick: 2, Rules.done: 1}
_FAULTS = {
    Rules.abort: 2, Rules.abort_in_flight: 2, Rules.abort_all: 0.3, Rules.wait: 1, Rules.fail: 2, Rules.spoiled: 0.5,
    Rules.spoiled_plan: 1, Rules.stray_done: 1, Rules.lose: 0.5, Rules.start: 0.7, Rules.shutdown: 0.3,
    Rules.odd_admit: 1, Rules.stray: 0.5, Rules.control: 1, Rules.copy: 0.3, Rules.late_done: 0.5,
    Rules.late_ends: 0.5, Rules.stray_control: 0.5, Rules.refused_operation: 0.5, Rules.jump: 0.1,
    Rules.formed_done: 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Theme:
    """What a run is about. `rates`: of faults that belong together; `calls`: kinds of control calls (none: drawn);
    `crowd`: requests that live at once, at least; `stride`: steps at once, at most.
    """

    rates: Mapping[Rule, float]
    calls: Sequence[str] = ()
    crowd: int = 1
    stride: int = 48


_THEMES: Sequence[Theme] = (
    Theme({Rules.control: 6, Rules.tick: 4, Rules.late_done: 1, Rules.late_ends: 1, Rules.refused_operation: 1}),
    Theme({
        Rules.control: 6, Rules.tick: 4, Rules.shutdown: 2, Rules.wait: 3, Rules.start: 1, Rules.late_done: 3,
    }),
    Theme({Rules.control: 8, Rules.tick: 4}, calls=("Reconfigure",), crowd=4, stride=16),
    Theme({Rules.control: 6, Rules.tick: 4}, calls=("Sleep", "Wake", "Wake", "Resume", "FlushCache"), stride=16),
    Theme({Rules.control: 4, Rules.start: 4, Rules.lose: 1, Rules.tick: 2}, calls=("UpdateWeights",)),
    Theme({Rules.control: 4, Rules.lose: 3, Rules.start: 3, Rules.fail: 2, Rules.tick: 3}),
    Theme({
        Rules.fail: 5, Rules.tick: 2, Rules.spoiled: 1, Rules.stray_done: 1, Rules.lose: 1, Rules.abort_in_flight: 4,
    }, crowd=2, stride=8),
    Theme({Rules.fail: 8, Rules.tick: 4}, crowd=3, stride=2),
    Theme({Rules.abort: 5, Rules.abort_in_flight: 5, Rules.wait: 3, Rules.odd_admit: 2}),
)  # fmt: skip
_SELDOM: Sequence[Rule] = (
    Rules.control, Rules.any_control, Rules.shutdown, Rules.shutdown, Rules.start, Rules.lose, Rules.abort, Rules.fail,
    Rules.wait, Rules.tick, Rules.late_done,
)  # fmt: skip
"""What is done now and then where the engine is in a state that few runs bring it to: pairs of faults are rare."""
_DISK_FAULTS = {
    Rules.flush: 1, Rules.sync: 1, Rules.snapshot: 1, Rules.lying_disk: 0.3, Rules.full_disk: 0.5, Rules.space: 0.5,
    Rules.clock_back: 0.3, Rules.crash: 3, Rules.damage: 2,
}  # fmt: skip
RULES: Sequence[str] = tuple(rule.__name__ for rule in (*_WORK, *_FAULTS))
DISK_RULES: Sequence[str] = tuple(rule.__name__ for rule in _DISK_FAULTS)
