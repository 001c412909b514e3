"""Measure. `control`: what a step costs on the control plane. `log`: what the log costs, by durability. `replay`: how
fast a log becomes a state again. `fidelity`: how far simulations are from what they simulate. `latency`, `throughput`,
`serve`: a model, in this process or over HTTP. `determinism`: that a crowd changes no token. `recovery`: that a server
which is killed loses nothing.
"""

from __future__ import annotations

import argparse

from leftfold.bench import control, determinism, fidelity, latency, log, recovery, replay, serve, throughput
from leftfold.commands.common import subcommands


def add_arguments(parser: argparse.ArgumentParser) -> None:
    of_control = "microseconds per decode step: decide, apply, commit, digest, log"
    of_log = "microseconds per step and tokens per second with no log, an asynchronous and a strict one"
    of_replay = "seconds of a recovery from a snapshot, events per second of a whole log folded and verified"
    of_fidelity = "percent by which simulated times differ from measured ones, on held-out data"
    of_latency = "one stream: time to the first token, and tokens per second after it"
    of_throughput = "many requests at once: tokens per second"
    of_serve = "streams over HTTP: time to the first token, tokens per second, beside other servers"
    of_determinism = "the same requests alone and in crowds under random limits: every token must be the same"
    of_recovery = "a server that is killed again and again, while streams run and resume"
    subcommands(
        parser,
        {
            "control": (of_control, control.add_arguments, control.run),
            "log": (of_log, log.add_arguments, log.run),
            "replay": (of_replay, replay.add_arguments, replay.run),
            "fidelity": (of_fidelity, fidelity.add_arguments, fidelity.run),
            "latency": (of_latency, latency.add_arguments, latency.run),
            "throughput": (of_throughput, throughput.add_arguments, throughput.run),
            "serve": (of_serve, serve.add_arguments, serve.run),
            "determinism": (of_determinism, determinism.add_arguments, determinism.run),
            "recovery": (of_recovery, recovery.add_arguments, recovery.run),
        },
    )
