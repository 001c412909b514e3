"""Log-probabilities of tokens beside what is drawn, for the rows that want them and for no others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from leftfold.executor.base import Attachment, Score, Wanted
from leftfold.executor.mirrors import DeviceState, IntArray, StepRows

BLOCK = 64
"""Positions of a prompt whose scores over the vocabulary are in memory at once."""


class Scorer:
    """Collects one step's scores: `prompts` from hidden states, `drawn` from the scores that tokens are drawn from.

    A token's values depend on its own position alone: each softmax runs along its row, in float32, and alternatives
    are looked for with exactly as many as that row wants.
    """

    def __init__(self, state: DeviceState, rows: StepRows) -> None:
        self._rows = rows
        self._known = state.history
        self._wanted = {row: state.wanted[slot] for row, slot in enumerate(rows.slots.tolist()) if slot in state.wanted}
        self._scores: dict[int, list[Score]] = {}

    def prompts(self, hidden: torch.Tensor, to_scores: Callable[[torch.Tensor], torch.Tensor]) -> list[int]:
        """Score what the chunks predict of their prompts; the rows whose scores are not finite.

        `hidden`: [tokens, hidden_size] of the step, in the order of its rows; `to_scores` gives [rows, vocabulary].
        """
        offsets = np.cumsum(self._rows.lengths) - self._rows.lengths
        broken = []
        for row, wanted in self._wanted.items():
            start, length = int(self._rows.starts[row]), int(self._rows.lengths[row])
            positions = wanted.predicted(start, length)
            first = int(offsets[row]) - start - 1  # the position before predicts
            tokens = self._known[self._rows.slots[row]]
            for at in range(0, len(positions), BLOCK):
                block = positions[at : at + BLOCK]
                scores = to_scores(hidden[first + block.start : first + block.stop])
                if not bool(torch.isfinite(scores.amax(-1)).all()):
                    broken.append(row)
                    break
                self._score(row, wanted, scores, block, tokens[block.start : block.stop].astype(np.int64))
        return broken

    def before_draw(self, scores: torch.Tensor, sampling: IntArray) -> Callable[[IntArray], None] | None:
        """Keep the wanted of `scores` [sampling rows, vocabulary], which the draw changes; give it the drawn tokens."""
        wanting = {row for row, wanted in self._wanted.items() if wanted.drawn}
        kept = [(at, row) for at, row in enumerate(sampling.tolist()) if row in wanting]
        if not kept:
            return None
        whole = scores[[at for at, _ in kept]]

        def drawn(tokens: IntArray) -> None:
            for index, (at, row) in enumerate(kept):
                end = int(self._rows.starts[row] + self._rows.lengths[row])
                own = whole[index : index + 1]
                self._score(row, self._wanted[row], own, range(end, end + 1), tokens[at : at + 1])

        return drawn

    def attachments(self) -> list[Attachment]:
        """What was scored, by row."""
        return [
            Attachment(wanted.rid, wanted.epoch, wanted.choice, self._scores[row])
            for row, wanted in self._wanted.items()
            if row in self._scores
        ]

    def _score(self, row: int, wanted: Wanted, scores: torch.Tensor, positions: range, tokens: IntArray) -> None:
        logprobs = scores.log_softmax(-1, dtype=torch.float32)
        own = logprobs.gather(1, torch.from_numpy(tokens).to(logprobs.device)[:, None])[:, 0].tolist()
        tops = _tops(logprobs, wanted.top)
        self._scores.setdefault(row, []).extend(map(Score, positions, tokens.tolist(), own, tops))


def _tops(logprobs: torch.Tensor, count: int) -> Sequence[Sequence[tuple[int, float]]]:
    """The `count` likeliest (token, logprob) of each row of `logprobs` [rows, vocabulary]."""
    if not count:
        return [()] * len(logprobs)
    best = logprobs.topk(min(count, logprobs.shape[1]), dim=-1)
    rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [tuple(sorted(zip(*row, strict=True), key=lambda pair: (-pair[1], pair[0]))) for row in rows]
