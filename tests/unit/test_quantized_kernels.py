"""The quantized path: its arithmetic is exact where it says so, and every way to compute it gives the same bits."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from leftfold.executor.config import ModelConfig
from leftfold.executor.errors import ModelError
from leftfold.executor.models import quantized
from leftfold.executor.models.llama import StepInput
from leftfold.executor.models.quantized import QuantizedLlama, QuantizedMemory
from leftfold.executor.weights import load
from leftfold.kernels.attention import PagedLayout
from leftfold.kernels.cpu import native, nibbles, reference
from leftfold.kernels.cpu.packing import pack, take_turns
from tests.tiny_models import KINDS, make

SIZES = [(960, 576), (576, 1536), (45, 80), (199, 96), (77, 688)]


def variants() -> list[str]:
    """Of the native code, those that this machine can compile and run."""
    try:
        native.built(native.VARIANTS["portable"])
    except native.NativeError:
        return []
    return sorted(native.VARIANTS) if native.library("native").lf_level() else ["native", "portable"]


VARIANTS = variants()


@pytest.fixture(params=VARIANTS)
def engine(request: pytest.FixtureRequest) -> Iterator[native.Engine]:
    made = native.Engine(2, request.param)
    yield made
    made.close()


def activations(rows: int, inputs: int) -> torch.Tensor:
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 4, rows)[:, None]
    x[0], x[1] = 0.0, x[1] * 1e-44
    return x


BITS = pytest.mark.parametrize("bits", [8, 4])


def test_a_packed_weight_can_be_unpacked_and_says_its_sums() -> None:
    weight = torch.randn(45, 80)
    packed = pack(weight, torch.ones(45))
    plain = packed.plain().float()
    assert torch.allclose(plain * packed.scale[:45, None], weight, atol=float(weight.abs().max()) / 250)
    assert plain.abs().amax(1).eq(127).all()
    assert torch.equal(packed.offset[:45], (128 * plain.sum(1)).int()) and packed.blocks == 4 and packed.depth == 128


def on_lattices(outputs: int, inputs: int, lowest: int, levels: int) -> torch.Tensor:
    """Weights that are so many evenly spaced values in every 32 inputs, as a file of 4 bits has them."""
    groups = torch.randint(0, levels, (outputs, -(-inputs // 32), 32))
    groups[..., 0], groups[..., 1] = 0, levels - 1
    step = torch.rand(outputs, groups.shape[1], 1) + 0.2
    offset = step * lowest + (0.0 if lowest else torch.randn_like(step) * 4)
    return (groups * step + offset).flatten(1)[:, :inputs]


@pytest.mark.parametrize(("lowest", "levels"), [(0, 16), (-8, 16), (-8, 13), (-3, 9)])
def test_weights_of_4_bits_keep_what_was_in_4_bits(lowest: int, levels: int) -> None:
    weight = on_lattices(96, 576, lowest, levels)
    packed = pack(weight, bits=4)
    units = weight / packed.scale[:96, None]
    off = (packed.plain() - units).abs()
    assert packed.bits == 4 and float(off.max()) < 0.65 and float(off.square().mean().sqrt()) < 0.31
    assert off.square().mean() < 1.1 * (pack(weight).plain() - units).square().mean()
    assert torch.equal(packed.offset[:96], 128 * packed.plain().sum(1, dtype=torch.int32))


@pytest.mark.parametrize("same", [1.0, 0.7, 1.5, -0.6])
def test_weights_of_4_bits_are_near_any_weights(same: float) -> None:
    weight = torch.randn(45, 80, generator=torch.Generator().manual_seed(round(same * 10))) * torch.logspace(-4, 2, 80)
    weight[7], weight[9, :32], weight[11, 3] = 0.0, same, float("inf")
    weight[9, 70] = 127.0  # so that its weights are told in units of one
    packed = pack(weight, bits=4)
    plain = packed.plain().float()
    assert packed.weight.shape == (4, 4, 320) and plain.abs().max() <= 127
    assert torch.isnan(packed.scale[:45]).nonzero().flatten().tolist() == [11]
    near = plain * packed.scale[:45, None]
    rest = [row for row in range(45) if row != 11]
    for first in range(0, 80, 32):
        group = weight[rest, first : first + 32]
        low, step = group.amin(1, keepdim=True), (group.amax(1, keepdim=True) - group.amin(1, keepdim=True)) / 15
        sixteen = low + step * torch.round((group - low) / step.clamp(min=1e-30))
        off = (near[rest, first : first + 32] - group).square().mean(1).sqrt()
        assert bool((off <= (sixteen - group).square().mean(1).sqrt() + 0.75 * packed.scale[rest]).all())
    assert not plain[7].any() and plain[9, :32].tolist() == [float(round(same / float(packed.scale[9])))] * 32


def test_unpacking_is_what_the_format_says() -> None:
    groups = nibbles.pack(torch.rand(32, 64) * 254 - 127, 64)
    plain = nibbles.unpack(groups)
    for block, group, output, at in itertools.product(range(2), range(2), (0, 3, 15), range(32)):
        data = groups[block, group].tolist()
        word = 2 * (at // 8 * 32 + output * 2 + at % 4 // 2)
        four = data[word] + 256 * data[word + 1]
        n = four >> {(1, 0): 0, (1, 1): 4, (0, 0): 8, (0, 1): 12}[at % 2, at // 4 % 2] & 15
        m, c, b = data[256 + 2 * output] + 256 * data[257 + 2 * output], data[288 + 2 * output], data[289 + 2 * output]
        assert plain[16 * block + output, 32 * group + at] == ((256 * n + c) * m >> 16) + b - 256 * (b > 127)
        assert c * m >> 8 < 256


@BITS
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_a_linear_is_the_exact_product_of_whole_numbers_scaled_once(outputs: int, inputs: int, bits: int) -> None:
    x, weight, bias = activations(40, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    packed = pack(weight, bias, bits)
    whole, scale = reference.quantize(x, 32767.0, float("nan"))
    exact = whole.double() @ packed.plain().double().T
    wanted = exact * scale[:, None].double() * packed.scale[:outputs].double() + bias
    got = reference.linear(x, packed.plain().float(), packed.scale[:outputs], packed.bias[:outputs])
    assert torch.allclose(got.double(), wanted, rtol=1e-5, atol=1e-5)


@BITS
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_rows_of_a_linear_are_bitwise_equal_for_every_number_of_rows(
    engine: native.Engine, outputs: int, inputs: int, bits: int
) -> None:
    packed, x = pack(torch.randn(outputs, inputs), torch.randn(outputs), bits), activations(300, inputs)
    plain, scale, bias = packed.plain().float(), packed.scale[:outputs], packed.bias[:outputs]
    whole = engine.linear(packed, x)
    assert torch.equal(whole, reference.linear(x, plain, scale, bias))
    counts = range(1, 301) if outputs < 200 else [*range(1, 70), 127, 128, 129, 255, 300]
    assert [count for count in counts if not torch.equal(engine.linear(packed, x[:count]), whole[:count])] == []
    assert torch.equal(engine.linear(packed, x[100:117].contiguous()), whole[100:117])


def test_the_reference_depends_on_no_other_row_either() -> None:
    packed, x = pack(torch.randn(199, 576)), activations(300, 576)
    whole = reference.linear(x, packed.plain().float(), packed.scale[:199], None)
    for count in (1, 2, 3, 17, 100):
        assert torch.equal(reference.linear(x[:count], packed.plain().float(), packed.scale[:199], None), whole[:count])


@BITS
def test_a_row_that_is_not_finite_shows_it_and_no_other_row_does(engine: native.Engine, bits: int) -> None:
    packed, x = pack(torch.randn(48, 96), bits=bits), activations(9, 96)
    clean = engine.linear(packed, x)
    x[3, 5], x[6, 95] = float("nan"), float("-inf")
    got = engine.linear(packed, x)
    assert torch.isnan(got).all(1).nonzero().flatten().tolist() == [3, 6]
    others = [0, 1, 2, 4, 5, 7, 8]
    assert torch.equal(got[others], clean[others])


def test_functions_are_what_they_say() -> None:
    y = torch.linspace(-125, 126, 5000)
    assert torch.allclose(reference.exp2(y), torch.exp2(y.double()).float(), rtol=3e-7, atol=0)
    gate, up = torch.randn(100, 32) * 20, torch.randn(100, 32)
    assert torch.allclose(reference.silu_mul(gate, up), torch.nn.functional.silu(gate) * up, rtol=1e-5, atol=1e-6)
    x, weight = torch.randn(7, 96), torch.rand(96)
    assert torch.allclose(reference.rms_norm(x, weight, 1e-5), torch.nn.functional.rms_norm(x, (96,), weight, 1e-5))
    assert take_turns(torch.arange(32), torch.arange(100, 132)).tolist() == [
        *range(16), *range(100, 116), *range(16, 32), *range(116, 132),
    ]  # fmt: skip


class Model:
    """A tiny random model, and steps through it on scattered pages."""

    def __init__(self, kind: str, folder: Path, bits: int = 8) -> None:
        make(kind, folder)
        self.loaded = load(folder)
        self.model: QuantizedLlama = quantized.build(self.loaded, 256, bits=bits)

    def steps(self, variant: str, pieces: list[list[tuple[int, int, int]]], page_size: int) -> dict[int, torch.Tensor]:
        """Steps of (row, start, length) pieces; the hidden states of each row, by row."""
        self.model.use(variant)
        each = -(-96 // page_size)
        pages = np.random.default_rng(0).permutation(4 * each + 3)[: 4 * each].reshape(4, each)
        memory = QuantizedMemory(self.model.config, 4 * each + 3, page_size)
        tokens = torch.from_numpy(np.random.default_rng(1).integers(0, 199, (4, 96)))
        out: dict[int, list[torch.Tensor]] = {}
        for step in pieces:
            at = [np.arange(start, start + length) for _, start, length in step]
            positions = np.concatenate(at)
            owners = np.repeat([row for row, _, _ in step], [length for _, _, length in step])
            places = pages[owners, positions // page_size] * page_size + positions % page_size
            rows, starts, lengths = (np.array(column) for column in zip(*step, strict=True))
            given = StepInput(
                tokens[owners, positions], torch.from_numpy(positions), torch.from_numpy(places),
                PagedLayout(starts, lengths, pages[rows], page_size),
            )  # fmt: skip
            with torch.inference_mode():
                parts = self.model.forward(given, memory).split(lengths.tolist())
            for (row, _, _), part in zip(step, parts, strict=True):
                out.setdefault(row, []).append(part)
        memory.clear()
        assert not any(bool(part.any()) for part in memory.tensors)
        return {row: torch.cat(parts) for row, parts in out.items()}


@pytest.fixture(scope="module", params=[*sorted(KINDS), "llama-biased in 4 bits"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    kind, _, bits = request.param.partition(" in ")
    return Model(kind, tmp_path_factory.mktemp(kind), int(bits[:1] or 8))


WHOLE = [[(0, 0, 90), (1, 0, 33), (2, 0, 1)], [(1, 33, 1), (2, 1, 64)]]
PIECES = [
    [(2, 0, 1)], [(0, 0, 7), (1, 0, 20)], [(0, 7, 1)], [(1, 20, 13), (2, 1, 40), (0, 8, 50)], [(0, 58, 32), (1, 33, 1)],
    *[[(2, 41 + at, 1)] for at in range(24)],
]  # fmt: skip


def same(one: dict[int, torch.Tensor], two: dict[int, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[row], two[row]) for row in one)


def test_hidden_states_have_the_same_bits_however_they_are_computed(tiny: Model) -> None:
    expected = tiny.steps("reference", WHOLE, 16)
    assert all(bool(torch.isfinite(part).all()) for part in expected.values())
    assert same(tiny.steps("reference", PIECES, 5), expected)
    for variant in VARIANTS:
        for pieces, page_size in ((WHOLE, 16), (PIECES, 16), (PIECES, 5), (PIECES, 40), (WHOLE, 1)):
            assert same(tiny.steps(variant, pieces, page_size), expected), (variant, page_size)


@pytest.mark.parametrize("threads", [1, 3])
def test_hidden_states_have_the_same_bits_for_any_number_of_threads(tiny: Model, threads: int) -> None:
    expected, before = tiny.steps("reference", WHOLE, 16), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for variant in VARIANTS:
            assert same(tiny.steps(variant, WHOLE, 16), expected) and same(tiny.steps(variant, PIECES, 7), expected)
    finally:
        torch.set_num_threads(before)


def test_scores_have_the_same_bits_however_they_are_computed(tiny: Model) -> None:
    hidden = activations(70, tiny.model.config.hidden_size)
    tiny.model.use("reference")
    expected = tiny.model.logits(hidden)
    for variant in VARIANTS:
        tiny.model.use(variant)
        assert torch.equal(tiny.model.logits(hidden), expected)
        assert torch.equal(tiny.model.logits(hidden[5:6]), expected[5:6])


def test_a_token_outside_the_vocabulary_is_refused_by_native_code(tiny: Model) -> None:
    memory = QuantizedMemory(tiny.model.config, 1, 16)
    layout = PagedLayout(np.array([0]), np.array([1]), np.array([[0]]), 16)
    for variant in VARIANTS:
        tiny.model.use(variant)
        for token in (-1, 199):
            given = StepInput(torch.tensor([token]), torch.tensor([0]), torch.tensor([0]), layout)
            with pytest.raises(ModelError, match="vocabulary"):
                tiny.model.forward(given, memory)


def test_memory_gives_back_what_was_written_and_copies_pages() -> None:
    config = dataclasses.replace(_config(), num_layers=2)
    memory = QuantizedMemory(config, 5, 20)
    keys, values = torch.randn(2, 30, config.num_kv_heads, config.head_dim)
    keys[4, 0, 3] = float("inf")
    pages = torch.tensor([3, 1])
    at = torch.arange(30)
    memory.write(1, pages[at // 20] * 20 + at % 20, keys, values)
    memory.copy(torch.tensor([3, 1]), torch.tensor([1, 0]))
    for held in (pages[:1], torch.tensor([1, 0])):
        end = min(30, 20 * len(held))
        k, k_scale, v, v_scale = memory.read(1, held, end)
        for got, scale, given in ((k, k_scale, keys), (v, v_scale, values)):
            wanted = torch.where(torch.isfinite(given).all(-1, keepdim=True), given, 0.0)[:end].transpose(0, 1)
            assert torch.allclose(got * scale[..., None], wanted, atol=0.02)
    assert memory.nbytes == 5 * QuantizedMemory.bytes_per_page(config, 20)
    memory.clear()
    assert not any(bool(part.any()) for part in memory.tensors)


def _config() -> ModelConfig:
    return ModelConfig(
        family="llama", vocab_size=100, hidden_size=64, intermediate_size=128, num_layers=1, num_heads=4,
        num_kv_heads=2, head_dim=16, rms_eps=1e-5, rope_theta=10000.0, rope_scaling=None, max_positions=2048,
        tied_embeddings=True, qk_norm=False, windows=(None,),
    )  # fmt: skip


def test_models_that_cannot_run_quantized_say_why() -> None:
    config = _config()
    assert quantized.unsupported(config, 2048) == ""
    cases = {"head_dim": 24, "hidden_size": 70, "intermediate_size": 100}
    for name, value in cases.items():
        assert f"{name} {value}" in quantized.unsupported(dataclasses.replace(config, **{name: value}), 2048)
    assert "head size 512" in quantized.unsupported(dataclasses.replace(config, head_dim=512), 2048)
    assert "KV head" in quantized.unsupported(dataclasses.replace(config, num_heads=34), 2048)
    assert "65537 positions" in quantized.unsupported(config, 65537)
