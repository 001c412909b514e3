"""A disk under the log that fails, as clients see it: who may still ask, who waits, and who hears why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from leftfold.events import EventLog
from leftfold.replay.verify import verify
from tests.e2e.servers import PATIENCE, ServerProcess
from tests.e2e.test_engine_restarts import Streams
from tests.e2e.test_server_life import chat, eventually
from tests.tiny_folder import write_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "toy", {})


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """The disk is "full", or cannot "sync", while this says so."""
    return tmp_path / "disk"


@pytest.fixture(params=["async", "strict"])
def server(folder: Path, disk: Path, request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    env = {"TOY_STEP_SECONDS": "0.01", "TOY_DISK": str(disk)}
    with ServerProcess.toy(folder, env, log_dir=str(folder / "log"), durability=request.param) as running:
        yield running.wait_until_ready()


def refused(server: ServerProcess, reason: str) -> None:
    """Whoever comes now hears why."""
    for answer in (chat(server, max_tokens=3), httpx.get(f"{server.url}/ready")):
        assert (answer.status_code, answer.headers["x-leftfold-state"]) == (503, "refusing")
        assert answer.headers["retry-after"] == "1"
        error = answer.json()["error"]
        assert error["message"] == f"the log cannot be written: {reason}" and error["code"] == "unavailable"
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert server.gauges()["leftfold:log_failing"] == 1


def test_a_full_disk_is_a_503_with_the_reason_until_there_is_room(
    server: ServerProcess, folder: Path, disk: Path
) -> None:
    expected = Streams(server, 2).join()
    streams = Streams(server, 2)
    eventually(lambda: streams.all_have(10))
    disk.write_text("full")
    eventually(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
    refused(server, "No space left on device")
    disk.unlink()
    assert streams.join() == expected, "those who were being answered lose nothing"
    eventually(lambda: httpx.get(f"{server.url}/ready").status_code == 200)
    assert server.gauges()["leftfold:log_failing"] == 0
    assert chat(server, max_tokens=3).status_code == 200
    assert server.interrupt() == 0
    assert verify(EventLog.read(folder / "log")).divergence is None


def test_a_sync_that_failed_ends_the_log_and_nothing_is_admitted_any_more(
    server: ServerProcess, folder: Path, disk: Path
) -> None:
    strict = "strict" in str(server.process.args)
    streams = Streams(server, 1)
    eventually(lambda: streams.all_have(10))
    disk.write_text("sync")
    eventually(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
    reason = "what was written could not be made durable: Input/output error"
    refused(server, reason)
    (text,) = streams.join()
    (last, *_) = reversed(streams.chunks[0])
    if strict:  # nothing more can be promised: who waits hears so
        assert reason in last["error"]["message"] and len(text) < 150
    else:
        assert len(text) == 150
    disk.unlink()
    refused(server, reason)  # a disk that can again proves nothing
    server.interrupt()
    log = EventLog.read(folder / "log")
    assert verify(log).divergence is None
    with ServerProcess.toy(folder, log_dir=str(folder / "log")) as again:
        again.wait_until_ready()
        assert chat(again, max_tokens=3).status_code == 200


def test_told_to_serve_a_server_answers_on_without_its_log(folder: Path, disk: Path) -> None:
    env = {"TOY_DISK": str(disk)}
    options = {"log_dir": str(folder / "log"), "durability": "strict", "on_log_failure": "serve"}
    with ServerProcess.toy(folder, env, **options) as server:
        server.wait_until_ready()
        disk.write_text("sync")
        body = {"prompt": "x", "max_tokens": 20}
        for _ in range(2):
            assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE).status_code == 200
        assert httpx.get(f"{server.url}/ready").status_code == 200
        assert server.gauges()["leftfold:log_failing"] == 1
