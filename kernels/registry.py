"""Which implementation of an operation runs: picked by device, dtype and shape, overridden by name.

An operation's file registers its plain PyTorch reference first and faster versions beside it. `Kernels` is one
model's view: it resolves each operation once per shape and remembers the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

OPERATIONS = ("attention", "kv_write", "linear", "rms_norm", "rotary", "sampling", "silu_mul")


class KernelError(ValueError):
    """An operation or implementation that does not exist, or none that fits."""


def _always(shape: Mapping[str, int]) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Implementation:
    """One version of an operation. `dtypes` are names ("float32"); `fits` sees the shape the caller gave."""

    name: str
    function: Callable[..., Any]
    devices: tuple[str, ...]
    dtypes: tuple[str, ...]
    fits: Callable[[Mapping[str, int]], bool] = _always

    def accepts(self, device: str, dtype: str, shape: Mapping[str, int]) -> bool:
        return device in self.devices and dtype in self.dtypes and self.fits(shape)


class Registry:
    """Operations and their implementations, best first; the reference is registered first and so comes last."""

    def __init__(self) -> None:
        self._operations: dict[str, list[Implementation]] = {}

    def add(self, operation: str, implementation: Implementation) -> None:
        known = self._operations.setdefault(operation, [])
        if any(other.name == implementation.name for other in known):
            raise KernelError(f"operation {operation!r} already has an implementation {implementation.name!r}")
        known.insert(0, implementation)

    def register(
        self,
        operation: str,
        name: str,
        *,
        devices: tuple[str, ...] = ("cpu", "cuda"),
        dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16"),
        fits: Callable[[Mapping[str, int]], bool] = _always,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator: add the function as implementation `name` of `operation`, ahead of those already there."""

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            self.add(operation, Implementation(name, function, devices, dtypes, fits))
            return function

        return decorate

    def operations(self) -> tuple[str, ...]:
        return tuple(sorted(self._operations))

    def implementations(self, operation: str) -> tuple[Implementation, ...]:
        """All versions of `operation`, preferred first. Raises `KernelError` for an unknown operation."""
        if operation not in self._operations:
            raise KernelError(f"unknown operation {operation!r}; there are: {', '.join(self.operations())}")
        return tuple(self._operations[operation])

    def named(self, operation: str, name: str) -> Implementation:
        """The version called `name`. Raises `KernelError` that lists what exists."""
        known = self.implementations(operation)
        for implementation in known:
            if implementation.name == name:
                return implementation
        names = ", ".join(implementation.name for implementation in known)
        raise KernelError(f"operation {operation!r} has no implementation {name!r}; there are: {names}")

    def pick(self, operation: str, device: str, dtype: str, shape: Mapping[str, int]) -> Implementation:
        """The first version that accepts device, dtype and shape. Raises `KernelError` if none does."""
        for implementation in self.implementations(operation):
            if implementation.accepts(device, dtype, shape):
                return implementation
        raise KernelError(f"operation {operation!r} has no implementation for {device}, {dtype}, {dict(shape)}")


REGISTRY = Registry()


def load_operations() -> Registry:
    """Import every operation's file, so that `REGISTRY` is complete."""
    for operation in OPERATIONS:
        import_module(f"leftfold.kernels.{operation}")
    return REGISTRY


def parse_overrides(text: str) -> dict[str, str]:
    """`"linear=reference,attention=tiled"` as a mapping. Raises `KernelError` for unknown names or a bad form."""
    registry = load_operations()
    chosen: dict[str, str] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        operation, separator, name = (piece.strip() for piece in part.partition("="))
        if not separator or not name:
            raise KernelError(f"kernel override {part!r} is not of the form operation=name")
        registry.named(operation, name)
        chosen[operation] = name
    return chosen


class Kernels:
    """The operations of one model on one device and dtype, with overrides by operation name."""

    def __init__(
        self, device: str, dtype: str, overrides: Mapping[str, str] | None = None, registry: Registry | None = None
    ) -> None:
        self.device = device
        self.dtype = dtype
        self.registry = load_operations() if registry is None else registry
        self.overrides = dict(overrides or {})
        for operation, name in self.overrides.items():
            self.registry.named(operation, name)
        self._chosen: dict[tuple[str, tuple[tuple[str, int], ...]], Implementation] = {}

    def choose(self, operation: str, **shape: int) -> Implementation:
        """The implementation for this shape: the override if it accepts, else an error; else the registry's pick."""
        key = (operation, tuple(sorted(shape.items())))
        if key not in self._chosen:
            self._chosen[key] = self._resolve(operation, shape)
        return self._chosen[key]

    def get(self, operation: str, **shape: int) -> Callable[..., Any]:
        """The function of `choose`."""
        return self.choose(operation, **shape).function

    def _resolve(self, operation: str, shape: Mapping[str, int]) -> Implementation:
        if operation not in self.overrides:
            return self.registry.pick(operation, self.device, self.dtype, shape)
        implementation = self.registry.named(operation, self.overrides[operation])
        if not implementation.accepts(self.device, self.dtype, shape):
            where = f"{self.device}, {self.dtype}, {dict(shape)}"
            raise KernelError(f"implementation {implementation.name!r} of {operation!r} does not run on {where}")
        return implementation
