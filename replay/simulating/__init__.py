"""Simulation: the real reducer on virtual time, with traces or a log's own requests, and a model of what steps cost."""

from leftfold.replay.simulating.costs import BUILT_IN, built_in
from leftfold.replay.simulating.figures import Figures, summarize
from leftfold.replay.simulating.jobs import Job, TraceError
from leftfold.replay.simulating.loop import Run, simulate
from leftfold.replay.simulating.router import ROUTERS
from leftfold.replay.simulating.traces import Trace, read_trace

__all__ = [
    "BUILT_IN", "Figures", "Job", "ROUTERS", "Run", "Trace", "TraceError", "built_in", "read_trace", "simulate",
    "summarize",
]  # fmt: skip
