"""Drive the scheduler through random situations on the oracle and check every invariant after every event."""

from leftfold.replay.fuzz import add_arguments, run

__all__ = ["add_arguments", "run"]
