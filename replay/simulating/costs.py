"""Cost models that are built in, each with where its figures come from."""

from __future__ import annotations

from leftfold.executor.cost import CostModel

BUILT_IN = {
    "rtx4090-llama-8b": CostModel(
        {"step": 16000.0, "row": 60.0, "token": 90.0, "context": 0.08, "reach": 0.004},
        "placeholder",
    ),
}
DEFAULT = "rtx4090-llama-8b"


def built_in(name: str = DEFAULT) -> CostModel:
    """A built-in model by name. KeyError: there is none of that name."""
    return BUILT_IN[name]
