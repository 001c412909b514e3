"""A row's bits do not depend on what else is in the batch: every operation, at real sizes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from leftfold.kernels import attention as attentions
from leftfold.kernels import linear as linears
from leftfold.kernels.attention import PagedLayout
from leftfold.kernels.registry import load_operations

REGISTRY = load_operations()
# (in, out): the projections of SmolLM2-135M and Qwen2.5-0.5B, and sizes that divide by nothing.
SIZES = [(576, 960), (576, 576), (576, 3072), (1536, 576), (896, 4864), (4864, 896), (77, 45)]
ROWS = [*range(1, 65), 65, 66, 67, 96, 97, 128, 129, 200, 255, 256, 257, 300, 511, 512, 513, 700]


@pytest.fixture(params=[1, 2], ids=["1-thread", "2-threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def named(operation: str, name: str) -> Callable:
    return REGISTRY.named(operation, name).function


def both(operation: str) -> list[str]:
    return [implementation.name for implementation in REGISTRY.implementations(operation)]


@pytest.mark.parametrize("name", both("linear"))
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_linear_rows_are_bitwise_equal_for_every_number_of_rows(
    threads: None, name: str, inputs: int, outputs: int
) -> None:
    torch.manual_seed(inputs)
    weight, bias, x = torch.randn(outputs, inputs) / inputs**0.5, torch.randn(outputs), torch.randn(700, inputs)
    apply = named("linear", name)(weight, bias)
    single = torch.cat([apply(x[row : row + 1]) for row in range(80)])
    whole = apply(x)
    assert torch.equal(whole[:80], single)
    rows = ROWS if name != "reference" else [1, 2, 15, 16, 17, 64, 300, 513]
    different = [count for count in rows if not torch.equal(apply(x[:count]), whole[:count])]
    shifted = [count for count in (1, 3, 17, 64) if not torch.equal(apply(x[5 : 5 + count]), whole[5 : 5 + count])]
    assert (different, shifted) == ([], [])
    assert torch.allclose(whole, F.linear(x, weight, bias), atol=1e-4)


def test_linear_rows_of_a_language_model_head_are_bitwise_equal(threads: None) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(49152, 576) / 24, torch.randn(130, 576)
    apply = named("linear", "onednn")(weight)
    whole = apply(x)
    assert all(torch.equal(apply(x[:count]), whole[:count]) for count in (1, 2, 7, 16, 33, 64, 65))


def test_linear_takes_the_reference_where_the_proof_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "invariant", lambda *given: False)
    seen: list[int] = []
    whole = F.linear
    monkeypatch.setattr(F, "linear", lambda x, *rest: seen.append(len(x)) or whole(x, *rest))
    apply = named("linear", "onednn")(torch.randn(8, 4))
    assert apply(torch.randn(20, 4)).shape == (20, 8)
    assert seen == [16, 16]


def test_the_proof_finds_a_product_that_depends_on_the_number_of_rows() -> None:
    weight = torch.randn(45, 77)

    def product(x: torch.Tensor) -> torch.Tensor:
        split = F.linear(x[:, :40], weight[:, :40]) + F.linear(x[:, 40:], weight[:, 40:])
        return split if len(x) > 100 else F.linear(x, weight)

    assert not linears.invariant(product, torch.Size((45, 77)), torch.float32, (16, 64, 128))


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    return named("silu_mul", "reference")(x)


def rms_norm(x: torch.Tensor) -> torch.Tensor:
    return named("rms_norm", "reference")(x, torch.linspace(0.5, 2.0, x.shape[-1]), 1e-5)


@pytest.mark.parametrize("operation", [silu_mul, rms_norm])
@pytest.mark.parametrize("size", [46, 576, 3072])
def test_norm_and_activation_rows_are_bitwise_equal(threads: None, operation: Callable, size: int) -> None:
    torch.manual_seed(size)
    x = torch.randn(400, size) * 3
    whole = operation(x)
    assert all(torch.equal(operation(x[row : row + 1]), whole[row : row + 1]) for row in range(0, 400, 7))
    assert all(torch.equal(operation(x[3 : 3 + count]), whole[3 : 3 + count]) for count in (2, 3, 17, 64, 333))


def test_silu_mul_and_rms_norm_are_what_they_say() -> None:
    x = torch.randn(5, 32)
    gate, up = x.chunk(2, -1)
    assert torch.allclose(silu_mul(x), F.silu(gate) * up, atol=1e-6)
    assert torch.allclose(rms_norm(x), F.rms_norm(x, (32,), torch.linspace(0.5, 2.0, 32), 1e-5), atol=1e-6)
    assert silu_mul(torch.full((1, 2), -200.0)).item() == 0.0


class Paged:
    """Random keys and values of some rows, on scattered pages."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int, page_size: int, rows: int, length: int) -> None:
        self.page_size, self.length = page_size, length
        each = -(-length // page_size)
        total = rows * each + 3
        self.pages = np.random.default_rng(0).permutation(total)[: rows * each].reshape(rows, each)
        self.keys, self.values = (torch.zeros(kv_heads, total, page_size, head_dim) for _ in range(2))
        self.query = torch.randn(rows, length, heads, head_dim)
        self.scale = head_dim**-0.5
        at = np.arange(length)
        for row in range(rows):
            places = torch.from_numpy(self.pages[row][at // page_size] * page_size + at % page_size)
            for memory in (self.keys, self.values):
                named("kv_write", "reference")(memory, torch.randn(length, kv_heads, head_dim), places)

    def attend(self, pieces: list[tuple[int, int, int]], name: str = "tiled", window: int | None = None):
        """`pieces`: (row, start, length) computed together; returns one output per piece."""
        row, start, length = np.array(pieces).T
        layout = PagedLayout(start, length, self.pages[row], self.page_size)
        query = torch.cat([self.query[r, s : s + n] for r, s, n in pieces])
        return named("attention", name)(query, self.keys, self.values, layout, self.scale, window).split(
            length.tolist()
        )


SHAPES = [
    (9, 3, 64, 16),
    (14, 2, 64, 4),
    (4, 4, 32, 5),
    (16, 8, 128, 16),
    (4, 1, 16, 300),
    (4, 2, 256, 16),
    (2, 1, 256, 8),
]


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "page_size"), SHAPES)
def test_attention_bits_depend_on_a_tokens_own_context_alone(
    threads: None, heads: int, kv_heads: int, head_dim: int, page_size: int, window: int | None
) -> None:
    torch.manual_seed(0)
    paged = Paged(heads, kv_heads, head_dim, page_size, rows=3, length=330)
    whole = torch.stack(paged.attend([(row, 0, 330) for row in range(3)], window=window))
    exact = torch.stack(paged.attend([(row, 0, 330) for row in range(3)], "reference", window))
    assert torch.allclose(whole, exact, atol=1e-5)
    random = np.random.default_rng(1)
    for _ in range(30):
        pieces = []
        for row in random.permutation(3)[: random.integers(1, 4)]:
            start = int(random.integers(0, 330))
            length = 1 if random.random() < 0.5 else int(random.integers(1, 331 - start))
            pieces.append((int(row), start, length))
        for (row, start, length), got in zip(pieces, paged.attend(pieces, window=window), strict=True):
            assert torch.equal(got, whole[row, start : start + length]), pieces


def test_attention_is_as_exact_where_libraries_use_narrower_instructions() -> None:
    """AVX2 kernels change with the number of rows where AVX-512 ones do not; machines without either ignore this."""
    narrow = {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    chosen = "attention_bits and 2-threads and (9-3-64 or 4-2-256) and None"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", chosen]
    ran = subprocess.run(command, env={**os.environ, **narrow}, capture_output=True, text=True, check=False)
    assert ran.returncode == 0 and "2 passed" in ran.stdout, ran.stdout + ran.stderr


def test_attention_takes_calls_of_one_shape_where_no_proof_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    paged = Paged(6, 2, 16, 8, rows=3, length=150)
    pieces = [(0, 0, 150), (1, 70, 80), (2, 149, 1)]
    proven = paged.attend(pieces)
    monkeypatch.setattr(attentions, "_CHOSEN", {})
    monkeypatch.setattr(attentions, "agrees", lambda *given: False)
    shapes, multiply = set(), torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: shapes.add((a.shape, b.shape)) or multiply(a, b))
    fixed = paged.attend(pieces)
    assert shapes == {((8, 16, 16), (8, 16, 64)), ((8, 16, 64), (8, 64, 16))}
    assert all(torch.allclose(one, two, atol=1e-5) for one, two in zip(proven, fixed, strict=True))
    assert torch.equal(paged.attend([(0, 100, 1)])[0][0], fixed[0][100])


def test_the_proof_finds_products_that_depend_on_the_number_of_rows() -> None:
    class Moody(attentions.Products):
        @staticmethod
        def into(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            half = a.shape[2] // 2
            if a.shape[1] > 64:
                return out.copy_(a[:, :, :half] @ b[:, :half] + a[:, :, half:] @ b[:, half:])
            return attentions.Products.into(out, a, b)

    assert not attentions.agrees(Moody, 64, 16, 256, torch.device("cpu"))
    assert attentions.agrees(attentions.FixedProducts, 64, 16, 16, torch.device("cpu"))


def test_attention_bits_do_not_depend_on_the_page_size() -> None:
    outputs = []
    for page_size in (1, 7, 16, 64, 1000):
        torch.manual_seed(5)
        outputs.append(Paged(6, 2, 32, page_size, rows=1, length=200))
    first = outputs[0]
    for paged in outputs[1:]:
        paged.query = first.query
        assert torch.equal(paged.attend([(0, 150, 50)])[0], first.attend([(0, 150, 50)])[0])


def test_what_lies_in_pages_beyond_a_rows_end_does_not_matter() -> None:
    torch.manual_seed(0)
    paged = Paged(4, 2, 16, 8, rows=2, length=40)
    before = paged.attend([(0, 20, 1), (1, 3, 4)])
    held = set(paged.pages[0][:3].tolist()) | {int(paged.pages[1][0])}
    for page in set(range(paged.keys.shape[1])) - held:
        paged.keys[:, page] = 1e30
        paged.values[:, page] = 1e30
    assert all(torch.equal(one, two) for one, two in zip(before, paged.attend([(0, 20, 1), (1, 3, 4)]), strict=True))


def test_written_values_are_finite_whatever_comes() -> None:
    memory = torch.zeros(1, 2, 2, 2)
    new = torch.tensor([[[float("nan"), float("inf")]], [[1.0, -2.0]]])
    named("kv_write", "reference")(memory, new, torch.tensor([3, 0]))
    assert bool(torch.isfinite(memory).all())
    assert memory[0, 0, 0].tolist() == [1.0, -2.0]


def test_many_rows_are_worked_off_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    paged = Paged(4, 2, 16, 8, rows=6, length=70)
    pieces = [(row, 60, 10) for row in range(6)]
    whole = paged.attend(pieces)
    monkeypatch.setattr("leftfold.kernels.attention.SCORE_BYTES", 1)
    assert all(torch.equal(one, two) for one, two in zip(whole, paged.attend(pieces), strict=True))
