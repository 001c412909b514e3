"""Serve a model over an OpenAI-compatible HTTP API, with every event logged.

MODEL is `smollm2` (the default, fetched once), a local Hugging Face folder, a .gguf file or a hub id. The log goes
to logs/<model>; a start on an existing log goes on with it. Ctrl-C stops cleanly. Keys can come from the environment
as well (LEFTFOLD_API_KEY, LEFTFOLD_ADMIN_API_KEY), where other users of the machine don't see them.
"""

from __future__ import annotations

import argparse
from typing import Any

from leftfold.commands.common import key, keys_from_environment, named, natural, positive, seconds, size, threads
from leftfold.commands.replay_common import policy_of_log


def add_arguments(parser: argparse.ArgumentParser) -> None:
    quiet = argparse.SUPPRESS
    parser.add_argument("model", nargs="?", type=model, metavar="MODEL", default=quiet, help="what to serve")
    http = parser.add_argument_group("HTTP")
    _add(http, "--host", help="address to listen on (127.0.0.1)")
    _add(http, "--port", type=port, help="port to listen on (8000; 0: any free one)")
    _add(http, "--api-key", type=key, help="key that clients must send as a bearer token (LEFTFOLD_API_KEY)")
    _add(http, "--admin-api-key", type=key, help="key for control routes, such as /pause (LEFTFOLD_ADMIN_API_KEY)")
    _add(http, "--served-model-name", type=named, help="the model's name in the API (default: its own)")
    _add(http, "--max-body-bytes", type=body_size, help="largest request body (16MiB)")
    _add(http, "--max-open-requests", type=positive, help="requests that are answered at a time (4096)")
    _add(http, "--max-n", type=positive, help="most choices of one request (128)")
    _add(http, "--request-timeout", type=seconds, help="seconds until an answer ends at the latest (0: no limit)")
    _add(http, "--queue-timeout", type=seconds, help="seconds that a request waits to run at most (600; 0: no limit)")
    _add(http, "--sleep-policy", choices=("wait", "refuse"), help="new requests while paused or asleep (wait)")
    _add(http, "--on-disconnect", choices=("abort", "continue"), help="a stream whose client hangs up (abort)")
    _add(http, "--retain-responses", type=seconds, help="seconds that an answer can be read again after its end (600)")
    _add(http, "--engine-restarts", type=natural, help="starts in a row of an engine process that died (5)")
    _add(http, "--disable-access-log", action="store_true", help="no line per HTTP request")
    log = parser.add_argument_group("log")
    _add(log, "--log-dir", type=named, metavar="DIR", help="the log itself (logs/<model>)")
    _add(log, "--durability", choices=("off", "async", "strict"), help="what is kept before it is told (async)")
    _add(log, "--on-log-failure", choices=("stop", "serve"), help="stop admitting (default), or go on without a log")
    _add(log, "--log-segment-bytes", type=segment, metavar="SIZE", help="size at which a segment is closed (64MiB)")
    _add(log, "--log-retention", type=retention, metavar="AGE|SIZE", help="how much is kept, 7d or 10GiB (all)")
    _add(log, "--snapshot-every", type=natural, metavar="EVENTS", help="events between snapshots (20000; 0: none)")
    _add(log, "--resume", type=yes_or_no, metavar="yes|no", help="go on with live requests of the log (yes)")
    _add(
        log,
        "--allow-policy",
        type=policy_of_log,
        action="append",
        metavar="MODULE:FUNCTION",
        help="import this policy, because the log was made with it; --policy says who is next now",
    )
    _add(log, "--log-logprobs", action="store_true", help="keep the logprobs that clients were told in the log, too")
    _add(log, "--shutdown-timeout", type=seconds, metavar="SECONDS", help="time to drain on a stop (2)")
    add_engine_arguments(parser)


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Limits and memory of the engine; shared by the commands that hold one."""
    limits = parser.add_argument_group("limits")
    _add(limits, "--max-num-seqs", type=positive, help="most running requests")
    _add(limits, "--max-num-batched-tokens", type=positive, help="most tokens in one step (256; 8192 on a GPU)")
    _add(limits, "--max-chunk-tokens", type=positive, help="most tokens of one request in one step")
    _add(limits, "--max-model-len", type=positive, help="longest request, prompt and answer together, in tokens")
    _add(limits, "--max-queued-requests", type=positive, help="refuse admissions beyond so many waiting requests")
    _add(limits, "--max-queued-tokens", type=positive, help="refuse admissions beyond so many waiting tokens")
    _add(limits, "--growth-horizon", type=natural, metavar="TOKENS", help="admit only with room for so much growth (0)")
    _add(
        limits,
        "--policy",
        type=policy,
        metavar="NAME",
        help="who is next (spf; fcfs on a GPU), or module:function (on PYTHONPATH)",
    )
    _add(limits, "--pipeline-depth", type=int, choices=(0, 1, 2), help="steps planned ahead (1 on CUDA, else 0)")
    memory = parser.add_argument_group("KV memory").add_mutually_exclusive_group()
    _add(memory, "--kv-tokens", type=positive, metavar="TOKENS", help="size of the KV cache in tokens")
    _add(memory, "--kv-memory", type=size, metavar="SIZE", help="size of the KV cache, such as 512MiB")
    kv = parser.add_argument_group("KV cache")
    _add(kv, "--page-size", type=positive, metavar="TOKENS", help="tokens per page (16)")
    _add(kv, "--no-prefix-cache", dest="prefix_cache", action="store_false", help="do not reuse KV between requests")
    machine = parser.add_argument_group("machine")
    _add(machine, "--device", choices=("auto", "cpu", "cuda"), help="where to run (auto)")
    _add(machine, "--dtype", choices=("auto", "float32", "bfloat16", "float16"), help="of weights and KV (auto)")
    _add(
        machine,
        "--quantization",
        choices=("auto", "none", "int8", "int4"),
        help="8- or 4-bit weights, 8-bit KV (auto: on a CPU, for files that are quantized already)",
    )
    _add(machine, "--threads", type=threads, help="threads of the executor (at most 64, or 4 per processor)")
    _add(machine, "--kernels", metavar="OPERATION=KERNEL,…", help="kernels to use instead of the best ones")


def _add(group: Any, flag: str, **options: Any) -> None:
    group.add_argument(flag, default=argparse.SUPPRESS, **options)


def model(text: str) -> str:
    """A model's name; an empty one would be the folder we are in."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the model is empty: give a name, a folder or a file, or leave it out")
    return text


def policy(text: str) -> str:
    """The name of a policy, or a module:function; looked up only now, so that `--help` costs nothing."""
    from leftfold.replay.policies import PolicyError, load

    try:
        return load(text)
    except PolicyError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def body_size(text: str) -> int:
    """The largest body; with none at all nothing could be asked."""
    value = size(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} leaves no room for a body: give at least 1")
    return value


def segment(text: str) -> int:
    """The size of a segment; a tiny one would be a file per record."""
    value = size(text)
    if value < 4096:
        raise argparse.ArgumentTypeError(f"{text!r} is less than a segment should have: give at least 4KiB")
    return value


def retention(text: str) -> str:
    """How much of a log is kept."""
    from leftfold.events.compaction import Retention

    try:
        Retention.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def yes_or_no(text: str) -> bool:
    if text not in ("yes", "no"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither yes nor no")
    return text == "yes"


def port(text: str) -> int:
    value = natural(text)
    if value > 65535:
        raise argparse.ArgumentTypeError(f"port {value} is beyond 65535")
    return value


def given(args: argparse.Namespace) -> dict[str, Any]:
    """What the user gave, by option name."""
    return {name: value for name, value in vars(args).items() if name not in ("run", "launch", "subcommand")}


def run(args: argparse.Namespace) -> int:
    options = keys_from_environment("api_key", "admin_api_key") | given(args)
    code: int = args.launch(options)
    return code
