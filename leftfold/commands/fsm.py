"""Draw the state machines from the tables that the engine runs on."""

from __future__ import annotations

import argparse

from leftfold.commands.common import OK

Edge = tuple[str, str, str]
"""From, to, triggers; "" is the start."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--machine", choices=("request", "engine"), default="request", help="default: %(default)s")
    parser.add_argument("--format", choices=("mermaid", "svg", "table"), default="mermaid", help="default: %(default)s")


def run(args: argparse.Namespace) -> int:
    found = edges(args.machine)
    if args.format == "svg":
        from leftfold.commands.drawing import svg

        print(svg(found, f"The {args.machine} machine"))
    else:
        print(mermaid(found) if args.format == "mermaid" else table(found))
    return OK


def edges(machine: str = "request") -> list[Edge]:
    """Edges of a machine in its table's order. Edges between the same phases are one."""
    from leftfold.fsm import GATES, TRANSITIONS

    merged: dict[tuple[str, str], list[str]] = {("", "RUNNING"): []} if machine == "engine" else {}
    for (source, trigger), target in (TRANSITIONS if machine == "request" else GATES).items():
        ends = (source.name if source else "", target.name)
        merged.setdefault(ends, []).append(trigger.value)
    return [(source, target, " · ".join(triggers)) for (source, target), triggers in merged.items()]


def mermaid(found: list[Edge]) -> str:
    """A Mermaid state diagram."""
    lines = ["stateDiagram-v2"]
    for source, target, triggers in found:
        lines.append(f"    {source or '[*]'} --> {target}" + (f": {triggers}" if triggers else ""))
    left = [source for source, _, _ in found]
    ends = dict.fromkeys(target for _, target, _ in found if target not in left)
    return "\n".join([*lines, *(f"    {end} --> [*]" for end in ends)])


def table(found: list[Edge]) -> str:
    """A Markdown table, one row for each edge."""
    rows = [f"| {source or '–'} | {triggers or '–'} | {target} |" for source, target, triggers in found]
    return "\n".join(["| from | trigger | to |", "| --- | --- | --- |", *rows])
