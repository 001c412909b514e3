"""A reducer that fails under a living server: everybody who waits hears an error at once, and the server ends."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.servers import PATIENCE, ServerProcess, free_port
from tests.e2e.test_server_life import chat, engine_of, eventually
from tests.tiny_folder import write_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "toy", {})


def breaking(folder: Path, **options: Any) -> ServerProcess:
    port = free_port()
    given = json.dumps({"model": str(folder), "port": port, "served_model_name": "toy", "max_num_seqs": 2, **options})
    environment = {"TOY_STEP_SECONDS": "0.02", "TOY_BREAK": str(folder / "break")}
    return ServerProcess([sys.executable, "-m", "tests.e2e.breaking", given], port, folder / "stderr.txt", environment)


class Asking:
    """Completions that are asked for, two of them streamed, and one that waits for them."""

    def __init__(self, server: ServerProcess) -> None:
        self.lines: list[list[str]] = [[], []]
        self.whole: list[httpx.Response] = []
        self._server = server
        self._threads = [threading.Thread(target=self._read, args=(lines,)) for lines in self.lines]
        for thread in self._threads:
            thread.start()
        eventually(lambda: all(len(lines) > 5 for lines in self.lines))
        waiting = threading.Thread(target=lambda: self.whole.append(chat(server, max_tokens=400)))
        waiting.start()
        self._threads.append(waiting)
        eventually(lambda: server.gauges()["leftfold:num_requests_waiting"] == 1)

    def _read(self, lines: list[str]) -> None:
        body = {"prompt": "a long one", "stream": True, "max_tokens": 400}
        with httpx.stream("POST", f"{self._server.url}/v1/completions", json=body, timeout=PATIENCE) as answer:
            lines.extend(line for line in answer.iter_lines() if line.startswith("data: "))

    def all_hear(self, why: str) -> None:
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        for lines in self.lines:
            (error,) = [line for line in lines if '"error"' in line]
            assert why in error
        (answer,) = self.whole
        assert answer.status_code == 500 and why in answer.json()["error"]["message"]


@pytest.mark.parametrize("kept", ["log", "no log"])
def test_a_reducer_that_fails_ends_the_server_and_everybody_hears_so(folder: Path, kept: str) -> None:
    options = {"log_dir": str(folder / "log")} if kept == "log" else {"durability": "off"}
    with breaking(folder, **options) as server:
        server.wait_until_ready()
        others = Asking(server)
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "bad^"}, timeout=PATIENCE)
        why = "ZeroDivisionError: planted"
        assert answer.status_code == 500 and "the engine stopped: the reducer failed on Admit" in answer.text
        assert why in answer.json()["error"]["message"]
        others.all_hear(why)
        assert server.process.wait(timeout=PATIENCE) == 1
        assert server.stderr.count("leftfold: the engine stopped: the reducer failed on Admit at seq ") == 1
        assert "starting it again" not in server.stderr and "Traceback" not in server.stderr
    if kept == "log":  # a start on the same log does not walk into it again
        with breaking(folder, **options) as server:
            eventually(lambda: "leftfold: refusing all work" in server.stderr)
            answer = chat(server)
            assert answer.status_code == 503 and why in answer.json()["error"]["message"]
            assert server.interrupt() == 0


def test_an_engine_that_comes_back_refusing_all_work_lets_nobody_wait(folder: Path) -> None:
    with breaking(folder, log_dir=str(folder / "log")) as server:
        others = Asking(server.wait_until_ready())
        (folder / "break").touch()
        os.kill(engine_of(server), signal.SIGKILL)
        others.all_hear("record 7 broke the reducer")
        assert server.process.wait(timeout=PATIENCE) == 1
        assert "leftfold: the engine stopped: record 7 broke the reducer\n" in server.stderr
        assert "Traceback" not in server.stderr
