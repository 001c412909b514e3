"""Leftfold: an LLM inference engine whose state is a left fold over its event log.

`LLM` is loaded when it is first asked for, so that importing `leftfold` imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from leftfold import compiled

if TYPE_CHECKING:
    from leftfold.engine import Engine as Engine
    from leftfold.events import SamplingParams as SamplingParams
    from leftfold.llm import LLM as LLM
    from leftfold.llm import Completion as Completion

compiled.use()

_HOMES = {
    "LLM": "leftfold.llm",
    "Completion": "leftfold.llm",
    "Engine": "leftfold.engine",
    "SamplingParams": "leftfold.events",
}

__all__ = ["LLM", "Completion", "Engine", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("leftfold")
        except PackageNotFoundError:  # run from a tree that was never installed
            return "0"
    if name not in _HOMES:
        raise AttributeError(f"module 'leftfold' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
