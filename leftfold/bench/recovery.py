"""Kill a server again and again while streams run, and compare every token with those of an uninterrupted run.

A real server process on the model, killed with SIGKILL at random moments: all of it, or in a share of the kills its
engine alone. Each of the streams reads on from the last id that it has received; one that has none yet is asked again
under its Idempotency-Key. Every stream's positions and token ids are compared with those that the same server gave,
undisturbed, at the start.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from leftfold.commands.common import FINDING, OK, UsageError, natural, positive

TOPICS = ("rivers", "bread", "the moon", "old maps", "bees", "chess", "glass", "winter")
PATIENCE = 180.0
"""Seconds after which a server that does not come up, or a stream that does not move, is given up."""
ENGINE_ALONE = 0.3
"""The share of kills that hit the engine's process and leave the one that speaks HTTP."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `leftfold bench recovery`."""
    parser.add_argument("--model", default="smollm2", help="what to serve (default %(default)s)")
    parser.add_argument("--kills", type=natural, default=200, help="how often to kill (default %(default)s)")
    parser.add_argument("--streams", type=positive, default=16, help="streams at a time (default %(default)s)")
    parser.add_argument("--tokens", type=positive, default=64, help="tokens of each answer (default %(default)s)")
    parser.add_argument("--seed", type=natural, default=None, help="of the moments and the answers (default: drawn)")
    parser.add_argument(
        "--durability", choices=("strict", "async"), default="strict", help="of the log (default %(default)s)"
    )
    parser.add_argument("--longest", type=float, default=2.0, metavar="SECONDS", help="until a kill, at most (2)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Measure and print; exit code 1 if a token was lost, came twice or was another one."""
    seed = random.SystemRandom().randrange(2**32) if args.seed is None else args.seed
    if not 0 < args.longest <= 60:
        raise UsageError(f"--longest is {args.longest:g}, must be above 0 and at most 60")
    with tempfile.TemporaryDirectory(prefix="leftfold-recovery-") as folder:
        bench = Bench(args, seed, Path(folder))
        try:
            found = asyncio.run(bench.run())
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
    if args.json:
        print(json.dumps(found))
    else:
        print(
            f"{found['kills']} kills ({found['engine_kills']} of the engine alone), {found['streams']} streams, "
            f"{found['tokens']} tokens: {found['lost']} lost, {found['duplicated']} duplicated, "
            f"{found['different']} different (seed {seed}, {found['seconds']:.0f} s)"
        )
        for line in found["findings"][:20]:
            print(line)
    return FINDING if found["lost"] or found["duplicated"] or found["different"] else OK


@dataclass
class Stream:
    """One answer being read: what was asked, under which key, the answer's id, the place, the tokens by position."""

    number: int
    key: str
    id: str = ""
    place: str = ""
    tokens: dict[int, int] = field(default_factory=dict)
    text: str = ""
    reason: str | None = None
    duplicated: int = 0
    restarted: int = 0

    def take(self, event: dict[str, Any], place: str) -> None:
        """One chunk: its tokens stand right before its place; the end counts as one more."""
        (choice,) = event["choices"]
        ids, end = choice["token_ids"], choice["finish_reason"]
        last = int(place) - (end is not None)
        for position, token in enumerate(ids, last - len(ids)):
            if position in self.tokens:
                self.duplicated += 1
            else:
                self.tokens[position] = token
        self.text += choice["text"]
        self.reason = end or self.reason
        self.id, self.place = event["id"], place


class Server:
    """The server's process and where it listens; its log stays from one life to the next."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self._errors = folder / "stderr.txt"
        self._process: subprocess.Popen[bytes] | None = None
        self._command = [
            sys.executable, "-m", "leftfold", "serve", args.model, "--port", str(self.port), "--durability",
            args.durability, "--log-dir", str(folder / "log"), "--disable-access-log", "--engine-restarts", "1000000",
            "--retain-responses", "3600", "--on-disconnect", "continue", "--threads", "2",
        ]  # fmt: skip

    def start(self) -> None:
        with self._errors.open("ab") as errors:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, start_new_session=True
            )

    def engine(self) -> int | None:
        """The engine's process, if there is one now."""
        assert self._process is not None
        pid = self._process.pid
        with contextlib.suppress(OSError, ValueError):
            (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            return int(child)
        return None

    async def kill(self) -> None:
        """SIGKILL to both processes; returns when both are gone."""
        assert self._process is not None
        engine = self.engine()
        for pid in (self._process.pid, engine):
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._process.wait()
        while engine is not None and _lives(engine):
            await asyncio.sleep(0.01)

    def check(self) -> None:
        """Raises UsageError with the server's last words if it has ended by itself."""
        if self._process is not None and (code := self._process.poll()) is not None and code >= 0:
            lines = self._errors.read_text(errors="replace").splitlines()
            raise UsageError(f"the server ended with code {code}: {lines[-1] if lines else 'it said nothing'}")


class Bench:
    """One measurement: the uninterrupted run, then streams under kills until there were enough of them."""

    def __init__(self, args: argparse.Namespace, seed: int, folder: Path) -> None:
        self._args = args
        self._random = random.Random(seed)
        self._seed = seed
        self._server = Server(args, folder)
        self._keys = itertools.count()
        self._expected: list[Stream] = []
        self._done: list[Stream] = []
        self._over = False
        self._engine_kills = 0
        self._killed = 0

    async def run(self) -> dict[str, Any]:
        import httpx

        begun = time.monotonic()
        for number in (signal.SIGINT, signal.SIGTERM):  # so that no server is left behind
            asyncio.get_running_loop().add_signal_handler(number, _cancel, asyncio.current_task())
        self._server.start()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        try:
            async with httpx.AsyncClient(base_url=self._server.url, timeout=PATIENCE, limits=limits) as client:
                await self._until_ready(client)
                for first in range(0, self._args.streams, 4):  # in other batches than later
                    numbers = range(first, min(first + 4, self._args.streams))
                    self._expected += await asyncio.gather(*(self._read(client, self._stream(n)) for n in numbers))
                readers = [asyncio.create_task(self._keep_reading(client, n)) for n in range(self._args.streams)]
                killer = asyncio.create_task(self._kill(client))
                await asyncio.wait([killer, *readers], return_when=asyncio.FIRST_EXCEPTION)
                for task in (killer, *readers):
                    if task.done():
                        task.result()
        finally:
            await self._server.kill()
        return self._verdict(time.monotonic() - begun)

    async def _until_ready(self, client: Any) -> None:
        import httpx

        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            self._server.check()
            with contextlib.suppress(httpx.TransportError):
                if (await client.get("/ready")).status_code == 200:
                    return
            await asyncio.sleep(0.03)
        raise UsageError(f"the server did not become ready within {PATIENCE:g} seconds")

    async def _kill(self, client: Any) -> None:
        while self._killed < self._args.kills:
            await self._until_ready(client)
            await asyncio.sleep(self._random.random() * self._args.longest)
            self._killed += 1
            engine = self._server.engine() if self._random.random() < ENGINE_ALONE else None
            if engine is not None:
                self._engine_kills += 1
                with contextlib.suppress(ProcessLookupError):
                    os.kill(engine, signal.SIGKILL)
                await asyncio.sleep(0.05)  # until the server has seen it
            else:
                await self._server.kill()
                self._server.start()
            if not self._args.json and self._killed % 5 == 0:
                print(f"{self._killed} kills, {len(self._done)} streams read", file=sys.stderr, flush=True)
        await self._until_ready(client)
        self._over = True

    async def _keep_reading(self, client: Any, number: int) -> None:
        while not self._over:
            self._done.append(await self._read(client, self._stream(number)))

    def _stream(self, number: int) -> Stream:
        return Stream(number, f"recovery-{next(self._keys)}")

    async def _read(self, client: Any, stream: Stream) -> Stream:
        """Reads a stream to its end, however often the server falls."""
        import httpx

        moved, before = time.monotonic(), -1
        while stream.reason is None:
            if len(stream.tokens) != before:
                moved, before = time.monotonic(), len(stream.tokens)
            elif time.monotonic() - moved > PATIENCE:
                return stream  # the verdict counts what is missing
            try:
                async with self._asked(client, stream) as answer:
                    if answer.status_code == 404:
                        return stream
                    if answer.status_code == 200:
                        await self._take(answer, stream)
            except httpx.TransportError:
                pass
            if stream.reason is None:
                await asyncio.sleep(0.05)
        return stream

    def _asked(self, client: Any, stream: Stream) -> Any:
        if stream.place:
            return client.stream("GET", f"/v1/streams/{stream.id}", params={"from": stream.place})
        if stream.id:
            return client.stream("GET", f"/v1/streams/{stream.id}")
        topic = TOPICS[stream.number % len(TOPICS)]
        body = {
            "prompt": f"{stream.number + 1} things that everybody should know about {topic}:\n1.",
            "max_tokens": self._args.tokens,
            "temperature": 0 if stream.number % 2 else 0.8,
            "seed": self._seed + stream.number,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        return client.stream("POST", "/v1/completions", json=body, headers={"Idempotency-Key": stream.key})

    async def _take(self, answer: Any, stream: Stream) -> None:
        place = ""
        async for line in _lines(answer):
            if line.startswith("id: "):
                place = line[4:]
            elif line.startswith("data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    return  # a server that is being killed may say so; what is missing is read from the next
                stream.take(event, place)

    def _verdict(self, seconds: float) -> dict[str, Any]:
        lost = duplicated = different = 0
        findings = []
        for stream in self._done:
            right = self._expected[stream.number]
            missing = [position for position in right.tokens if position not in stream.tokens]
            other = [p for p, token in stream.tokens.items() if right.tokens.get(p) != token]
            lost += len(missing)
            duplicated += stream.duplicated
            different += len(other)
            if not missing and not other and (stream.text, stream.reason) != (right.text, right.reason):
                different += 1
                findings.append(f"{stream.id}: text or end differ")
            if missing or other or stream.duplicated:
                findings.append(
                    f"{stream.id} (stream {stream.number}): lost {missing[:5]}, different {other[:5]}, "
                    f"duplicated {stream.duplicated}"
                )
        return {
            "kills": self._killed,
            "engine_kills": self._engine_kills,
            "streams": len(self._done),
            "tokens": sum(len(stream.tokens) for stream in self._done),
            "lost": lost,
            "duplicated": duplicated,
            "different": different,
            "seed": self._seed,
            "durability": self._args.durability,
            "seconds": round(seconds, 1),
            "findings": findings,
        }


def _cancel(task: asyncio.Task[Any] | None) -> None:
    if task is not None:
        task.cancel()


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def _lines(answer: Any) -> AsyncIterator[str]:
    """Whole events alone: the lines of one that was cut off are not given out."""
    event: list[str] = []
    async for line in answer.aiter_lines():
        if line:
            event.append(line)
            continue
        for kept in event:
            yield kept
        event = []


__all__ = ["Bench", "Stream", "add_arguments", "run"]
