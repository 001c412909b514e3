"""Real server processes for tests: start one, wait for a phase, stop it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 120.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServerProcess:
    """A server in its own process group. Use it in a `with` statement; `url` is there at once."""

    def __init__(self, command: list[str], port: int, stderr: Path, env: dict[str, str] | None = None) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._stderr = stderr
        self._sink = stderr.open("wb")
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=self._sink, start_new_session=True)

    @classmethod
    def toy(cls, folder: Path, env: dict[str, str] | None = None, **options: Any) -> ServerProcess:
        """A server on the toy model; `folder` holds its tokenizer."""
        port = options.pop("port", None) or free_port()
        given = json.dumps({"model": str(folder), "port": port, "served_model_name": "toy", **options})
        return cls([sys.executable, "-m", "tests.e2e.toy", given], port, folder / "stderr.txt", env)

    @property
    def stderr(self) -> str:
        return self._stderr.read_text(errors="replace")

    def wait_until_ready(self) -> ServerProcess:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and self.process.poll() is None:
            try:
                if httpx.get(f"{self.url}/ready", timeout=5).status_code == 200:
                    return self
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise AssertionError(f"the server did not become ready:\n{self.stderr}")

    def interrupt(self) -> int:
        """SIGINT to the parent process alone; its exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout=PATIENCE)

    def gauges(self) -> dict[str, float]:
        """The metrics without labels in common, by name (and the one label that differs)."""
        values = {}
        for line in httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                key = name.split("{")[0]
                extra = [p for p in name.partition("{")[2].rstrip("}").split(",") if p and "engine=" not in p]
                extra = [p for p in extra if not p.startswith("model_name=")]
                values[key + ("{" + ",".join(extra) + "}" if extra else "")] = float(value)
        return values

    def wait_until_idle(self) -> dict[str, float]:
        """The metrics once nothing runs or waits."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            gauges = self.gauges()
            busy = gauges["leftfold:num_requests_running"] + gauges["leftfold:num_requests_waiting"]
            if not busy and not gauges['leftfold:kv_pages{use="held"}']:
                return gauges
            time.sleep(0.05)
        raise AssertionError(f"still busy: {gauges}")

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._sink.close()
