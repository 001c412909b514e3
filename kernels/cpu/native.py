"""Compiles `src/` at its first use on a machine, keeps the result in the user's cache, and calls it.

The name of the library in the cache is a hash of the sources, the compiler's version, its flags and the machine's
instruction sets, so a cache that several machines share holds one for each.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from leftfold.kernels.cpu.packing import Packed

logger = logging.getLogger("leftfold.kernels.cpu")

SOURCES = Path(__file__).parent / "src"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi", "-shared", "-fPIC", "-pthread")
"""No contraction into fused operations: a result's bits must not depend on what a machine has."""
VARIANTS = {
    "native": ("-march=native",),
    "vectors": ("-march=native", "-mno-amx-tile", "-mno-amx-int8"),
    "portable": ("-DLEFTFOLD_PORTABLE",),
}
"""What this machine has; the same without its tile unit; what any machine has. All give the same bits."""
LEVELS = ("loops", "vector dot products", "tile unit")


class NativeError(RuntimeError):
    """The native library cannot be had here; the message says why."""


class LinearStruct(ctypes.Structure):
    """`LfLinear` in src/linear.h."""

    _fields_ = [
        ("weight", ctypes.c_void_p), ("scale", ctypes.c_void_p), ("offset", ctypes.c_void_p), ("bias", ctypes.c_void_p),
        ("outputs", ctypes.c_int32), ("inputs", ctypes.c_int32), ("blocks", ctypes.c_int32), ("depth", ctypes.c_int32),
        ("bits", ctypes.c_int32),
    ]  # fmt: skip

    @classmethod
    def of(cls, packed: Packed) -> LinearStruct:
        """Points into the tensors of `packed`, which must outlive it."""
        return cls(
            packed.weight.data_ptr(), packed.scale.data_ptr(), packed.offset.data_ptr(), pointer(packed.bias),
            packed.outputs, packed.inputs, packed.blocks, packed.depth, packed.bits,
        )  # fmt: skip


class LayerStruct(ctypes.Structure):
    """`LfLayer` in src/step.cpp."""

    _fields_ = [
        ("attention_norm", ctypes.c_void_p), ("q_norm", ctypes.c_void_p), ("k_norm", ctypes.c_void_p),
        ("mlp_norm", ctypes.c_void_p), ("qkv", LinearStruct), ("output", LinearStruct), ("gate_up", LinearStruct),
        ("down", LinearStruct), ("window", ctypes.c_int64),
    ]  # fmt: skip


class ModelStruct(ctypes.Structure):
    """`LfModel` in src/step.cpp."""

    _fields_ = [
        ("layers", ctypes.c_int32), ("hidden", ctypes.c_int32), ("inner", ctypes.c_int32), ("heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32), ("head_dim", ctypes.c_int32), ("page_size", ctypes.c_int32),
        ("blocks", ctypes.c_int32), ("eps", ctypes.c_float), ("score_scale", ctypes.c_float),
        ("layer", ctypes.POINTER(LayerStruct)), ("norm", ctypes.c_void_p), ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p), ("embedding", LinearStruct), ("head", LinearStruct),
    ]  # fmt: skip


class MemoryStruct(ctypes.Structure):
    """`LfMemory` in src/attention.h: one layer's keys and values."""

    _fields_ = [
        ("keys", ctypes.c_void_p), ("key_scales", ctypes.c_void_p), ("values", ctypes.c_void_p),
        ("value_scales", ctypes.c_void_p),
    ]  # fmt: skip


class StepStruct(ctypes.Structure):
    """`LfStep` in src/step.cpp."""

    _fields_ = [
        ("tokens", ctypes.c_int32), ("rows", ctypes.c_int32), ("ids", ctypes.c_void_p), ("positions", ctypes.c_void_p),
        ("places", ctypes.c_void_p), ("starts", ctypes.c_void_p), ("lengths", ctypes.c_void_p),
        ("pages", ctypes.c_void_p), ("widest", ctypes.c_int64), ("memory", ctypes.POINTER(MemoryStruct)),
        ("hidden", ctypes.c_void_p),
    ]  # fmt: skip


def pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class Engine:
    """Threads and scratch memory of the native library; calls come from one thread at a time.

    Raises `NativeError` where the library cannot be had.
    """

    def __init__(self, threads: int, variant: str = "native") -> None:
        self._engine = ctypes.c_void_p()
        self._library = library(variant)
        self._engine = ctypes.c_void_p(self._library.lf_engine(threads))
        self.level = LEVELS[self._library.lf_level()]

    def forward(self, model: ModelStruct, step: StepStruct) -> None:
        self._library.lf_forward(self._engine, ctypes.byref(model), ctypes.byref(step))

    def scores(self, model: ModelStruct, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """`hidden` [rows, hidden_size], `out` [rows, vocabulary], both float32 and contiguous."""
        self._library.lf_scores(self._engine, ctypes.byref(model), hidden.data_ptr(), len(hidden), out.data_ptr())

    def best(self, scores: torch.Tensor, tokens: torch.Tensor, top: torch.Tensor) -> None:
        """The first largest of each row of `scores` [rows, vocabulary] (float32, contiguous): index and value.

        Where a row holds what is no number, its value is none either.
        """
        rows, width = scores.shape
        places = (scores.data_ptr(), rows, width, tokens.data_ptr(), top.data_ptr())
        self._library.lf_best(self._engine, *places)

    def linear(self, packed: Packed, x: torch.Tensor) -> torch.Tensor:
        """One product, `x` [rows, inputs] float32 and contiguous: [rows, outputs]."""
        out = x.new_empty(len(x), packed.blocks * 16)
        struct = LinearStruct.of(packed)
        self._library.lf_linear(self._engine, ctypes.byref(struct), x.data_ptr(), len(x), out.data_ptr())
        return out[:, : packed.outputs]

    def close(self) -> None:
        """End the threads; closing twice is fine."""
        if self._engine:
            self._library.lf_close(self._engine)
            self._engine = ctypes.c_void_p()

    def __del__(self) -> None:
        self.close()


@functools.cache
def library(variant: str = "native") -> ctypes.CDLL:
    """The compiled library, compiled now if need be, as one of `VARIANTS`. Raises `NativeError`."""
    if os.environ.get("LEFTFOLD_NATIVE", "on") == "off":
        raise NativeError("LEFTFOLD_NATIVE is off")
    loaded = ctypes.CDLL(str(built(VARIANTS[variant])))
    loaded.lf_engine.restype = ctypes.c_void_p
    loaded.lf_engine.argtypes = [ctypes.c_int]
    loaded.lf_close.argtypes = [ctypes.c_void_p]
    loaded.lf_forward.argtypes = [ctypes.c_void_p] * 3
    loaded.lf_scores.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    loaded.lf_best.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int] + [ctypes.c_void_p] * 2
    loaded.lf_linear.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    return loaded


def built(flags: Sequence[str]) -> Path:
    """The library's file in the cache. Raises `NativeError` if there is no compiler, or it fails."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), *COMPILERS))), None)
    if compiler is None:
        raise NativeError("there is no C++ compiler here")
    target = cache_folder() / f"leftfold-{_name(compiler, flags)}.so"
    if not target.is_file():
        logger.info("compiling %s", target.name)
        _compile(compiler, flags, target)
    return target


def cache_folder() -> Path:
    """`native` in `$LEFTFOLD_CACHE`, or in `~/.cache/leftfold`."""
    named = os.environ.get("LEFTFOLD_CACHE")
    return (Path(named).expanduser() if named else Path.home() / ".cache" / "leftfold") / "native"


def _name(compiler: str, flags: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for file in sorted(SOURCES.iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    digest.update("\0".join((compiler, _version(compiler), *FLAGS, *flags, platform.machine(), _features())).encode())
    return digest.hexdigest()[:16]


def _version(compiler: str) -> str:
    return _run([compiler, "--version"]).partition("\n")[0]


def _features() -> str:
    """The machine's instruction sets, as Linux tells them."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            return next((line for line in file if line.startswith(("flags", "Features"))), "")
    except OSError:
        return platform.processor()


def _compile(compiler: str, flags: Sequence[str], target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as work:
            part = Path(work) / "library.so"
            _run([compiler, *FLAGS, *flags, str(SOURCES / "step.cpp"), "-o", str(part)])
            os.replace(part, target)
    except OSError as error:
        raise NativeError(f"cannot keep the library in {target.parent}: {error}; set LEFTFOLD_CACHE") from error


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise NativeError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["no reason given"]
        raise NativeError(f"{command[0]} failed: {said[0]}")
    return done.stdout
