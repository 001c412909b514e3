"""Simulate: the real scheduler on virtual time, with a public trace's requests and a model of what steps cost.

leftfold simulate --trace FILE runs a trace; leftfold simulate fit LOG fits a cost model to a log's own steps. Trace
formats: Mooncake JSONL, Azure CSV, ShareGPT and LLMServingSim JSONL, agent sessions (a JSON file or a folder of them),
OpenAI batch JSONL. Without --cost the built-in model is taken; the result says where its figures come from. Equal
arguments give equal output but for wall_seconds. Every request gets as many tokens as the trace says.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from leftfold.commands.common import FINDING, OK, Parser, UsageError, named, natural, positive, print_json, setting

if TYPE_CHECKING:
    from leftfold.executor.cost import CostModel

DEFAULTS = {"num_pages": 65536, "page_size": 16, "max_running": 256, "max_batch_tokens": 2048}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_subparsers(dest="subcommand", metavar="fit", parser_class=Parser)
    text = "fit a model of what steps cost to a log's steps, or to a measured run's requests"
    fit = group.add_parser("fit", help=text, description=text)
    _fit_arguments(fit)
    fit.set_defaults(run=run_fit)
    parser.add_argument("--trace", metavar="FILE", help="the trace (or a folder of agent sessions)")
    parser.add_argument("--limit", type=positive, metavar="N", help="its first N requests alone")
    parser.add_argument("--seed", type=natural, default=0, help="of what a trace leaves open (default %(default)s)")
    parser.add_argument("--rate", type=_rate, metavar="R", help="R arrivals a second, drawn from the seed (Poisson)")
    parser.add_argument("--cost", metavar="FILE", help="a cost model, as `leftfold simulate fit -o FILE` writes it")
    parser.add_argument("--replicas", type=positive, default=1, metavar="N", help="so many engines (default 1)")
    parser.add_argument("--router", choices=("round_robin", "least_loaded", "prefix"), default="round_robin",
                        help="who gets a request (default %(default)s)")  # fmt: skip
    defaults = ", ".join(f"{name}={value}" for name, value in DEFAULTS.items())
    parser.add_argument("--set", dest="settings", metavar="KEY=VALUE", type=setting, action="append", default=[],
                        help=f"the engine's limits (default {defaults}, max_model_len as the trace needs)")  # fmt: skip
    parser.add_argument("--policy", metavar="NAME",
                        help="who is admitted first: a name (fcfs), or module:function (on PYTHONPATH)")  # fmt: skip
    parser.add_argument("--log", type=named, metavar="DIR", help="keep the engine's events here (with one replica)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _fit_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="LOG", help="a log's folder, or a measured run's *_requests.jsonl")
    parser.add_argument("--meta", metavar="FILE", help="the measured run's *_meta.json")
    parser.add_argument("-o", "--out", metavar="FILE", help="write the model here")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1e-6 <= value <= 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of requests per second")
    return value


def run(args: argparse.Namespace) -> int:
    """Simulate a trace; 0, or 1 if the simulation could not be carried through."""
    from time import perf_counter

    from leftfold.replay.errors import ReplayError
    from leftfold.replay.policies import PolicyError
    from leftfold.replay.simulating import ROUTERS, TraceError, read_trace, simulate, summarize

    if args.trace is None:
        raise UsageError("simulate needs --trace FILE, or the command fit (see leftfold simulate --help)")
    if args.log is not None and args.replicas > 1:
        raise UsageError("--log keeps the events of one engine: leave out --replicas")
    begin = perf_counter()
    cost = cost_model(args.cost)
    try:
        trace = read_trace(args.trace, args.limit, args.seed, args.rate)
    except TraceError as error:
        raise UsageError(str(error)) from error
    config = _config(args, trace.longest)
    log = _log(args.log)
    try:
        run = simulate(trace.jobs, config, cost, replicas=args.replicas, router=ROUTERS[args.router],
                       keep=() if log is None else (log.append,))  # fmt: skip
    except PolicyError as error:
        raise UsageError(f"--policy: {error}") from error
    except ReplayError as error:
        print_json({"error": str(error)}) if args.json else print(f"leftfold: {error}", file=sys.stderr)
        return FINDING
    finally:
        if log is not None:
            log.close()
    figures = summarize(run).as_dict()
    found = {
        **figures,
        "trace": trace.kind,
        "seed": args.seed,
        "router": args.router if args.replicas > 1 else None,
        "replicas": [{"requests": count, **_shares(replica)}
                     for count, replica in zip(run.routed, run.replicas, strict=True)],
        "config": config.as_dict(),
        "cost": cost.as_dict(),
        "wall_seconds": round(perf_counter() - begin, 3),
    }  # fmt: skip
    print_json(found) if args.json else print(_described(found))
    return OK


def _shares(replica: Any) -> dict[str, Any]:
    counts = replica.state.counts
    share = counts["prefix_hits"] / counts["prefix_queries"] if counts["prefix_queries"] else 0.0
    return {"steps": replica.steps, "preemptions": counts["preemptions"], "cache_hit_share": round(share, 6)}


def cost_model(path: str | None) -> CostModel:
    """The model in a file, or the built-in one. Raises UsageError."""
    from leftfold.executor.cost import CostModel
    from leftfold.executor.errors import CostError
    from leftfold.replay.simulating import built_in

    try:
        return built_in() if path is None else CostModel.load(path)
    except CostError as error:
        raise UsageError(f"--cost: {error}") from error


def _config(args: argparse.Namespace, longest: int) -> Any:
    from leftfold.commands.replay_common import checked_settings
    from leftfold.fsm import Config, ConfigError
    from leftfold.replay.policies import PolicyError, load

    settings = {**DEFAULTS, "max_model_len": longest + 1, **checked_settings(args.settings)}
    try:
        if args.policy is not None:
            settings["policy"] = load(args.policy, strict=True)
        return Config.from_dict(settings)
    except (ConfigError, PolicyError) as error:
        raise UsageError(str(error)) from error


def _log(path: str | None) -> Any:
    from pathlib import Path

    from leftfold.events import EventLog, LogError

    if path is None:
        return None
    try:
        if Path(path).exists() and any(Path(path).iterdir()):
            raise UsageError(f"--log {path}: the folder is not empty")
        return EventLog.open(path)
    except (OSError, LogError) as error:
        raise UsageError(f"--log {path}: {error}") from error


def _described(found: dict[str, Any]) -> str:
    ratio = found["virtual_seconds"] / max(found["wall_seconds"], 1e-9)
    ended = ", ".join(f"{count} {reason}" for reason, count in found["ended"].items())
    lines = [
        f"{found['requests']} requests ({ended}), {found['steps']} steps, {found['virtual_seconds']:.1f} s of virtual "
        f"time in {found['wall_seconds']:.1f} s ({ratio:.0f} ×)",
        f"{'ms':<8}" + "".join(f"{name:>14}" for name in ("mean", "p50", "p90", "p99")),
    ]
    for name in ("ttft", "tpot", "e2e"):
        values = found[f"{name}_ms"].values()
        cells = "".join(f"{'-':>14}" if value is None else f"{value:>14.1f}" for value in values)
        lines.append(f"{name.upper():<8}{cells}")
    lines.append(
        f"{found['requests_per_second']:.2f} requests/s, {found['output_tokens_per_second']:.0f} output tokens/s, "
        f"{found['preemptions']} preemptions, {100 * found['cache_hit_share']:.1f} % of prompts from the prefix cache"
    )
    lines.append(f"cost model: {found['cost']['source']}")
    return "\n".join(lines)


def run_fit(args: argparse.Namespace) -> int:
    """Fit, say how well, write the model if asked."""
    import json

    from leftfold.commands.replay_common import out_path, read_log, report_damage
    from leftfold.events import CodecError, LogError
    from leftfold.replay.errors import ReplayError
    from leftfold.replay.simulating import TraceError

    try:
        if args.meta is not None:
            from leftfold.replay.simulating.measured import calibrate, read_measured

            measured = read_measured(args.source, args.meta)
            model = calibrate(measured, range(len(measured.jobs)))
        else:
            from leftfold.replay.simulating.fit import fit, samples_of

            model = fit(samples_of(read_log(args.source)), f"the steps of the log {args.source}")
    except TraceError as error:
        raise UsageError(str(error)) from error
    except (ReplayError, LogError, CodecError) as error:
        return report_damage(args.json, error, args.source)
    if args.out is not None:
        try:
            out_path(args.out, args.source).write_text(json.dumps(model.as_dict(), indent=1) + "\n")
        except OSError as error:
            raise UsageError(f"-o {args.out}: {error}") from error
    print_json({**model.as_dict(), "out": args.out}) if args.json else print(describe_model(model))
    return OK


def describe_model(model: CostModel) -> str:
    """A model and its fit, for a reader."""
    quality = ", ".join(f"{name} {value}" for name, value in model.quality.items())
    costs = "\n".join(f"  {name:<16} {value:>14.4f} µs" for name, value in model.microseconds.items())
    return f"{model.source}\n{costs}\nfit: {quality}"
