"""Configurations of runs, and how busy each run is, drawn from one seeded source."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from leftfold.fsm.policy import BUILT_IN

VOCABULARIES = (2, 9, 50, 50, 50, 1 << 20)
"""Few tokens make equal pages likely; many make stop ids that no column watches."""


def draw_config(rng: Random) -> dict[str, Any]:
    """Arguments of a `World`: small limits in every proportion, pools of at most 64 pages."""
    vocab = rng.choice(VOCABULARIES)
    page_size = rng.choice((1, 2, 3, 4, 4, 5, 8, 8, 16))
    tokens = rng.choice((1, 12, 40, 60, 80, 120, 200)) * (0.5 + rng.random())
    return {
        "vocab": vocab,
        "num_pages": max(1, min(64, round(tokens / page_size))),
        "page_size": page_size,
        "max_running": rng.choice((1, 2, 2, 3, 3, 4, 8)),
        "max_batch_tokens": rng.choice((1, 2, 4, 8, 16, 64)),
        "max_model_len": rng.choice((2, 20, 20, 60, 60, 60, 90, 90, 90, 120, 120, 120)),
        "max_chunk_tokens": rng.choice((None, None, 1, 3, 8)),
        "pipeline_depth": rng.choice((0, 0, 1, 2)),
        "policy": rng.choice(BUILT_IN),
        "prefix_cache": rng.random() < 0.8,
        "max_queued_requests": rng.choice((None, None, None, 2)),
        "max_queued_tokens": rng.choice((None, None, None, 30)),
        "vocab_size": rng.choice((None, None, vocab)),
        "growth_horizon": rng.choice((0, 0, 0, 3, 20)),
        "routers": rng.random() < 0.3,
    }


TIGHT = 0.15
"""In how many runs of the swarm the pool holds one to two of the longest requests, and three may run."""


def draw_swarm(rng: Random) -> dict[str, Any]:
    """Arguments of a `World`, every limit over its whole range: pages of 1 to 64 tokens, pools from a page to hundreds.

    Small values are as likely as large ones on a scale of powers, so that most runs are small and some are not.
    """
    vocab = rng.choice(VOCABULARIES)
    page_size = _spread(rng, 1, 64)
    budget, rows = _spread(rng, 1, 512), _spread(rng, 1, 32)
    tokens = _spread(rng, 8 if rng.random() < 0.8 else 1, 2000)
    longest = _spread(rng, 8 if rng.random() < 0.9 else 2, 400)
    policy = rng.choice(BUILT_IN)
    if rng.random() < TIGHT:
        rows, tokens = max(rows, 3), int(longest * (1 + rng.random()))
        policy = rng.choice((policy, "priority"))  # by which rows give way to whoever waits
    return {
        "vocab": vocab,
        "num_pages": max(1, min(256, tokens // page_size)),
        "page_size": page_size,
        "max_running": rows,
        "max_batch_tokens": budget,
        "max_model_len": longest,
        "max_chunk_tokens": None if rng.random() < 0.4 else _spread(rng, 1, budget),
        "pipeline_depth": rng.choice((0, 1, 2)),
        "policy": policy,
        "prefix_cache": rng.random() < 0.7,
        "max_queued_requests": None if rng.random() < 0.7 else _spread(rng, 1, 16),
        "max_queued_tokens": None if rng.random() < 0.7 else _spread(rng, 1, 400),
        "vocab_size": rng.choice((None, None, vocab)),
        "growth_horizon": 0 if rng.random() < 0.6 else _spread(rng, 1, 64),
        "routers": rng.random() < 0.3,
    }


def draw_faulty(rng: Random) -> dict[str, Any]:
    """Arguments of a `DurableWorld`: those of `draw_swarm`, and when its log syncs and begins a new segment."""
    return {
        **draw_swarm(rng),
        "segment_bytes": rng.choice((200, 600, 2000, 1 << 20)),
        "sync_every": rng.choice((0, 1, 1, 2, 7, 40)),
    }


def _spread(rng: Random, least: int, most: int) -> int:
    """A whole number of at least `least` and at most `most`, each doubling as likely as the other."""
    return int(least * ((most + 0.999) / least) ** rng.random())


def draw_tokens(rng: Random, count: int, vocab: int) -> list[int]:
    """Ids below `vocab` (at least 1): what so many calls of `rng.randrange` give, which take four times as long."""
    draw, bits = rng.getrandbits, vocab.bit_length()
    tokens: list[int] = []
    while len(tokens) < count:
        token = draw(bits)
        if token < vocab:
            tokens.append(token)
    return tokens


@dataclass(frozen=True, slots=True)
class Habits:
    """How busy a run is.

    `crowd`: requests that live at once, if they may; `rids`: from how many names they take theirs; `stride`: most steps
    at once; `prompt`, `answer`: tokens that are usually most; `garnish`: how often a request is no plain one; `faults`:
    how often a kind of fault belongs to the run; `spread`: powers of ten by which rates differ from run to run.
    """

    crowd: int
    rids: int
    stride: int = 48
    prompt: int = 12
    answer: int = 80
    garnish: float = 0.3
    faults: float = 0.3
    spread: float = 0.0


def lite_habits(rng: Random) -> Habits:
    """Few requests, many steps."""
    return Habits(crowd=1 + rng.choice((0, 0, 0, 1, 1, 2, 3)), rids=rng.choice((2, 3, 8)))


def swarm_habits(rng: Random) -> Habits:
    """Each run differs from the others in everything."""
    return _habits(rng, 0.7 * rng.random())


def faulty_habits(rng: Random) -> Habits:
    """Those of the swarm, with most faults in most runs."""
    return _habits(rng, 0.2 + 0.7 * rng.random())


def _habits(rng: Random, faults: float) -> Habits:
    crowd = _spread(rng, 1, 24)
    return Habits(
        crowd=crowd, rids=rng.choice((2, 8, crowd + 2, 2 * crowd + 8)), stride=_spread(rng, 2, 64),
        prompt=_spread(rng, 1, 200), answer=_spread(rng, 1, 200), garnish=rng.random() * 0.8,
        faults=faults, spread=1.0,
    )  # fmt: skip
