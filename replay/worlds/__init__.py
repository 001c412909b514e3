"""A log in memory, any moment of it at once: what the debugger and the report look into."""

from leftfold.replay.worlds.lives import KINDS, Life
from leftfold.replay.worlds.overview import Overview
from leftfold.replay.worlds.tape import Tape
from leftfold.replay.worlds.world import Moment, OutOfRange, World

__all__ = ["KINDS", "Life", "Moment", "OutOfRange", "Overview", "Tape", "World"]
