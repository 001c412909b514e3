"""Replay: fold a log, verify it by deciding anew, look into it."""

from leftfold.replay.compare import Divergence
from leftfold.replay.errors import NotStarted, ReducerFault, ReplayError, SettingsError
from leftfold.replay.fold import Fold, fold
from leftfold.replay.verify import Verdict, verify

__all__ = [
    "Divergence", "Fold", "NotStarted", "ReducerFault", "ReplayError", "SettingsError", "Verdict", "fold", "verify",
]  # fmt: skip
