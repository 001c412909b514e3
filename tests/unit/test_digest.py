"""The chained digest tells every two plans apart, wherever the same bytes could be cut in another way."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np

from leftfold.events import Joined, Plan, SamplingParams, digest_of
from leftfold.events.digest import START

PLAN = Plan(step=3)


def tokens(*ids: int) -> Any:
    return np.array(ids, np.int32)


def joined(prompt_len: int, *ids: int, want: Any = None, **params: Any) -> Joined:
    return Joined(0, "a", 0, 0, prompt_len, tokens(*ids), (1,), SamplingParams(**params), 0, want)


def test_tokens_cannot_move_from_one_part_to_another() -> None:
    variants: list[tuple[Any, ...]] = [
        ((), (), ()),
        ((1,), (), ()),
        ((), (), (tokens(),)),
        ((), (), (tokens(1, 2), tokens(3))),
        ((), (), (tokens(1), tokens(2, 3))),
        ((), (), (tokens(1, 2, 3),)),
        ((), (), (tokens(1, 2, 3), tokens())),
        ((), (), (tokens(), tokens(1, 2, 3))),
        ((), (joined(1, 1, 2, 3),), ()),
        ((), (joined(2, 1, 2, 3),), ()),
        ((), (joined(1, 1, 2, 3), joined(1)), ()),
        ((), (joined(1, 1, 2), joined(1, 3)), ()),
        ((), (joined(1, 1), joined(1, 2, 3)), ()),
        ((), (joined(1, 1, 2),), (tokens(3),)),
        ((), (joined(1, 1),), (tokens(2, 3),)),
        ((), (joined(1, 1, 2, 3, want={"logprobs": 1}),), ()),
        ((), (joined(1, 1, want={"logprobs": 1}), joined(1, 2)), ()),
        ((), (joined(1, 1), joined(1, 2, want={"logprobs": 1})), ()),
        ((), (joined(1, 1, 2, 3, max_tokens=5),), ()),
        ((), (), (), 1),
        ((1,), (), (), 1),
    ]
    digests = [digest_of(START, PLAN, *variant) for variant in variants]
    for (one, first), (other, second) in combinations(enumerate(digests), 2):
        assert first != second, (variants[one], variants[other])


def test_the_digest_before_counts() -> None:
    assert digest_of("1" * 32, PLAN, (), (), ()) != digest_of(START, PLAN, (), (), ())
