"""An engine that cannot go on: everybody learns why, in one line, and what was said before is heard."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import httpx

from leftfold import engine
from leftfold.server import engine_process, supervisor
from tests.e2e.servers import PATIENCE, ServerProcess, free_port
from tests.tiny_folder import write_tokenizer


def test_an_engine_that_gives_up_says_why_to_client_and_operator(tmp_path: Path) -> None:
    folder, port = write_tokenizer(tmp_path / "toy", {}), free_port()
    options = json.dumps({"model": str(folder), "port": port, "served_model_name": "toy", "engine_restarts": 0})
    command = [sys.executable, "-m", "tests.e2e.giving_up", options]
    with ServerProcess(command, port, folder / "stderr.txt") as server:
        server.wait_until_ready()
        body = {"prompt": "good", "max_tokens": 5}
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE).status_code == 200
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "bad^"}, timeout=PATIENCE)
        why = "the executor was lost and cannot be reset: OSError: no such device"
        assert (answer.status_code, why in answer.json()["error"]["message"]) == (500, True)
        assert server.process.wait(timeout=PATIENCE) == 1
        assert f"leftfold: the engine stopped: {why}\n" in server.stderr
        assert "Traceback" not in server.stderr


def test_a_stop_leaves_the_engine_time_to_make_its_log_durable() -> None:
    """A step that never ends and a server that does not read must not take all of it."""
    taken = engine.CLOSE_SECONDS + engine_process.LINGER_SECONDS
    assert taken <= 0.8 * supervisor._STOP_SECONDS
