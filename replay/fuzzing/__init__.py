"""Driving the reducer through random situations on an oracle: worlds, rules, a loop, a shrinker, a report."""

from leftfold.replay.fuzzing.crew import CrewError, fuzz_together
from leftfold.replay.fuzzing.durable import DurableWorld
from leftfold.replay.fuzzing.errors import Violation
from leftfold.replay.fuzzing.loop import Run, Tally, execute, fuzz
from leftfold.replay.fuzzing.profiles import PROFILES, Profile
from leftfold.replay.fuzzing.report import source_of, write_log, write_test
from leftfold.replay.fuzzing.shrink import shrink
from leftfold.replay.fuzzing.world import World

__all__ = [
    "CrewError", "DurableWorld", "PROFILES", "Profile", "Run", "Tally", "Violation", "World", "execute", "fuzz",
    "fuzz_together", "shrink", "source_of", "write_log", "write_test",
]  # fmt: skip
