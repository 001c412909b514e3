"""The pure core: events fold into a state; `decide` chooses, `apply` writes, `step` is the one after the other."""

from leftfold.fsm.effects import (
    Ack,
    Effects,
    FinishReason,
    KvCleared,
    KvEvent,
    KvRemoved,
    KvStored,
    Output,
    Outputs,
    Usage,
)  # fmt: skip
from leftfold.fsm.errors import InvariantViolation, PlanRefused, SnapshotInvalid
from leftfold.fsm.gate import GATES, Gate, GateTrigger
from leftfold.fsm.lifecycle import LIVE, TRANSITIONS, Phase, Trigger
from leftfold.fsm.limits import Config, ConfigError
from leftfold.fsm.planner import decide
from leftfold.fsm.policy import POLICIES, Policy, register
from leftfold.fsm.reasons import Reason
from leftfold.fsm.reducer import LAWS, apply, step
from leftfold.fsm.state import State

__all__ = [
    "Ack", "Config", "ConfigError", "Effects", "FinishReason", "GATES", "Gate", "GateTrigger", "InvariantViolation",
    "KvCleared", "KvEvent", "KvRemoved", "KvStored", "LAWS", "LIVE", "Output", "Outputs", "POLICIES", "Phase",
    "PlanRefused", "Policy", "Reason", "SnapshotInvalid", "State", "TRANSITIONS", "Trigger", "Usage", "apply", "decide",
    "register", "step",
]  # fmt: skip
