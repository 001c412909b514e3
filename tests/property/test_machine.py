"""A Hypothesis state machine over the fuzzer's world: the same rules, arguments chosen (and shrunk) by Hypothesis."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from leftfold.executor.oracle import expected_tokens
from leftfold.fsm import Gate
from leftfold.fsm.policy import POLICIES
from leftfold.replay.fuzzing import World
from leftfold.replay.fuzzing.calls import FIELDS
from leftfold.replay.fuzzing.oddities import CONTROLS, ODD_ADMITS, SPOILED_PLANS, SPOILS, STRAYS

RIDS = st.sampled_from("abcd")
LIMITS = {
    "num_pages": st.integers(1, 64),
    "page_size": st.integers(1, 8),
    "max_running": st.integers(1, 6),
    "max_batch_tokens": st.integers(1, 24),
    "max_model_len": st.integers(2, 80),
}
CONFIGS = st.fixed_dictionaries(
    LIMITS,
    optional={
        "max_chunk_tokens": st.integers(1, 8),
        "pipeline_depth": st.integers(0, 2),
        "policy": st.sampled_from(sorted(POLICIES)),
        "prefix_cache": st.booleans(),
        "max_queued_requests": st.integers(1, 3),
        "max_queued_tokens": st.integers(1, 30),
        "vocab": st.sampled_from((2, 50, 1 << 20)),
        "growth_horizon": st.integers(0, 9),
    },
)
# A prompt is a stretch of one of two long texts, with a tail: equal prefixes are common.
TEXTS = ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9] * 6, [1] * 90)
PROMPTS = st.builds(
    lambda text, length, tail: text[:length] + tail,
    st.sampled_from(TEXTS),
    st.integers(1, 24) | st.integers(1, 90),
    st.lists(st.integers(0, 1), max_size=2),
)
EXTRAS = st.fixed_dictionaries(
    {},
    optional={
        "epoch": st.integers(0, 2),
        "min_tokens": st.integers(0, 4),
        "priority": st.integers(0, 2),
        "n": st.integers(1, 3),
        "tenant": st.sampled_from("xy"),
        "deadline": st.integers(1, 20),
        "queue_deadline": st.integers(1, 20),
        "cache": st.sampled_from(("use", "read", "off")),
        "salt": st.sampled_from(("", "s")),
    },
)


CALLS = st.one_of(
    *[st.tuples(st.just(kind), st.sampled_from(fields)) for kind, fields in FIELDS.items()],
    *[st.tuples(st.just(kind), st.just({})) for kind in CONTROLS if kind != "Shutdown" and kind not in FIELDS],
)


class Machine(RuleBasedStateMachine):
    """Every rule is one command of the world, which checks everything after each event."""

    world: World

    @initialize(config=CONFIGS)
    def begin(self, config: dict[str, Any]) -> None:
        self.world = World(**config)

    @rule(rid=RIDS, prompt=PROMPTS, max_tokens=st.integers(1, 30), extras=EXTRAS, stop_at=st.none() | st.integers(0, 8))
    def admit(
        self, rid: str, prompt: list[int], max_tokens: int, extras: dict[str, Any], stop_at: int | None
    ) -> None:
        stop = [] if stop_at is None else expected_tokens(prompt, stop_at + 1, self.world.vocab)[-1:]
        self.world.admit(rid, prompt, max_tokens, stop=stop, **extras)

    @rule(count=st.integers(1, 12))
    def steps(self, count: int) -> None:
        self.world.steps(count)

    @rule()
    def tick(self) -> None:
        self.world.tick()

    @rule()
    def done(self) -> None:
        self.world.done()

    @rule(us=st.integers(1, 40))
    def wait(self, us: int) -> None:
        self.world.wait(us)

    @rule(rid=RIDS, epoch=st.none() | st.integers(0, 2))
    def abort(self, rid: str, epoch: int | None) -> None:
        self.world.abort(rid, epoch)

    @rule(rid=RIDS, keep=st.integers(0, 4))
    def stop_string(self, rid: str, keep: int) -> None:
        self.world.abort(rid, reason="stop_string", keep=keep)

    @rule()
    def abort_all(self) -> None:
        self.world.abort_all()

    @precondition(lambda self: self.world.flight is not None)
    @rule(retry=st.booleans(), rows=st.lists(st.integers(0, 3), max_size=2), apart=st.booleans())
    def fail(self, retry: bool, rows: list[int], apart: bool) -> None:
        self.world.fail(retry, rows, apart)

    @precondition(lambda self: self.world.flight is not None)
    @rule(kind=st.sampled_from(SPOILS))
    def spoiled(self, kind: str) -> None:
        self.world.spoiled(kind)

    @rule(kind=st.sampled_from(SPOILED_PLANS))
    def spoiled_plan(self, kind: str) -> None:
        self.world.spoiled_plan(kind)

    @rule(behind=st.integers(-2, 3))
    def stray_done(self, behind: int) -> None:
        self.world.stray_done(behind)

    @rule(kind=st.sampled_from(sorted(STRAYS)))
    def stray(self, kind: str) -> None:
        self.world.stray(kind)

    @rule(call=CALLS)
    def control(self, call: tuple[str, dict[str, Any]]) -> None:
        kind, fields = call
        self.world.control(kind, **fields)

    @rule()
    def done_with_a_late_end(self) -> None:
        self.world.done(late=True)

    @rule()
    def late_ends(self) -> None:
        self.world.late_ends()

    @rule(behind=st.integers(-1, 2))
    def stray_control(self, behind: int) -> None:
        self.world.stray_control(behind)

    @rule(rid=RIDS, choice=st.integers(0, 1))
    def abort_a_choice(self, rid: str, choice: int) -> None:
        self.world.abort(rid, choice=choice)

    @rule(kind=st.sampled_from(ODD_ADMITS))
    def odd_admit(self, kind: str) -> None:
        self.world.odd_admit(kind)

    @rule()
    def lose(self) -> None:
        self.world.lose()

    @rule(kept=st.sampled_from(([], ["device"])))
    def start(self, kept: list[str]) -> None:
        self.world.start(kept)

    @rule(changes=st.fixed_dictionaries({}, optional=LIMITS))
    def start_with_other_limits(self, changes: dict[str, Any]) -> None:
        self.world.start(**changes)

    @precondition(lambda self: self.world.state.gate is Gate.RUNNING)
    @rule(deadline=st.sampled_from((0, 15)))
    def shutdown(self, deadline: int) -> None:
        self.world.shutdown(deadline)

    @rule()
    def copy(self) -> None:
        self.world.copy()

    def teardown(self) -> None:
        """Faults stop: everything ends, all is given back, the log folds to the same state."""
        if hasattr(self, "world"):
            self.world.finish()


Machine.TestCase.settings = settings(
    max_examples=800,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestMachine = Machine.TestCase
