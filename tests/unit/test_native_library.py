"""Where native code comes from: compiled once into the user's cache; where it cannot be, PyTorch takes its place."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from leftfold.executor.models import quantized
from leftfold.executor.models.quantized.reference_run import ReferenceRun
from leftfold.executor.weights import load
from leftfold.kernels.cpu import native
from tests.tiny_models import make


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    native.library.cache_clear()
    yield
    native.library.cache_clear()


def compiler(folder: Path, script: str) -> Path:
    """A stand-in for a compiler."""
    file = folder / "c++"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return file


PRETENDED = (
    'while [ "$1" != -o ]; do [ "$1" = --version ] && echo v1 && exit; shift; done; echo x > "$2"; echo x >> "$0.log"'
)


def test_a_library_is_compiled_once_and_again_when_a_flag_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = compiler(tmp_path, PRETENDED)
    monkeypatch.setenv("CXX", str(made))
    monkeypatch.setenv("LEFTFOLD_CACHE", str(tmp_path / "cache"))
    first = native.built(("-a",))
    assert first.parent == tmp_path / "cache" / "native" and first.read_text() == "x\n"
    assert native.built(("-a",)) == first != native.built(("-b",))
    assert (tmp_path / "c++.log").read_text() == "x\nx\n"
    assert not list(first.parent.glob(".build-*"))


@pytest.mark.parametrize("script", ["exit 1", '[ "$1" = --version ] || { echo "no such thing" >&2; exit 1; }'])
def test_a_compiler_that_fails_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    monkeypatch.setenv("CXX", str(compiler(tmp_path, script)))
    monkeypatch.setenv("LEFTFOLD_CACHE", str(tmp_path / "cache"))
    with pytest.raises(native.NativeError, match="failed: no"):
        native.built(())
    assert not list(tmp_path.glob("cache/native/*"))


def test_without_a_compiler_the_reference_runs_the_model_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make("llama", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level(logging.WARNING):
        model = quantized.build(load(tmp_path), 64)
    assert isinstance(model._run, ReferenceRun)
    assert "there is no C++ compiler here" in caplog.text


def test_native_code_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEFTFOLD_NATIVE", "off")
    with pytest.raises(native.NativeError, match="LEFTFOLD_NATIVE"):
        native.library()


def test_an_unwritable_cache_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(compiler(tmp_path, PRETENDED)))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LEFTFOLD_CACHE", str(tmp_path / "file"))
    with pytest.raises(native.NativeError, match="set LEFTFOLD_CACHE"):
        native.built(())
