"""A log as one page: figures, plots and the slowest requests with the reasons why."""

from leftfold.replay.report.figures import Report, build
from leftfold.replay.report.page import render

__all__ = ["Report", "build", "render"]
