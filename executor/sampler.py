"""Draw the tokens of a step: per-slot parameters as columns, adjustments only for the rows that ask for them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from leftfold.events import SamplingParams
from leftfold.executor.errors import RowError
from leftfold.executor.mirrors import DeviceState, IntArray
from leftfold.kernels.sampling import Draw, uniform

_U64 = (1 << 64) - 1


class Sampler:
    """Turns logits into tokens. A token depends on its own row's logits, parameters, tokens, seed and position."""

    def __init__(self, sample: Callable[[torch.Tensor, Draw], torch.Tensor]) -> None:
        self._sample = sample

    def draw(
        self,
        logits: torch.Tensor,
        state: DeviceState,
        slots: IntArray,
        positions: IntArray,
        best: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One token per row, int64 [rows].

        `logits` [rows, vocabulary] (float32, changed in place); `positions`: the absolute index of each token drawn;
        `best`: the likeliest token of each row of `logits` as they come, if known.
        A request without a seed draws as with seed 0: whoever admits requests gives each its own. Raises `RowError`
        with indices into these rows if adjusting leaves a row nothing to draw, or scores that are not finite.
        """
        params = [state.params[slot] for slot in slots.tolist()]
        changed = []
        for row, (slot, wanted) in enumerate(zip(slots.tolist(), params, strict=True)):
            if is_adjusted(wanted):
                prompt_len = int(state.prompt_len[slot])
                known = state.history[slot, : positions[row]].astype(np.int64)
                adjust(logits[row], wanted, known[:prompt_len], known[prompt_len:])
                changed.append(row)
        if changed:
            usable = torch.isfinite(logits[changed].amax(-1)).tolist()
            if not all(usable):
                culprits = tuple(row for row, good in zip(changed, usable, strict=True) if not good)
                raise RowError("penalties and masks leave no token to draw, or scores that are not finite", culprits)
        if all(wanted.temperature <= 0 for wanted in params):
            return logits.argmax(-1) if changed or best is None else best
        seeds = np.array([(wanted.seed or 0) & _U64 for wanted in params], dtype=np.uint64)
        choices = np.array([state.choices[slot] for slot in slots.tolist()], dtype=np.int64)
        draw = Draw(
            temperature=np.array([wanted.temperature for wanted in params], dtype=np.float64),
            top_k=np.array([wanted.top_k for wanted in params], dtype=np.int64),
            top_p=np.array([wanted.top_p for wanted in params], dtype=np.float64),
            min_p=np.array([wanted.min_p for wanted in params], dtype=np.float64),
            uniform=uniform(seeds, positions, choices),
        )
        return self._sample(logits, draw)


def is_adjusted(params: SamplingParams) -> bool:
    """Whether logits must be changed before the draw; most rows need nothing."""
    return bool(
        params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
        or params.logit_bias
        or params.min_tokens
    )


def adjust(logits: torch.Tensor, params: SamplingParams, prompt: IntArray, generated: IntArray) -> None:
    """Bias, penalties and the stop mask of one row, in this order, in place; `logits` [vocabulary], ids so far int64.

    `logit_bias` is added; `repetition_penalty` divides positive and multiplies negative logits of every token seen
    (Keskar et al., 2019); `frequency_penalty` (per occurrence) and `presence_penalty` (once) lower tokens already
    generated; before `min_tokens` generated tokens no stop id can be drawn. Ids outside the vocabulary are ignored.
    """
    vocabulary, device = logits.shape[0], logits.device
    if params.logit_bias:
        bias = {int(token): value for token, value in params.logit_bias.items() if 0 <= int(token) < vocabulary}
        logits[list(bias)] += torch.tensor(list(bias.values()), dtype=logits.dtype, device=device)
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(np.concatenate((prompt, generated)))).to(device)
        old = logits[seen]
        logits[seen] = torch.where(old > 0, old / params.repetition_penalty, old * params.repetition_penalty)
    if len(generated) and (params.frequency_penalty or params.presence_penalty):
        ids, counts = np.unique(generated, return_counts=True)
        lowered = counts * params.frequency_penalty + params.presence_penalty
        logits[torch.from_numpy(ids).to(device)] -= torch.from_numpy(lowered).to(logits)
    if len(generated) < params.min_tokens:
        stops = [token for token in params.stop_token_ids if 0 <= token < vocabulary]
        logits[stops] = float("-inf")
