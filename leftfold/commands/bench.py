"""Measure. `control`: what a step costs on the control plane."""

from __future__ import annotations

import argparse

from leftfold.bench import control
from leftfold.commands.common import subcommands


def add_arguments(parser: argparse.ArgumentParser) -> None:
    subcommands(
        parser, {"control": ("microseconds per decode step: decide, apply, commit, digest, log", *_hooks(control))}
    )


def _hooks(module: object) -> tuple[object, object]:
    return module.add_arguments, module.run  # type: ignore[attr-defined]
