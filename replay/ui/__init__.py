"""The debugger: a log as a page in which time can be travelled, served by the standard library."""

from leftfold.replay.ui.api import Api
from leftfold.replay.ui.http import Server

__all__ = ["Api", "Server"]
