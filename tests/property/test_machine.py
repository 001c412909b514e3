"""Hypothesis state machines over the fuzzer's worlds: its rules, with every choice made (and shrunk) by Hypothesis."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from leftfold.fsm.policy import BUILT_IN
from leftfold.replay.fuzzing import World
from leftfold.replay.fuzzing.profiles import world_of
from leftfold.replay.fuzzing.rules import DISK_RULES, RULES, Rules

LIMITS = {
    "vocab": st.sampled_from((2, 50, 1 << 20)),
    "num_pages": st.integers(1, 64),
    "page_size": st.integers(1, 8),
    "max_running": st.integers(1, 6),
    "max_batch_tokens": st.integers(1, 24),
    "max_model_len": st.integers(2, 80),
    "policy": st.sampled_from(BUILT_IN),
}
CONFIGS = st.fixed_dictionaries(
    LIMITS,
    optional={
        "max_chunk_tokens": st.integers(1, 8),
        "pipeline_depth": st.integers(0, 2),
        "prefix_cache": st.booleans(),
        "max_queued_requests": st.integers(1, 3),
        "max_queued_tokens": st.integers(1, 30),
        "growth_horizon": st.integers(0, 9),
    },
)
DISKS = st.fixed_dictionaries({"segment_bytes": st.sampled_from((200, 900, 1 << 20)), "sync_every": st.integers(0, 9)})
CHANCE = st.randoms(use_true_random=False)


class Machine(RuleBasedStateMachine):
    """A rule draws one command of the world, which checks everything after each event."""

    world: World

    @initialize(config=CONFIGS, seed=st.integers(0, 1 << 16))
    def begin(self, config: dict[str, Any], seed: int) -> None:
        self._begin(config, seed)

    def _begin(self, config: dict[str, Any], seed: int) -> None:
        """`seed`: of the texts that prompts are taken from."""
        self.world = world_of(config)
        self.rules_of_fuzz = Rules(Random(seed), config)

    def teardown(self) -> None:
        """Faults stop: everything ends, all is given back, the log folds to the same state."""
        if hasattr(self, "world"):
            self.world.finish()


class DurableMachine(Machine):
    """The same, whose log is on a simulated disk, and that may die at any time."""

    @initialize(config=CONFIGS, disk=DISKS, seed=st.integers(0, 1 << 16))
    def begin(self, config: dict[str, Any], disk: dict[str, Any], seed: int) -> None:  # type: ignore[override]
        self._begin({**config, **disk}, seed)


def _drawing(name: str) -> Callable[..., None]:
    def perform(self: Machine, chance: Random) -> None:
        self.rules_of_fuzz.rng = chance
        self.world.perform(getattr(self.rules_of_fuzz, name)(self.world))

    return rule(chance=CHANCE)(perform)


WORK = ("steps", "steps", "steps", "admit", "admit", "next", "next")
"""Hypothesis takes every rule as often as any other: what makes a run go on has to be there more than once."""

for at, name in enumerate((*WORK, *RULES)):
    setattr(Machine, f"rule_{name}_{at}", _drawing(name))
for name in DISK_RULES:
    setattr(DurableMachine, f"rule_{name}", _drawing(name))


def _settings(examples: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


Machine.TestCase.settings = _settings(700)
DurableMachine.TestCase.settings = _settings(250)
TestMachine = Machine.TestCase
TestDurableMachine = DurableMachine.TestCase
