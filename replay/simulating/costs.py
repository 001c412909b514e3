"""Cost models that are built in, each with where its figures come from."""

from __future__ import annotations

from leftfold.executor.cost import CostModel

BUILT_IN = {
    "rtx4090-llama-8b": CostModel(
        {"step": 21094.67, "context": 0.094765, "token": 85.641695},
        "Llama-3.1-8B (bfloat16) on an RTX 4090 under vLLM 0.19: fitted to the times of every second of 300 ShareGPT "
        "requests that LLMServingSim measured (casys-kaist/LLMServingSim); about 21 ms a step, 86 µs a prompt token, "
        "0.095 µs a token of context. Other models and devices need a model of their own: leftfold simulate fit",
        {"held_out_ttft_percent": -0.03, "held_out_tpot_percent": -1.06, "held_out_e2e_percent": -0.27},
    ),
}
DEFAULT = "rtx4090-llama-8b"


def built_in(name: str = DEFAULT) -> CostModel:
    """A built-in model by name. KeyError: there is none of that name."""
    return BUILT_IN[name]
