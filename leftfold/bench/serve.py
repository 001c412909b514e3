"""Streams over HTTP, all at once: time to first token, time per token, tokens per second.

Without --url a server is started on loopback for the run, with an asynchronous log. Prompts with a common prefix (C)
are measured in two forms in each round: with a prefix that no server has seen, then (`primed`) others with the same
one. --vs measures others with the same prompts and limits and tells ratios: `vllm` and `llama.cpp` are started where
they are installed (`vllm=PYTHON`, `llama.cpp=PROGRAM`: where), NAME=URL is an OpenAI-compatible server that runs
already. All are up at once, and each round asks one after the other, with a pause after each, so that what a machine
has left for us changes for all alike.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import urlsplit

from leftfold.bench import peer_servers
from leftfold.bench.presets import PRESETS, Preset
from leftfold.commands.common import OK, UsageError, positive, print_json, threads

PATIENCE = 120.0
REST = 1.6
"""Seconds between two servers' rounds: workers that wait for work by spinning do so for about one."""
VOCABULARY = 40_000
"""Ids of prompts are below; peers are asked with token ids, so they need the same tokenizer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `leftfold bench serve`."""
    told = "the workload (default %(default)s); C is measured with its prefix new, and cached"
    parser.add_argument("--preset", choices=["A", "B", "C", "D"], default="D", help=told)
    parser.add_argument("--model", default="smollm2", help="what to serve (default %(default)s)")
    parser.add_argument("--threads", type=threads, default=2, help="threads of the executor (default %(default)s)")
    parser.add_argument("--rounds", type=positive, default=3, help="measured rounds; medians are told (%(default)s)")
    parser.add_argument("--url", help="a server that runs already, instead of starting one")
    add_peers(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_peers(parser: argparse.ArgumentParser) -> None:
    """The argument `--vs`."""
    told = "another engine to compare with, over HTTP: vllm, llama.cpp (started), or NAME=URL"
    parser.add_argument("--vs", action="append", default=[], metavar="PEER", help=told)


def run(args: argparse.Namespace) -> int:
    """Measure and print; exit code 0."""
    preset = PRESETS[args.preset]
    peers = [peer_servers.peer(text) for text in args.vs]
    with ExitStack() as running:
        url, ready = running.enter_context(_given(args.url) if args.url else _started(args, preset))
        urls = [url]
        urls += [running.enter_context(peer_servers.serving(each, args.model, preset, args.threads)) for each in peers]
        ours, *theirs = measure(urls, preset, args.rounds)
    found = {"preset": args.preset, "model": args.model, "rounds": args.rounds, "ready_seconds": ready, **ours}
    found["peers"] = {each.name: _compared(ours, figures) for each, figures in zip(peers, theirs, strict=True)}
    if args.json:
        print_json(found)
    else:
        _print(args.preset, found)
    return OK


FIGURES = ("output_throughput", "decode_throughput", "median_ttft_ms", "median_tpot_ms")
PRIMED = "primed"
"""Under this name, as in `bench throughput`: the same figures where a prefix has been served before."""


def _compared(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """A peer's figures, with ours as multiples of them: of each form that was measured."""
    primed = {PRIMED: _compared(ours[PRIMED], theirs[PRIMED])} if PRIMED in theirs else {}
    return {**theirs, "ratios": {name: round(ours[name] / theirs[name], 3) for name in FIGURES}, **primed}


def _print(preset: str, found: dict[str, Any]) -> None:
    _tell(preset, found, found["peers"])
    if PRIMED in found:
        peers = {peer: theirs[PRIMED] for peer, theirs in found["peers"].items()}
        _tell(f"{preset} with its prefix cached", found[PRIMED], peers)


def _tell(what: str, ours: dict[str, Any], peers: dict[str, Any]) -> None:
    print(f"{what}: " + ", ".join(f"{name} {ours[name]}" for name in FIGURES))
    for peer, theirs in peers.items():
        print(f"  {peer}: " + ", ".join(f"{name} {theirs[name]} (× {theirs['ratios'][name]:.2f})" for name in FIGURES))


@contextmanager
def _given(url: str) -> Iterator[tuple[str, float | None]]:
    if not url.startswith("http://"):
        raise UsageError(f"--url {url!r} does not begin with http://")
    yield url, None


@contextmanager
def _started(args: argparse.Namespace, preset: Preset) -> Iterator[tuple[str, float | None]]:
    """A server of our own on a free port; its address, and the seconds until it was ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    with tempfile.TemporaryDirectory(prefix="leftfold-bench-") as folder:
        command = [sys.executable, "-m", "leftfold", "serve", args.model, "--port", str(port)]
        command += ["--threads", str(args.threads), "--max-num-seqs", str(preset.running)]
        command += ["--log-dir", f"{folder}/log", "--disable-access-log"]
        for name in ("quantization", "max_num_batched_tokens"):
            if (value := getattr(args, name, None)) is not None:
                command += [f"--{name.replace('_', '-')}", str(value)]
        begun = time.perf_counter()
        with open(f"{folder}/stderr", "wb") as errors:
            process = subprocess.Popen(command, stderr=errors, stdin=subprocess.DEVNULL)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(url, process, f"{folder}/stderr")
            yield url, round(time.perf_counter() - begun, 3)
        finally:
            process.terminate()
            process.wait()


def _wait(url: str, process: subprocess.Popen[bytes], errors: str) -> None:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.02)
    with open(errors, encoding="utf-8", errors="replace") as file:
        said = (file.read().strip().splitlines() or ["it said nothing"])[-1]
    raise UsageError(f"the server did not become ready: {said}")


def measure(urls: Sequence[str], preset: Preset, rounds: int) -> list[dict[str, Any]]:
    """Of each server, medians over `rounds` rounds with other prompts each; one more before them warms up.

    Where prompts have a prefix in common, a round asks for others with it as well: `primed` has their medians.
    Raises UsageError.
    """
    return asyncio.run(_measure([(url, _model(url)) for url in urls], preset, rounds))


@contextmanager
def _answering(url: str) -> Iterator[None]:
    try:
        yield
    except (OSError, asyncio.IncompleteReadError, ValueError, LookupError) as error:
        raise UsageError(f"the server at {url} does not answer as expected: {error}") from None


def _model(url: str) -> str:
    with _answering(url), urllib.request.urlopen(f"{url}/v1/models", timeout=10) as response:
        return str(json.load(response)["data"][0]["id"])


async def _measure(servers: Sequence[tuple[str, str]], preset: Preset, rounds: int) -> list[dict[str, Any]]:
    """`servers`: address and model of each. Every other round asks them in reverse."""
    forms = {"": preset.prompts, PRIMED: preset.primed} if preset.shared else {"": preset.prompts}
    taken: list[dict[str, list[dict[str, float]]]] = [{form: [] for form in forms} for _ in servers]
    for number in range(rounds + 1):
        for (url, model), figures in [*zip(servers, taken, strict=True)][:: -1 if number % 2 else 1]:
            with _answering(url):
                for form, prompts in forms.items():
                    figures[form].append(await _round(url, model, prompts(VOCABULARY, seed=number), preset.output))
            if len(servers) > 1:
                await asyncio.sleep(REST)
    return [_medians_of(figures) for figures in taken]


def _medians_of(figures: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    found: dict[str, Any] = _medians(figures[""][1:])
    if PRIMED in figures:
        found[PRIMED] = _medians(figures[PRIMED][1:])
    return found


async def _round(url: str, model: str, prompts: Sequence[list[int]], output: int) -> dict[str, float]:
    """All prompts at once."""
    begun = time.perf_counter()
    streams = await asyncio.gather(*(_stream(url, model, prompt, output) for prompt in prompts))
    return _figures(streams, time.perf_counter() - begun)


def _medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(one[name] for one in rounds), 3) for name in rounds[0]}


def _figures(streams: Sequence[tuple[list[float], int, int]], seconds: float) -> dict[str, float]:
    """`streams`: seconds from asking to each piece, tokens out, tokens in."""
    out = sum(count for _, count, _ in streams)
    ttft = [times[0] for times, _, _ in streams]
    tpot = [(times[-1] - times[0]) / max(1, count - 1) for times, count, _ in streams]
    return {
        "duration": seconds,
        "request_throughput": len(streams) / seconds,
        "output_throughput": out / seconds,
        "total_token_throughput": (out + sum(count for _, _, count in streams)) / seconds,
        "median_ttft_ms": statistics.median(ttft) * 1e3,
        "p99_ttft_ms": sorted(ttft)[int(0.99 * (len(ttft) - 1))] * 1e3,
        "median_tpot_ms": statistics.median(tpot) * 1e3,
        "decode_throughput": statistics.median(1 / max(each, 1e-9) for each in tpot),
    }


async def _stream(url: str, model: str, prompt: list[int], output: int) -> tuple[list[float], int, int]:
    """One streamed completion: seconds until each piece came, tokens out and in."""
    address = urlsplit(url)
    body = json.dumps({
        "model": model, "prompt": prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }).encode()  # fmt: skip
    begun = time.perf_counter()
    reader, writer = await asyncio.open_connection(address.hostname, address.port or 80)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    times: list[float] = []
    last = b""  # the client shares the cores: it reads only what it must
    try:
        status = await reader.readline()
        if b" 200 " not in status:
            raise ValueError(status.decode(errors="replace").strip() or "nothing")
        async for line in reader:
            if line.startswith(b"data: {"):
                times.append(time.perf_counter() - begun)
                last = line
    finally:
        writer.close()
    usage = json.loads(last[6:] or b"{}").get("usage")
    if not usage or len(times) < 2:
        raise ValueError("a stream ended without tokens or without its usage")
    if not json.loads(last[6:]).get("choices"):  # an event of the usage alone is no token
        times.pop()
    return times, usage["completion_tokens"], usage["prompt_tokens"]
