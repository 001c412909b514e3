"""Converted weights are kept in a file and used again; what is damaged, or of another model, is not."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from leftfold.executor.models.quantized import blocks, build, kept, weights
from leftfold.executor.weights import load
from tests.tiny_models import make

TENSORS = {
    "a": torch.arange(100, dtype=torch.int8).view(5, 20), "b": torch.randn(3, 7),
    "c": torch.arange(4, dtype=torch.int32),
}  # fmt: skip


def test_tensors_lie_together_and_come_back_as_they_were(tmp_path: Path) -> None:
    views = kept.together(TENSORS)
    first = views["a"].data_ptr()
    assert first % blocks.PAGE == 0
    assert [views[name].data_ptr() - first for name in "abc"] == [0, 128, 256]
    kept.save(tmp_path / "sub" / "x", views)
    again = kept.load(tmp_path / "sub" / "x")
    assert again is not None and again.keys() == TENSORS.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in TENSORS.items())
    assert [file.name for file in (tmp_path / "sub").iterdir()] == ["x"]


def test_what_cannot_be_kept_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*paths: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept.os, "replace", fail)
    with caplog.at_level(logging.WARNING):
        kept.save(tmp_path / "x", kept.together(TENSORS))
    assert "cannot be kept" in caplog.text
    assert list(tmp_path.iterdir()) == []


DAMAGES = [lambda d: d[:-1], lambda d: d[:-9] + b"\x55" + d[-8:], lambda d: b"x", lambda d: b""]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage) -> None:
    file = tmp_path / "x"
    kept.save(file, kept.together(TENSORS))
    file.write_bytes(damage(file.read_bytes()))
    with caplog.at_level(logging.WARNING):
        assert kept.load(file) is None
    assert "is not used" in caplog.text
    assert kept.load(tmp_path / "none") is None


@pytest.mark.parametrize(("kind", "bits"), [("llama-biased", 8), ("qwen2", 8), ("qwen3", 8), ("llama-biased", 4)])
def test_a_second_start_takes_the_same_weights_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, bits: int
) -> None:
    make(kind, tmp_path / "model")
    cache, fresh = tmp_path / "cache", build(load(tmp_path / "model"), 64, None, bits).weights
    build(load(tmp_path / "model"), 64, cache, bits)
    (file,) = cache.iterdir()
    monkeypatch.setattr(weights, "pack", lambda *given: pytest.fail("weights were converted again"))
    again = build(load(tmp_path / "model"), 64, cache, bits).weights
    one, two = weights.as_tensors(fresh), weights.as_tensors(again)
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert (again.head is again.embedding) == (fresh.head is fresh.embedding)
    assert again.layers[0].qkv.outputs == fresh.layers[0].qkv.outputs and list(cache.iterdir()) == [file]


def test_each_number_of_bits_has_a_file_of_its_own(tmp_path: Path) -> None:
    make("llama", tmp_path / "model")
    kinds = [build(load(tmp_path / "model"), 64, tmp_path / "cache", bits).weights.layers[0].down for bits in (8, 4, 8)]
    assert [packed.bits for packed in kinds] == [8, 4, 8]
    assert sorted(file.suffix for file in (tmp_path / "cache").iterdir()) == [".int4", ".int8"]


def test_another_model_in_the_same_place_is_converted_anew(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for kind in ("llama", "llama-biased"):
        make(kind, tmp_path / "model")
        build(load(tmp_path / "model"), 64, cache)
    assert len(list(cache.iterdir())) == 2
