"""Measure. `control`: what a step costs on the control plane."""

from __future__ import annotations

import argparse

from leftfold.bench import control
from leftfold.commands.common import subcommands


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "microseconds per decode step: decide, apply, commit, digest, log"
    subcommands(parser, {"control": (text, control.add_arguments, control.run)})
