"""Causal attention of new tokens over paged keys and values.

`reference` is the definition, row by row. `tiled` is the fast plain-PyTorch version whose bits for a token depend
on nothing but that token's own context: not on the batch, the chunk it came in, the page size or the page ids.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from leftfold.kernels.registry import REGISTRY

IntArray = npt.NDArray[np.int64]

KEY_TILE = 64
"""Positions per product, and per step of a sum over values; part of the result's bits."""
QUERY_ROWS = ((8, 256), (16, 256), (16, 64), (16, 16))
"""Query rows (tokens · heads per KV head) of a product: a multiple (by padding), at most; the first proven is taken."""
FIXED_ROWS = 16
"""Query rows of a call where no proof holds."""
FIXED_BATCH = 8
"""Products per call where no proof holds."""
BATCHES = (2, 3, 5, 8, 12, 17, 33, 64)
"""Products per call that a proof looks at."""
SCORE_BYTES = 8 << 20
"""Scores held at once, about what a cache holds; a larger group of rows is worked off in parts."""


@dataclass(slots=True)
class PagedLayout:
    """Which tokens of a step attend to what. Token i of row r is number `sum(lengths[:r]) + i` of the step.

    `starts`, `lengths` [rows]: row r computes positions starts[r] … starts[r] + lengths[r] - 1. `pages`
    [rows, widest]: page ids of each row, in order of position; entries past a row's end are any valid id.
    `plans` and `scratch` are an implementation's own: what it worked out, and memory, shared by all layers (memory
    taken anew for each layer would be paged in by the system each time, which costs more than the sums).
    """

    starts: IntArray
    lengths: IntArray
    pages: IntArray
    page_size: int
    plans: dict[object, list[QueryGroup]] = field(default_factory=dict)
    scratch: dict[str, torch.Tensor] = field(default_factory=dict)

    def buffer(self, name: str, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """Memory of this shape with anything in it, valid until the next call for the same name."""
        size = math.prod(shape)
        if name not in self.scratch or self.scratch[name].numel() < size:
            self.scratch[name] = like.new_empty(size)
        return self.scratch[name][:size].view(shape)


@dataclass(frozen=True, slots=True)
class QueryGroup:
    """Equal-shaped pieces of rows that are computed together: `items` pieces of `queries` tokens over `tiles` tiles.

    `pages` [items · kv_heads · pages each]: rows of the memory seen as [kv_heads · pages, …]; `tokens` [items ·
    queries]: step-wide token numbers (padding repeats one); `blocked` [tiles, items, 1, queries, 1, KEY_TILE]: True
    where a query must not look; `keep` and `into`: places of real tokens among `items · queries` and in the step.
    """

    items: int
    queries: int
    tiles: int
    pages: torch.Tensor
    tokens: torch.Tensor
    blocked: torch.Tensor
    keep: torch.Tensor
    into: torch.Tensor


class Products:
    """Batched products a · b, [batch, rows, inner] with [batch, inner, columns], as the library makes them."""

    @staticmethod
    def into(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Into `out`, which is returned; `a` and `b` are not in its memory."""
        return torch.bmm(a, b, out=out)

    @staticmethod
    def add(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        out.baddbmm_(a, b)


class FixedProducts(Products):
    """The same in calls of the one shape [FIXED_BATCH, FIXED_ROWS, …]; rows come in multiples of `FIXED_ROWS`."""

    @staticmethod
    def into(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        for row in range(0, a.shape[1], FIXED_ROWS):
            rows = slice(row, row + FIXED_ROWS)
            for low in range(0, len(a), FIXED_BATCH):
                some = slice(low, low + FIXED_BATCH)
                missing = (0, 0, 0, 0, 0, FIXED_BATCH - len(a[some]))
                whole = torch.bmm(F.pad(a[some, rows], missing), F.pad(b[some], missing))
                out[some, rows] = whole[: len(a[some])]
        return out

    @staticmethod
    def add(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        out += FixedProducts.into(torch.empty_like(out), a, b)


Chosen = tuple[type[Products], int, int]
"""Products, and the query rows they get: a multiple, at most."""

_CHOSEN: dict[tuple[int, torch.device, int], Chosen] = {}


def products_for(head_dim: int, device: torch.device) -> Chosen:
    """Products whose sums per row do not depend on batch and rows.

    A GEMM library picks its kernel, and so the order of sums, by shape. What this attention asks of it is always a
    tile of `KEY_TILE` keys and at least 2 products; a proof, run once per head size, device and number of threads,
    says for which numbers of rows all of that agrees bitwise. Where there are none, every call gets one shape. The
    proof is by samples: it finds what a library does by shape, not what it might do otherwise.
    """
    key = (head_dim, device, torch.get_num_threads())
    if key not in _CHOSEN:
        torch.zeros(KEY_TILE, device=device).exp_()  # alone: threads that call it first together may choose differently
        proven = (rows for rows in QUERY_ROWS if agrees(Products, head_dim, *rows, device))
        rows = next(proven, None)
        _CHOSEN[key] = (Products, *rows) if rows else (FixedProducts, FIXED_ROWS, FIXED_ROWS)
    return _CHOSEN[key]


def agrees(products: type[Products], head_dim: int, step: int, widest: int, device: torch.device) -> bool:
    """Whether sampled shapes of all products of attention give each row the same bits, in steps up to `widest`."""
    generator = torch.Generator().manual_seed(0)
    most = BATCHES[-1]
    q, w = (torch.randn(most, widest, size, generator=generator).to(device) for size in (head_dim, KEY_TILE))
    k, v = (torch.randn(most, 2, KEY_TILE, head_dim, generator=generator).to(device)[:, 1] for _ in range(2))

    def made(batch: int, rows: slice) -> list[torch.Tensor]:
        a, b = q[:batch, rows].contiguous(), w[:batch, rows].contiguous()
        scores = products.into(torch.empty_like(b), a, k[:batch].transpose(1, 2))
        values = products.into(torch.empty_like(a), b, v[:batch])
        total = values.clone()
        products.add(total, b, v[:batch])
        return [scores, values, total]

    whole = made(most, slice(0, widest))
    for batch in BATCHES:
        for count in range(step, widest + 1, step) if batch in (2, 3) else {step, widest}:
            for rows in (slice(0, count), slice(widest - count, widest)):
                parts = zip(made(batch, rows), whole, strict=True)
                if not all(torch.equal(part, one[:batch, rows]) for part, one in parts):
                    return False
    return True


@REGISTRY.register("attention", "reference")
def attention_by_row(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    layout: PagedLayout,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """`query` [tokens, heads, head_dim] over `keys`, `values` [kv_heads, pages, page_size, head_dim].

    Each token sees positions up to its own (the last `window` of them, if given). Returns the shape and dtype of
    `query`; sums in float32.
    """
    result = torch.empty_like(query)
    kv_heads, head_dim = keys.shape[0], keys.shape[3]
    first = 0
    for start, length, pages in zip(layout.starts, layout.lengths, layout.pages, strict=True):
        end = int(start + length)
        held = torch.as_tensor(pages[: -(-end // layout.page_size)], device=query.device)
        k, v = (m[:, held].reshape(kv_heads, -1, head_dim)[:, :end].float() for m in (keys, values))
        q = query[first : first + length].float().transpose(0, 1).reshape(kv_heads, -1, int(length), head_dim)
        scores = torch.einsum("hgqd,hkd->hgqk", q, k) * scale
        at = torch.arange(int(start), end, device=query.device)[:, None]
        seen = torch.arange(end, device=query.device)[None, :]
        blocked = seen > at if window is None else (seen > at) | (seen <= at - window)
        weights = scores.masked_fill(blocked, float("-inf")).softmax(-1)
        out = torch.einsum("hgqk,hkd->hgqd", weights, v)
        result[first : first + length] = out.reshape(-1, int(length), head_dim).transpose(0, 1).to(query.dtype)
        first += int(length)
    return result


@REGISTRY.register("attention", "tiled")
def attention_tiled(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    layout: PagedLayout,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """As `attention_by_row`, batched over rows, with an order of sums that is fixed per token and head.

    Scores are dot products over head_dim; the maximum is exact in any order; weights and weighted values are summed
    inside tiles of `KEY_TILE` absolute positions, and the tiles one after the other from position 0. A masked
    position adds an exact zero, so neither the padding of a context nor that of a group shows in the bits. Products
    have shapes that `products_for` has found to agree.
    """
    heads, kv_heads = query.shape[1], keys.shape[0]
    products, step, widest = products_for(keys.shape[3], query.device)
    group_key = (heads // kv_heads, kv_heads, widest, window)
    if group_key not in layout.plans:
        groups = _groups(layout, heads // kv_heads, keys.shape[:2], widest, window, query.device)
        layout.plans[group_key] = list(groups)
    result = torch.empty_like(query)
    for group in layout.plans[group_key]:
        _attend(query, keys, values, layout, group, scale, products, step, result)
    return result


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    layout: PagedLayout,
    group: QueryGroup,
    scale: float,
    products: type[Products],
    step: int,
    result: torch.Tensor,
) -> None:
    kv_heads, head_dim = keys.shape[0], keys.shape[3]
    shared = query.shape[1] // kv_heads
    items, queries, tiles = group.items, group.queries, group.tiles
    batch, real = items * kv_heads, queries * shared
    padded = real + -real % step
    q = query.index_select(0, group.tokens).float().mul_(scale).view(items, queries, kv_heads, shared, head_dim)
    q = F.pad(q.permute(0, 2, 1, 3, 4).reshape(batch, real, head_dim), (0, 0, 0, padded - real))
    k, v = _gather("keys", keys, layout, group), _gather("values", values, layout, group)
    weights = layout.buffer("weights", (tiles, batch, padded, KEY_TILE), q)
    for tile in range(tiles):
        products.into(weights[tile], q, k[:, tile].transpose(1, 2))
    # Padding rows stay as they are: zeros, the products of zeros with finite keys.
    scores = weights[:, :, :real]
    scores.view(tiles, items, kv_heads, queries, shared, KEY_TILE).masked_fill_(group.blocked, float("-inf"))
    scores.sub_(scores.amax(-1, keepdim=True).amax(0)).exp_()
    by_tile = scores.sum(-1, keepdim=True)
    total, out = by_tile[0], products.into(q, weights[0], v[:, 0])
    for tile in range(1, tiles):
        total = total + by_tile[tile]
        products.add(out, weights[tile], v[:, tile])
    out = out[:, :real] / total
    flat = out.view(items, kv_heads, queries, shared, head_dim).permute(0, 2, 1, 3, 4)
    flat = flat.reshape(items * queries, kv_heads * shared, head_dim).to(query.dtype)
    result.index_copy_(0, group.into, flat.index_select(0, group.keep))


def _gather(name: str, memory: torch.Tensor, layout: PagedLayout, group: QueryGroup) -> torch.Tensor:
    """The context of each item, [items · kv_heads, tiles, KEY_TILE, head_dim] in float32, in order of position."""
    kv_heads, pages, page_size, head_dim = memory.shape
    rows = memory.view(kv_heads * pages, page_size * head_dim)
    held = layout.buffer(name, (len(group.pages), page_size * head_dim), memory)
    torch.index_select(rows, 0, group.pages, out=held)
    context = held.view(group.items * kv_heads, -1, head_dim)[:, : group.tiles * KEY_TILE]
    return context.unflatten(1, (group.tiles, KEY_TILE)).float()


def _groups(
    layout: PagedLayout,
    shared: int,
    memory: tuple[int, int],
    widest: int,
    window: int | None,
    device: torch.device,
) -> Iterator[QueryGroup]:
    """Cut rows into pieces of at most `widest` query rows; put pieces of like size and context together.

    `memory`: (kv_heads, pages) of the keys.
    """
    most = max(widest // shared, 1)
    firsts = np.concatenate(([0], np.cumsum(layout.lengths)[:-1]))
    pieces: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
    for row, (start, length, first) in enumerate(
        zip(layout.starts.tolist(), layout.lengths.tolist(), firsts.tolist(), strict=True)
    ):
        for done in range(0, length, most):
            count = min(most, length - done)
            queries = min(1 << (count - 1).bit_length(), most)
            tiles = -(-(start + done + count) // KEY_TILE)
            piece = (row, start + done, count, first + done)
            pieces.setdefault((queries, (tiles - 1).bit_length()), []).append(piece)
    for (queries, _), members in sorted(pieces.items()):
        tiles = max(-(-(start + count) // KEY_TILE) for _, start, count, _ in members)
        at_once = max(1, SCORE_BYTES // (4 * memory[0] * queries * shared * tiles * KEY_TILE))
        for low in range(0, len(members), at_once):
            some = np.array(members[low : low + at_once])
            yield _group(layout, some, queries, tiles, memory, window, device)


def _group(
    layout: PagedLayout,
    members: IntArray,
    queries: int,
    tiles: int,
    memory: tuple[int, int],
    window: int | None,
    device: torch.device,
) -> QueryGroup:
    if len(members) * memory[0] == 1:  # a call with one product alone runs on several threads, in another order
        members = np.vstack((members, members[0] * (1, 1, 0, 1)))
    row, start, count, first = members.T
    inner = np.arange(queries)
    real = inner[None, :] < count[:, None]
    # A padding query looks at position 0 alone: it must see something, and what it gets is dropped.
    positions = np.where(real, start[:, None] + inner, 0)
    tokens = np.where(real, first[:, None] + inner, first[:, None])
    seen = np.arange(tiles * KEY_TILE).reshape(tiles, 1, 1, KEY_TILE)
    at = positions[:, :, None]
    blocked = seen > at
    if window is not None:
        blocked |= seen <= at - window
    each = -(-tiles * KEY_TILE // layout.page_size)
    pages = np.zeros((len(members), each), dtype=np.int64)
    width = min(each, layout.pages.shape[1])
    pages[:, :width] = layout.pages[row, :width]
    by_head = pages[:, None, :] + np.arange(memory[0])[None, :, None] * memory[1]
    return QueryGroup(
        items=len(members),
        queries=queries,
        tiles=tiles,
        pages=torch.from_numpy(by_head.reshape(-1)).to(device),
        tokens=torch.from_numpy(tokens.reshape(-1)).to(device),
        blocked=torch.from_numpy(blocked[:, :, None, :, None, :]).to(device),
        keep=torch.from_numpy(np.flatnonzero(real)).to(device),
        into=torch.from_numpy(tokens[real]).to(device),
    )
