"""How a server starts, refuses to start, stops, and dies."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from leftfold.events import EventLog
from leftfold.replay.fold import fold
from tests.e2e.servers import PATIENCE, ServerProcess
from tests.tiny_folder import write_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "toy", {})


def eventually(check: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not check():
        assert time.monotonic() < end
        time.sleep(0.02)


def engine_of(server: ServerProcess) -> int:
    """Process id of the engine."""
    (child,) = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    return int(child)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def chat(server: ServerProcess, **more: object) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "hi"}], **more}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_parent_alone_stops_everything(folder: Path, number: signal.Signals) -> None:
    with ServerProcess.toy(folder) as server:
        engine = engine_of(server.wait_until_ready())
        server.process.send_signal(number)
        assert server.process.wait(timeout=PATIENCE) == 0
        assert not alive(engine)
        assert "Traceback" not in server.stderr


def test_a_stop_finishes_what_is_being_answered_and_refuses_what_comes(folder: Path) -> None:
    with ServerProcess.toy(folder, {"TOY_STEP_SECONDS": "0.01"}, shutdown_timeout=60.0) as server:
        server.wait_until_ready()
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(chat(server, max_tokens=300)))
        with httpx.Client(base_url=server.url) as client:
            client.get("/health")  # a connection that is there before the stop
            asking.start()
            eventually(lambda: server.gauges()["leftfold:num_requests_running"] == 1)
            server.process.send_signal(signal.SIGINT)
            eventually(lambda: client.get("/ready").status_code == 503)
            late = client.post("/v1/chat/completions", json={"messages": []})
            assert (late.status_code, late.headers["x-leftfold-state"]) == (503, "draining")
        asking.join()
        assert answers[0].json()["usage"]["completion_tokens"] == 300
        assert server.process.wait(timeout=PATIENCE) == 0


def test_those_whom_a_stop_cuts_off_hear_so_and_no_start_goes_on_with_them(folder: Path) -> None:
    options = {"shutdown_timeout": 0.2, "max_model_len": 4096, "max_num_seqs": 2, "log_dir": str(folder / "log")}
    with ServerProcess.toy(folder, {"TOY_STEP_SECONDS": "0.05"}, **options) as server:
        server.wait_until_ready()
        heard: dict[str, httpx.Response] = {}

        def ask(name: str, **more: object) -> threading.Thread:
            asking = threading.Thread(target=lambda: heard.update({name: chat(server, max_tokens=4000, **more)}))
            asking.start()
            return asking

        asked = [ask("whole"), ask("stream", stream=True)]
        eventually(lambda: server.gauges()["leftfold:generation_tokens_total"] > 4)
        eventually(lambda: server.gauges()["leftfold:num_requests_running"] == 2)
        asked.append(ask("in line"))
        eventually(lambda: server.gauges()["leftfold:num_requests_waiting"] == 1)
        begun = time.monotonic()
        assert server.interrupt() == 0
        assert time.monotonic() - begun < 5
        for thread in asked:
            thread.join()
        assert "Traceback" not in server.stderr
    assert heard["whole"].json()["choices"][0]["finish_reason"] == "length"
    events = [line for line in heard["stream"].text.splitlines() if line]
    assert '"finish_reason":"length"' in events[-2] and events[-1] == "data: [DONE]"
    assert heard["in line"].status_code == 503 and heard["in line"].headers["retry-after"] == "1"
    assert heard["in line"].json()["error"]["code"] == "unavailable"
    assert not fold(EventLog.read(folder / "log")).state.live  # type: ignore[union-attr]


def test_a_stop_tells_those_who_wait_even_if_the_engine_does_not(folder: Path) -> None:
    options = {"shutdown_timeout": 0.2, "max_model_len": 4096}
    with ServerProcess.toy(folder, {"TOY_STEP_SECONDS": "0.02"}, **options) as server:
        engine = engine_of(server.wait_until_ready())
        answers: list[httpx.Response] = []
        asking = [
            threading.Thread(target=lambda more=more: answers.append(chat(server, max_tokens=4000, **more)))
            for more in ({}, {"stream": True})
        ]
        for thread in asking:
            thread.start()
        eventually(lambda: server.gauges()["leftfold:num_requests_running"] == 2)
        os.kill(engine, signal.SIGSTOP)
        begun = time.monotonic()
        assert server.interrupt() == 0
        assert time.monotonic() - begun < 5
        for thread in asking:
            thread.join()
        whole, stream = sorted(answers, key=lambda answer: "event-stream" in answer.headers["content-type"])
        assert whole.status_code == 503 and "stopping" in whole.json()["error"]["message"]
        assert "the server is stopping" in stream.text and stream.text.endswith("data: [DONE]\n\n")
        assert not alive(engine)


def test_an_engine_that_dies_takes_the_server_with_it_and_says_so(folder: Path) -> None:
    with ServerProcess.toy(folder, engine_restarts=0) as server:
        server.wait_until_ready()
        assert chat(server, max_tokens=3).status_code == 200
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "die?"}, timeout=PATIENCE)
        assert answer.status_code == 500
        assert "ended with code 3" in answer.json()["error"]["message"]
        assert server.process.wait(timeout=PATIENCE) == 1
        assert "the engine process ended with code 3" in server.stderr


def test_an_engine_does_not_outlive_its_server(folder: Path) -> None:
    with ServerProcess.toy(folder) as server:
        engine = engine_of(server.wait_until_ready())
        server.process.kill()
        server.process.wait()
        eventually(lambda: not alive(engine))


def test_a_port_in_use_is_one_line_and_code_2(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with ServerProcess.toy(folder, port=port) as server:
            assert server.process.wait(timeout=PATIENCE) == 2
            assert server.stderr.count("\n") == 1
            assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in server.stderr


def test_an_address_of_somebody_else_is_one_line_and_code_2(folder: Path) -> None:
    with ServerProcess.toy(folder, host="no-such-host.invalid") as server:
        assert server.process.wait(timeout=PATIENCE) == 2
        assert server.stderr.count("\n") == 1


def test_what_the_engine_cannot_start_with_is_one_line_and_code_2(folder: Path) -> None:
    with ServerProcess.toy(folder, policy="fcfs", kv_tokens=15) as server:
        assert server.process.wait(timeout=PATIENCE) == 2
        (line,) = [x for x in server.stderr.splitlines() if "INFO" not in x]
        assert line.startswith("leftfold: ") and "num_pages 0" in line


def test_an_unknown_model_is_one_line_and_code_2(tmp_path: Path) -> None:
    with ServerProcess.toy(write_tokenizer(tmp_path), model=str(tmp_path / "nothing")) as server:
        assert server.process.wait(timeout=PATIENCE) == 2
        (line,) = [x for x in server.stderr.splitlines() if "INFO" not in x]
        assert line.startswith("leftfold: no model")


def test_the_socket_listens_before_the_engine_is_there(folder: Path) -> None:
    with ServerProcess.toy(folder, {"TOY_START_SECONDS": "3"}) as server:
        answers = []

        def answered() -> bool:
            with contextlib.suppress(httpx.ConnectError):
                answers.append(httpx.get(f"{server.url}/v1/models", timeout=PATIENCE))
            return bool(answers)

        eventually(answered)
        assert answers[0].status_code == 503
        assert answers[0].headers["x-leftfold-state"] in ("starting", "loading")
        assert answers[0].headers["retry-after"] == "1"
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert httpx.get(f"{server.url}/metrics").status_code == 200
        server.wait_until_ready()


def test_a_start_that_is_interrupted_stops_at_once(folder: Path) -> None:
    with ServerProcess.toy(folder, {"TOY_START_SECONDS": "60"}) as server:
        eventually(lambda: Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text() != "")
        assert server.interrupt() == 0
        assert "Traceback" not in server.stderr


@pytest.mark.parametrize("limit", [{"max_queued_requests": 1}, {"max_queued_tokens": 3}])
def test_more_than_may_wait_is_refused_with_a_hint_when_to_come_back(folder: Path, limit: dict[str, int]) -> None:
    options = {"max_num_seqs": 1, **limit}
    with ServerProcess.toy(folder, {"TOY_STEP_SECONDS": "0.02"}, **options) as server:
        server.wait_until_ready()
        body = {"prompt": "ab", "max_tokens": 60, "n": 4}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        server.wait_until_idle()


def test_an_engine_that_refuses_all_work_says_why(folder: Path) -> None:
    with ServerProcess.toy(folder, {"TOY_FAULT": "1"}) as server:
        eventually(lambda: "refusing all work" in server.stderr)
        answer = chat(server)
        assert (answer.status_code, answer.headers["x-leftfold-state"]) == (503, "refusing")
        assert "record 7 broke the reducer" in answer.json()["error"]["message"]
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert httpx.get(f"{server.url}/metrics").status_code == 200
        assert server.interrupt() == 0
