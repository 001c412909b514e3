"""Draw the request's state machine from the table that the engine runs on."""

from __future__ import annotations

import argparse

from leftfold.commands.common import OK


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=("mermaid", "table"), default="mermaid", help="mermaid (default) or table")


def run(args: argparse.Namespace) -> int:
    print(mermaid() if args.format == "mermaid" else table())
    return OK


def edges() -> list[tuple[str, str, str]]:
    """(from, to, triggers) in the table's order; "" is the start. Edges between the same phases are one."""
    from leftfold.fsm.lifecycle import TRANSITIONS

    merged: dict[tuple[str, str], list[str]] = {}
    for (phase, trigger), target in TRANSITIONS.items():
        ends = (phase.name if phase else "", target.name)
        merged.setdefault(ends, []).append(trigger.value)
    return [(source, target, " · ".join(triggers)) for (source, target), triggers in merged.items()]


def mermaid() -> str:
    """A Mermaid state diagram."""
    lines = ["stateDiagram-v2"]
    lines += [f"    {source or '[*]'} --> {target}: {triggers}" for source, target, triggers in edges()]
    return "\n".join([*lines, "    FINISHED --> [*]"])


def table() -> str:
    """A Markdown table, one row for each edge."""
    rows = [f"| {source or '–'} | {triggers} | {target} |" for source, target, triggers in edges()]
    return "\n".join(["| from | trigger | to |", "| --- | --- | --- |", *rows])
