"""An engine process that dies under a living server: it is started again, and those who are being answered go on."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from leftfold.events import EventLog
from leftfold.replay.verify import verify
from tests.e2e.servers import PATIENCE, ServerProcess
from tests.e2e.test_server_life import alive, chat, engine_of, eventually
from tests.tiny_folder import write_tokenizer

SLOW = {"TOY_STEP_SECONDS": "0.01"}
ASKED = {"max_tokens": 150, "temperature": 0, "seed": 3}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "toy", {})


class Streams:
    """Completions that are streamed, each by a thread of its own; what they have got so far."""

    def __init__(self, server: ServerProcess, count: int, **more: Any) -> None:
        self.chunks: list[list[dict[str, Any]]] = [[] for _ in range(count)]
        self._server = server
        self._more = more
        self._threads = [threading.Thread(target=self._read, args=(i,)) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def _read(self, number: int) -> None:
        body = {"prompt": f"stream {number}", "stream": True, **ASKED, **self._more}
        with httpx.stream("POST", f"{self._server.url}/v1/completions", json=body, timeout=PATIENCE) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    self.chunks[number].append(json.loads(line[6:]))

    def texts(self) -> list[str]:
        return ["".join(c["text"] for chunk in chunks for c in chunk.get("choices", ())) for chunks in self.chunks]

    def all_have(self, characters: int) -> bool:
        return all(len(text) >= characters for text in self.texts())

    def join(self) -> list[str]:
        for thread in self._threads:
            thread.join(PATIENCE)
        return self.texts()


def kill_engine(server: ServerProcess) -> None:
    """Returns once another one is started."""
    engine = engine_of(server)
    os.kill(engine, signal.SIGKILL)

    def children() -> list[str]:
        return Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()

    eventually(lambda: not alive(engine) and children() not in ([], [str(engine)]))


@pytest.fixture(params=["log", "no log"])
def server(folder: Path, request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    """With a log, live requests go on from it; without one they are sent again and drawn again."""
    options = {"log_dir": str(folder / "log")} if request.param == "log" else {}
    with ServerProcess.toy(folder, SLOW, max_num_seqs=3, **options) as running:
        yield running.wait_until_ready()


def test_streams_stall_and_go_on_where_they_were(server: ServerProcess, folder: Path) -> None:
    expected = Streams(server, 4).join()
    assert all(len(text) == 150 for text in expected)
    streams = Streams(server, 4)
    whole: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: whole.append(chat(server, max_tokens=200)))
    asking.start()
    for characters in (20, 80):
        eventually(lambda: max(map(len, streams.texts())) >= characters)  # noqa: B023
        kill_engine(server)
        server.wait_until_ready()
    assert streams.join() == expected
    asking.join()
    assert whole[0].json()["usage"]["completion_tokens"] == 200
    assert whole[0].json()["choices"][0]["message"] == chat(server, max_tokens=200).json()["choices"][0]["message"]
    server.wait_until_idle()
    assert server.interrupt() == 0
    assert "Traceback" not in server.stderr
    if (folder / "log").exists():
        assert verify(EventLog.read(folder / "log")).divergence is None


def test_stop_strings_and_hang_ups_outlive_an_engine(server: ServerProcess) -> None:
    (text,) = Streams(server, 1).join()
    stop = text[100:106]
    streams = Streams(server, 1, stop=[stop])
    body = {"prompt": "gone soon", "stream": True, **ASKED}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE) as answer:
        next(answer.iter_lines())
        eventually(lambda: streams.all_have(30))
        kill_engine(server)
    assert streams.join() == [text[: text.index(stop)]]
    server.wait_until_idle()  # nothing runs on for those who have hung up meanwhile


def test_who_comes_while_it_is_away_hears_when_to_come_back(folder: Path) -> None:
    with ServerProcess.toy(folder, {"TOY_START_SECONDS": "2"}) as server:
        server.wait_until_ready()
        kill_engine(server)
        eventually(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
        refused = chat(server, max_tokens=3)
        assert (refused.status_code, refused.headers["x-leftfold-state"]) == (503, "restarting")
        assert refused.headers["retry-after"] == "1"
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert httpx.get(f"{server.url}/metrics").status_code == 200
        server.wait_until_ready()
        assert chat(server, max_tokens=3).status_code == 200


def test_a_control_call_that_was_cut_off_is_answered(folder: Path) -> None:
    with ServerProcess.toy(folder, SLOW, log_dir=str(folder / "log")) as server:
        server.wait_until_ready()
        streams = Streams(server, 1)
        eventually(lambda: streams.all_have(10))
        answers: dict[str, httpx.Response] = {}

        def ask(name: str, path: str) -> threading.Thread:
            url = f"{server.url}{path}"
            asking = threading.Thread(target=lambda: answers.update({name: httpx.post(url, timeout=PATIENCE)}))
            asking.start()
            return asking

        pausing = ask("pause", "/pause?mode=wait")
        eventually(lambda: httpx.get(f"{server.url}/is_paused").json()["gate"] == "draining")
        os.kill(engine_of(server), signal.SIGSTOP)
        lost = ask("flush", "/flush_cache")
        eventually(lambda: "flush" not in answers and lost.is_alive())
        kill_engine(server)
        lost.join(PATIENCE)
        assert answers["flush"].status_code in (200, 503)  # it may have reached the log before the end
        pausing.join(PATIENCE)  # the log knows it: it drains, in the new process
        assert answers["pause"].status_code == 200, answers["pause"].text + server.stderr
        assert len(streams.join()[0]) == 150
        assert httpx.get(f"{server.url}/is_paused").json()["gate"] == "paused"


def test_after_too_many_deaths_the_server_ends(folder: Path) -> None:
    with ServerProcess.toy(folder, engine_restarts=2, log_dir=str(folder / "log")) as server:
        server.wait_until_ready()
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "die?"}, timeout=PATIENCE)
        assert answer.status_code == 500
        assert "ended with code 3" in answer.json()["error"]["message"]
        assert server.process.wait(timeout=PATIENCE) == 1
        assert server.stderr.count("starting it again") == 2
        assert "leftfold: the engine process ended with code 3\n" in server.stderr


def test_a_request_that_kills_its_engine_is_found_out_and_the_others_go_on(folder: Path) -> None:
    with ServerProcess.toy(folder, SLOW, log_dir=str(folder / "log")) as server:
        server.wait_until_ready()
        expected = Streams(server, 3).join()
        streams = Streams(server, 3)
        eventually(lambda: streams.all_have(10))
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "die?"}, timeout=PATIENCE)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_failed")
        assert answer.json()["error"]["message"] == "the engine process ended with code 3"
        assert streams.join() == expected
        assert 3 <= server.stderr.count("starting it again") <= 5
        server.wait_until_idle()
        assert server.interrupt() == 0
    assert verify(EventLog.read(folder / "log")).divergence is None
