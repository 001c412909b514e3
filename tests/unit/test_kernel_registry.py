"""Choosing implementations of operations."""

from __future__ import annotations

import pytest

from leftfold.kernels.registry import OPERATIONS, Implementation, KernelError, Kernels, Registry, parse_overrides


def registry() -> Registry:
    made = Registry()
    for name, devices, dtypes, least in (
        ("plain", ("cpu", "cuda"), ("float32", "bfloat16"), 0),
        ("quick", ("cuda",), ("float32",), 64),
    ):
        made.add("double", Implementation(name, lambda x: 2 * x, devices, dtypes, lambda s, n=least: s["size"] >= n))
    return made


@pytest.mark.parametrize(
    ("device", "dtype", "size", "name"),
    [
        ("cpu", "float32", 128, "plain"),
        ("cuda", "float32", 128, "quick"),
        ("cuda", "float32", 8, "plain"),
        ("cuda", "bfloat16", 128, "plain"),
    ],
)
def test_device_dtype_and_shape_pick(device: str, dtype: str, size: int, name: str) -> None:
    assert Kernels(device, dtype, registry=registry()).choose("double", size=size).name == name


def test_an_override_is_taken_where_it_runs() -> None:
    kernels = Kernels("cuda", "float32", {"double": "plain"}, registry())
    assert kernels.choose("double", size=128).name == "plain"
    assert kernels.get("double", size=128)(4) == 8


def test_an_override_that_does_not_run_here_is_an_error_not_a_silent_change() -> None:
    kernels = Kernels("cpu", "float32", {"double": "quick"}, registry())
    with pytest.raises(KernelError, match="'quick' of 'double' does not run on cpu, float32"):
        kernels.choose("double", size=128)


def test_nothing_that_fits_is_an_error() -> None:
    with pytest.raises(KernelError, match="no implementation for cpu, float64"):
        Kernels("cpu", "float64", registry=registry()).choose("double", size=1)


def test_the_same_name_twice_is_an_error() -> None:
    made = registry()
    with pytest.raises(KernelError, match="already has"):
        made.register("double", "plain")(lambda x: x)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("attention", "not of the form operation=name"),
        ("attention=", "not of the form operation=name"),
        ("atention=tiled", "unknown operation 'atention'; there are: attention, kv_write, linear"),
        ("attention=fast", "'attention' has no implementation 'fast'; there are: tiled, reference"),
    ],
)
def test_bad_overrides_say_what_exists(text: str, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        parse_overrides(text)


def test_overrides_are_parsed() -> None:
    assert parse_overrides(" attention=reference, linear=onednn,") == {"attention": "reference", "linear": "onednn"}
    assert parse_overrides("") == {}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_has_a_reference_that_runs_anywhere(operation: str) -> None:
    kernels = Kernels("cpu", "float32", {operation: "reference"})
    for device in ("cpu", "cuda"):
        assert Kernels(device, "bfloat16", {operation: "reference"}).choose(operation).name == "reference"
    assert kernels.registry.implementations(operation)[-1].name == "reference"
