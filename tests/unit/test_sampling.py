"""Sampling: exact against plain Python, right in distribution, and each row on its own."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leftfold.events import SamplingParams
from leftfold.executor.errors import RowError
from leftfold.executor.mirrors import DeviceState
from leftfold.executor.sampler import Sampler, adjust, is_adjusted
from leftfold.kernels.sampling import Draw, sample, uniform
from tests.plan_stream import PlanStream, joined

_64 = (1 << 64) - 1


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _64
    return x ^ (x >> 31)


def plain_uniform(seed: int, choice: int, position: int) -> float:
    gamma = 0x9E3779B97F4A7C15
    return (mix((mix((seed + choice * gamma) & _64) + (position + 1) * gamma) & _64) >> 12) / 2**52


def one_uniform(seed: int, position: int, choice: int = 0) -> float:
    return float(uniform(np.array([seed], dtype=np.uint64), np.array([position]), np.array([choice]))[0])


@given(st.integers(0, _64), st.integers(0, 2**20), st.integers(0, 8))
def test_uniform_is_the_documented_function(seed: int, position: int, choice: int) -> None:
    assert one_uniform(seed, position, choice) == plain_uniform(seed, choice, position) < 1.0


def test_the_generator_is_splitmix64() -> None:
    # The first outputs of SplitMix64 from state 1234567, as published with its reference code.
    gamma, state = 0x9E3779B97F4A7C15, 1234567
    outputs = [mix((state + count * gamma) & _64) for count in (1, 2, 3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_uniforms_are_spread_evenly_over_seeds_and_positions() -> None:
    by_position = uniform(np.full(20_000, 7, np.uint64), np.arange(20_000), np.zeros(20_000, np.int64))
    by_seed = uniform(np.arange(20_000, dtype=np.uint64), np.full(20_000, 33), np.zeros(20_000, np.int64))
    for drawn in (by_position, by_seed):
        counts = np.histogram(drawn, bins=50, range=(0, 1))[0]
        assert ((counts - 400) ** 2 / 400).sum() < 95  # chi-square, 49 degrees of freedom, p > 1e-4
        assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.03
    assert len(np.unique(np.concatenate((by_position, by_seed)))) > 39_990


def plain_sample(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, u: float) -> int:
    """The definition, token by token."""
    top = max(logits)
    if temperature <= 0:
        return logits.index(top)
    weights = [math.exp((value - top) / temperature) for value in logits]
    if 0 < top_k < len(weights):
        floor = sorted(weights, reverse=True)[top_k - 1]
        weights = [w if w >= floor else 0.0 for w in weights]
    if top_p < 1.0:
        mass, total = 0.0, sum(weights)
        for floor in sorted(weights, reverse=True):
            mass += floor
            if mass >= top_p * total:
                break
        weights = [w if w >= floor else 0.0 for w in weights]
    weights = [w if w >= min_p else 0.0 for w in weights]
    target, mass = u * sum(weights), 0.0
    for token, weight in enumerate(weights):
        mass += weight
        if mass > target:
            return token
    raise AssertionError("the uniform is below 1")


def draw_of(rows: int, u, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> Draw:
    columns = (temperature, top_k, top_p, min_p, u)
    kinds = (np.float64, np.int64, np.float64, np.float64, np.float64)
    return Draw(*(np.broadcast_to(np.asarray(c, dtype=k), (rows,)).copy() for c, k in zip(columns, kinds, strict=True)))


OPTIONS = st.tuples(
    st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    st.sampled_from([0, 1, 3, 50]),
    st.sampled_from([1.0, 0.9, 0.5, 0.0]),
    st.sampled_from([0.0, 0.05, 0.4]),
)


@given(st.integers(0, 2**32), st.lists(OPTIONS, min_size=1, max_size=6))
def test_draws_equal_the_definition(seed: int, options: list[tuple[float, int, float, float]]) -> None:
    random = np.random.default_rng(seed)
    logits = torch.from_numpy(random.normal(size=(len(options), 23)) * 3).float()
    u = random.random(len(options))
    temperature, top_k, top_p, min_p = zip(*options, strict=True)
    got = sample(logits, draw_of(len(options), u, temperature, top_k, top_p, min_p)).tolist()
    expected = [plain_sample(row, *option, x) for row, option, x in zip(logits.tolist(), options, u, strict=True)]
    assert got == expected


@pytest.mark.parametrize("head", [1, 4, 1024])
def test_top_p_is_the_same_whether_found_in_the_head_or_by_sorting(head: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(40, 300))).float()
    u = np.random.default_rng(1).random(40)
    expected = [plain_sample(row, 1.0, 0, 0.8, 0.0, x) for row, x in zip(logits.tolist(), u, strict=True)]
    monkeypatch.setattr("leftfold.kernels.sampling._HEAD", head)
    assert sample(logits, draw_of(40, u, top_p=0.8)).tolist() == expected


def test_frequencies_match_probabilities() -> None:
    logits = torch.tensor([1.0, 0.0, 2.0, -1.0, 0.5]).repeat(40_000, 1)
    u = uniform(np.full(40_000, 3, np.uint64), np.arange(40_000), np.zeros(40_000, np.int64))
    counts = torch.bincount(sample(logits, draw_of(40_000, u, temperature=0.8)), minlength=5)
    wanted = (logits[0] / 0.8).softmax(-1) * 40_000
    assert ((counts - wanted) ** 2 / wanted).sum() < 24  # chi-square, 4 degrees of freedom, p > 1e-4


def test_limits_keep_only_the_likeliest() -> None:
    logits = torch.tensor([1.0, 0.0, 2.0, -1.0, 0.5]).repeat(2000, 1)
    u = np.random.default_rng(0).random(2000)
    assert set(sample(logits, draw_of(2000, u, top_k=2)).tolist()) == {0, 2}
    assert set(sample(logits, draw_of(2000, u, top_p=0.0)).tolist()) == {2}
    assert set(sample(logits, draw_of(2000, u, min_p=0.2)).tolist()) == {0, 2, 4}
    assert set(sample(logits, draw_of(2000, u, temperature=1e-6)).tolist()) == {2}


def test_extreme_uniforms_stay_inside_the_kept_tokens() -> None:
    logits = torch.tensor([[0.0, 5.0, float("-inf"), 4.0, -9.0]])
    for u, token in ((0.0, 1), (1 - 2**-52, 3)):
        assert sample(logits, draw_of(1, u, top_k=2)).tolist() == [token]


def test_a_rows_draw_does_not_depend_on_the_batch() -> None:
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(40, 49_152)) * 2).float()
    u = np.random.default_rng(1).random(40)
    draw = draw_of(40, u, np.arange(40) % 3 * 0.7, np.arange(40) % 4 * 9, 1 - np.arange(40) % 5 * 0.1)
    whole = sample(logits, draw)
    for row in range(40):
        assert sample(logits[row : row + 1], draw.take(np.array([row]))).tolist() == [int(whole[row])]


def adjusted(logits: list[float], params: SamplingParams, prompt=(), generated=()) -> list[float]:
    row = torch.tensor(logits)
    adjust(row, params, np.array(prompt, dtype=np.int64), np.array(generated, dtype=np.int64))
    return row.tolist()


@pytest.mark.parametrize("temperature", [1e-30, 1e-50, 5e-324])
def test_the_coldest_temperature_draws_the_likeliest(temperature: float) -> None:
    logits = torch.tensor([[1.0, 3.0, float("-inf"), 2.9999], [-9.0, -9.0, -8.0, -9.5]])
    assert sample(logits, draw_of(2, [0.999, 0.5], temperature)).tolist() == [1, 2]


@given(st.floats(0.0, 100.0), st.integers(0, 2**32))
def test_every_temperature_draws_a_token_that_is_allowed(temperature: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    logits = torch.from_numpy(random.normal(size=(4, 9)) * 10).float()
    logits[:, 5:] = float("-inf")
    assert max(sample(logits, draw_of(4, random.random(4), temperature)).tolist()) < 5


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(repetition_penalty=1e-42),
        SamplingParams(temperature=0.0, repetition_penalty=1e-42),
        SamplingParams(min_tokens=3, stop_token_ids=(0, 1, 2)),
        SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=(0, 1, 2)),
    ],
)
def test_a_row_with_nothing_to_draw_is_named(params: SamplingParams) -> None:
    state, stream = DeviceState(8, 4), PlanStream()
    fine = SamplingParams(presence_penalty=0.5)
    rows = [joined(slot, [2, 1], [slot], prompt_len=1, params=p) for slot, p in enumerate((fine, params, fine))]
    plan = stream.plan(joined=rows, chunks=[(slot, 2, True) for slot in range(3)], chunk_tokens=[[2, 1]] * 3)
    state.apply_deltas(plan)
    with pytest.raises(RowError) as caught:
        Sampler(sample).draw(torch.tensor([[0.0, 3.0, 1.0]]).repeat(3, 1), state, np.arange(3), np.full(3, 2))
    assert caught.value.rows == (1,)


def test_a_bias_comes_before_penalties() -> None:
    both = SamplingParams(repetition_penalty=2.0, logit_bias={0: 4.0})
    assert adjusted([-2.0, 1.0], both, [0]) == [1.0, 1.0]


def test_penalties_bias_and_min_tokens() -> None:
    flat = [1.0, -1.0, 2.0, 0.0]
    assert adjusted(flat, SamplingParams(repetition_penalty=2.0), [0], [1]) == [0.5, -2.0, 2.0, 0.0]
    assert adjusted(flat, SamplingParams(frequency_penalty=0.5), [0], [2, 2, 3]) == [1.0, -1.0, 1.0, -0.5]
    assert adjusted(flat, SamplingParams(presence_penalty=0.5), [0], [2, 2]) == [1.0, -1.0, 1.5, 0.0]
    assert adjusted(flat, SamplingParams(logit_bias={3: 7.0, 99: 1.0})) == [1.0, -1.0, 2.0, 7.0]
    early = SamplingParams(min_tokens=2, stop_token_ids=(2, 77))
    assert adjusted(flat, early, [0], [1]) == [1.0, -1.0, float("-inf"), 0.0]
    assert adjusted(flat, early, [0], [1, 1]) == flat
    assert not is_adjusted(SamplingParams(temperature=0.3, top_p=0.5))


def test_the_sampler_adjusts_only_the_rows_that_ask() -> None:
    state, stream = DeviceState(8, 4), PlanStream()
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, logit_bias={0: 50.0}),
        SamplingParams(temperature=0.0, frequency_penalty=9.0),
    ]
    rows = [joined(slot, [2, 1], [slot], prompt_len=1, params=p) for slot, p in enumerate(params)]
    plan = stream.plan(joined=rows, chunks=[(slot, 2, True) for slot in range(3)], chunk_tokens=[[2, 1]] * 3)
    state.apply_deltas(plan)
    logits = torch.tensor([[0.0, 3.0, 1.0]]).repeat(3, 1)
    drawn = Sampler(sample).draw(logits, state, np.arange(3), np.full(3, 2))
    assert drawn.tolist() == [1, 0, 2]
