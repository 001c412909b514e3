"""Draw one token per row from logits: greedy, or by inverse CDF at one counter-based uniform per row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from leftfold.kernels.registry import REGISTRY

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_HEAD = 1024


@dataclass(frozen=True, slots=True)
class Draw:
    """How each row is drawn, columns [rows]: `temperature` (0 greedy), `top_k` (0 off), `top_p`, `min_p`, `uniform`."""

    temperature: npt.NDArray[np.float64]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float64]
    uniform: npt.NDArray[np.float64]

    def take(self, rows: npt.NDArray[np.int64]) -> Draw:
        columns = (self.temperature, self.top_k, self.top_p, self.min_p, self.uniform)
        return Draw(*(column[rows] for column in columns))


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def uniform(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64], choices: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per (seed, choice, position), 52 bits; columns [rows].

    Output number `position` of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
    2014) started at mix(seed + choice · gamma): a counter-based generator, so nothing else in the batch matters.
    """
    with np.errstate(over="ignore"):
        start = _mix(seeds + choices.astype(np.uint64) * _GAMMA)
        bits = _mix(start + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA)
    return (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52


@REGISTRY.register("sampling", "reference")
def sample(logits: torch.Tensor, draw: Draw) -> torch.Tensor:
    """One token id per row of `logits` [rows, vocabulary] (float32), as int64 [rows].

    Temperature first, then `top_k`, then `top_p` on what is left, then `min_p` relative to the likeliest token;
    tokens as likely as the last one kept are kept too. What remains is renormalised and laid out in order of
    token id; the draw is the first token whose cumulated probability exceeds the row's uniform. Greedy takes the
    lowest id among equals. Every sum runs serially along its own row in float64.
    """
    tokens = logits.argmax(-1)
    drawn = np.flatnonzero(draw.temperature > 0)
    if len(drawn):
        rows = torch.from_numpy(drawn).to(logits.device)
        tokens[rows] = _sample_rows(logits[rows], draw.take(drawn))
    return tokens


def _sample_rows(logits: torch.Tensor, draw: Draw) -> torch.Tensor:
    # In float32 a tiny temperature would be 0, and the likeliest token's 0 / 0 no number.
    temperature = torch.from_numpy(draw.temperature).to(logits)[:, None].clamp_(min=torch.finfo(logits.dtype).tiny)
    weights = ((logits - logits.amax(-1, keepdim=True)) / temperature).exp_()
    vocabulary = logits.shape[1]
    limited = np.flatnonzero((draw.top_k > 0) & (draw.top_k < vocabulary))
    if len(limited):
        _keep_top_k(weights, limited, draw.top_k[limited])
    nucleus = np.flatnonzero(draw.top_p < 1.0)
    if len(nucleus):
        _keep_top_p(weights, nucleus, draw.top_p[nucleus])
    relative = np.flatnonzero(draw.min_p > 0.0)
    if len(relative):
        floor = torch.from_numpy(draw.min_p[relative]).to(weights)[:, None]
        _drop_below(weights, torch.from_numpy(relative).to(weights.device), floor)
    cumulated = weights.cumsum(-1, dtype=torch.float64)
    target = torch.from_numpy(draw.uniform).to(cumulated.device)[:, None] * cumulated[:, -1:]
    return torch.searchsorted(cumulated, target, right=True).squeeze(1).clamp_(max=vocabulary - 1)


def _keep_top_k(weights: torch.Tensor, rows: npt.NDArray[np.int64], top_k: npt.NDArray[np.int64]) -> None:
    at = torch.from_numpy(rows).to(weights.device)
    best = weights[at].topk(int(top_k.max()), dim=-1).values
    last = torch.from_numpy(top_k - 1).to(weights.device)[:, None]
    _drop_below(weights, at, best.gather(1, last))


def _keep_top_p(weights: torch.Tensor, rows: npt.NDArray[np.int64], top_p: npt.NDArray[np.float64]) -> None:
    """Find the smallest set of likeliest tokens with mass top_p: in the head of the distribution, or sort it all."""
    at = torch.from_numpy(rows).to(weights.device)
    share = torch.from_numpy(top_p).to(weights.device)[:, None]
    chosen = weights[at]
    wanted = share * chosen.cumsum(-1, dtype=torch.float64)[:, -1:]
    head = chosen.topk(min(_HEAD, chosen.shape[1]), dim=-1).values
    mass = head.cumsum(-1, dtype=torch.float64)
    short = mass[:, -1] < wanted[:, 0]
    _drop_below(weights, at[~short], _last_kept(head[~short], mass[~short], wanted[~short]))
    if bool(short.any()):
        ordered = chosen[short].sort(-1, descending=True).values
        floor = _last_kept(ordered, ordered.cumsum(-1, dtype=torch.float64), wanted[short])
        _drop_below(weights, at[short], floor)


def _last_kept(ordered: torch.Tensor, mass: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    last = torch.searchsorted(mass, wanted.contiguous()).clamp_(max=ordered.shape[1] - 1)
    return ordered.gather(1, last)


def _drop_below(weights: torch.Tensor, rows: torch.Tensor, floor: torch.Tensor) -> None:
    chosen = weights[rows]
    weights[rows] = chosen.masked_fill_(chosen < floor, 0.0)
