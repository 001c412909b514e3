"""`leftfold replay whatif`: a log's own requests under other settings, on virtual time."""

from __future__ import annotations

import argparse
from typing import Any

from leftfold.commands.common import OK, UsageError, print_json, setting
from leftfold.commands.replay_common import add_log, allow_policy, checked_settings, read_log
from leftfold.commands.replay_views import guarded


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "The log's requests, when they came and as long as they were answered, through the real scheduler: as "
        "recorded, simulated with the same settings (how far to trust the rest), and with others. What a step costs "
        "is fitted to the log's own steps. Control calls and failures are not taken over; an answer that was cut "
        "short ends there."
    )
    add_log(parser)
    parser.add_argument("--set", dest="settings", metavar="KEY=VALUE", type=setting, action="append", default=[],
                        help="another setting, such as max_running=8; may be repeated")  # fmt: skip
    parser.add_argument("--policy", metavar="NAME", help="another policy: a name, or module:function (on PYTHONPATH)")
    parser.add_argument("--cost", metavar="FILE", help="a cost model instead of one fitted to the log")
    allow_policy(parser)


def run(args: argparse.Namespace) -> int:
    """Print the table; 0."""
    from leftfold.commands.simulate import cost_model
    from leftfold.replay.errors import SettingsError
    from leftfold.replay.policies import PolicyError, load
    from leftfold.replay.simulating.fit import FitError, fit, samples_of
    from leftfold.replay.simulating.whatif import recording, what_if

    settings = checked_settings(args.settings)
    if args.policy is not None:
        try:
            settings["policy"] = load(args.policy)
        except PolicyError as error:
            raise UsageError(f"--policy: {error}") from error

    def look() -> int:
        log = read_log(args.log)
        if args.cost is not None:
            cost = cost_model(args.cost)
        else:
            try:
                cost = fit(samples_of(log), f"the steps of the log {args.log}")
            except FitError as error:
                raise FitError(f"{error}; give one with --cost FILE (leftfold simulate fit writes it)") from error
        recorded = recording(log)
        try:
            if args.policy is not None:
                load(args.policy, strict=True)  # the log was folded with one that may fail
            table = what_if(recorded, cost, settings)
        except SettingsError as error:
            raise UsageError(f"--set: {error}") from error
        except PolicyError as error:
            raise UsageError(f"--policy: {error}") from error
        left_out = dict(recorded.left_out)
        about = {"warnings": warnings(table), "settings": settings, "left_out": left_out, "cost": cost.as_dict()}
        found = {**table, **about}
        print_json(found) if args.json else print(described(found))
        return OK

    return guarded(args, look)


COLUMNS = ("recorded", "simulated", "changed")
ANSWERED = ("stop", "length")


def described(found: dict[str, Any]) -> str:
    """The table for a reader."""
    lines = [f"{'':<24}" + "".join(f"{name:>14}" for name in COLUMNS), *_ends(found)]
    for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
        for part in ("mean", "p50", "p90", "p99"):
            lines.append(_line(f"{name[:4].rstrip('_').upper()} {part}, ms", [found[c][name][part] for c in COLUMNS]))
    for name, text in (
        ("output_tokens_per_second", "output tokens/s"), ("requests_per_second", "requests/s"),
        ("output_tokens", "output tokens"),
        ("virtual_seconds", "seconds"), ("steps", "steps"), ("preemptions", "preemptions"),
        ("cache_hit_share", "cache hit share"),
    ):  # fmt: skip
        lines.append(_line(text, [found[c][name] for c in COLUMNS]))
    lines += [f"warning: {text}" for text in found["warnings"]]
    changed = ", ".join(f"{name}={value}" for name, value in found["settings"].items())
    lines.append(f"changed: {changed or 'nothing'}")
    if found["left_out"]:
        lines.append("left out: " + ", ".join(f"{count} {name}" for name, count in found["left_out"].items()))
    quality = ", ".join(f"{name} {value}" for name, value in found["cost"]["quality"].items())
    lines.append(f"cost model: {found['cost']['source']} ({quality})")
    return "\n".join(lines)


def warnings(table: dict[str, dict[str, Any]]) -> list[str]:
    """What makes the changed figures look better than they are: fewer answers, whose times alone count, or shorter."""
    changed, before = table["changed"], table["recorded"]["ended"]
    worse = [
        f"{count} of {changed['requests']} end with {reason} (as recorded: {before.get(reason, 0)})"
        for reason, count in changed["ended"].items()
        if reason not in (*ANSWERED, "live") and count > before.get(reason, 0)
    ]
    if worse:
        return [f"{', '.join(worse)}; the times are those of the rest alone"]
    tokens, whole = changed["output_tokens"], table["simulated"]["output_tokens"]
    return [f"answers are cut short: {tokens} output tokens instead of {whole}"] if tokens < whole else []


def _ends(found: dict[str, Any]) -> list[str]:
    """How many choices of requests were answered, and how many ended otherwise, by reason."""
    ended = [found[column]["ended"] for column in COLUMNS]
    lines = [_line("answered", [sum(one.get(reason, 0) for reason in ANSWERED) for one in ended])]
    for reason in sorted({reason for one in ended for reason in one} - {*ANSWERED}):
        name = "still live" if reason == "live" else f"ended with {reason}"
        lines.append(_line(name, [one.get(reason, 0) for one in ended]))
    return lines


def _line(name: str, values: list[Any]) -> str:
    cells = [f"{'-':>14}" if value is None else f"{value:>14.3f}" if isinstance(value, float) else f"{value:>14}"
             for value in values]  # fmt: skip
    return f"{name:<24}" + "".join(cells)


COMMANDS: dict[str, tuple[str, Any, Any]] = {
    "whatif": ("the same requests under other settings, on virtual time", _arguments, run),
}
