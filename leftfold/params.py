"""Which sampling parameters make sense: the same ranges for the offline API as for HTTP bodies."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from leftfold.checking import short
from leftfold.events import SamplingParams

_MOST = 2**31 - 1
_WHOLE = {
    "n": (1, _MOST),
    "max_tokens": (0, _MOST),
    "min_tokens": (0, _MOST),
    "top_k": (-1, _MOST),
    "seed": (-(2**63), 2**64 - 1),
}
_REAL = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (math.nextafter(0.0, 1.0), 100.0),
}


def check_params(params: SamplingParams) -> None:
    """Raises ValueError that names the field, its value and its range."""
    for name, (low, high) in _WHOLE.items():
        value = getattr(params, name)
        if name == "seed" and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"{name} = {short(value)}: must be a whole number from {low} to {high}")
    for name, (low, high) in _REAL.items():
        value = getattr(params, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise ValueError(f"{name} = {short(value)}: must be a number from {low:g} to {high:g}")
    if not isinstance(params.ignore_eos, bool):
        raise ValueError(f"ignore_eos = {short(params.ignore_eos)}: must be True or False")
    if isinstance(params.stop_token_ids, str) or not isinstance(params.stop_token_ids, Collection):
        raise ValueError(f"stop_token_ids = {short(params.stop_token_ids)}: must be a list of token ids")
    for token in params.stop_token_ids:
        _check_token("stop_token_ids", token)
    if params.logit_bias is not None:
        if not isinstance(params.logit_bias, Mapping):
            raise ValueError(f"logit_bias = {short(params.logit_bias)}: must map token ids to numbers")
        for token, bias in params.logit_bias.items():
            _check_token("logit_bias", token)
            if not isinstance(bias, int | float) or not -100 <= bias <= 100:
                raise ValueError(f"logit_bias of token {token} = {short(bias)}: must be a number from -100 to 100")


def _check_token(name: str, token: object) -> None:
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= _MOST:
        raise ValueError(f"{name} holds {short(token)}: must be token ids")


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one choice, 64 bits: what a request for that choice alone would give as its seed."""
    return (seed + choice) % 2**64


__all__ = ["check_params", "choice_seed"]
