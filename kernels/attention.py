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
"""Positions per step of a sum over values; part of the result's bits."""
QUERY_ROWS = 256
"""Query rows (tokens · heads per KV head) of a product at most."""
MIN_QUERY_ROWS = 8
"""… and at least, by padding: below, GEMM libraries take other kernels with another order of sums."""
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

    `pages` [items · kv_heads · pages each]: rows of the memory seen as [kv_heads · pages, …]; `tokens`
    [items · queries]: step-wide token numbers (padding repeats one); `blocked` [items, 1, queries, 1, context]: True
    where a query must not look; `keep` and `into`: the places of real tokens among `items · queries` and in the step.
    """

    items: int
    queries: int
    context: int
    pages: torch.Tensor
    tokens: torch.Tensor
    blocked: torch.Tensor
    keep: torch.Tensor
    into: torch.Tensor


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
    position adds an exact zero, so neither the padding of a context nor that of a group shows in the bits.
    """
    heads, kv_heads = query.shape[1], keys.shape[0]
    group_key = (heads // kv_heads, kv_heads, window)
    if group_key not in layout.plans:
        layout.plans[group_key] = list(_groups(layout, heads // kv_heads, keys.shape[:2], window, query.device))
    result = torch.empty_like(query)
    for group in layout.plans[group_key]:
        _attend(query, keys, values, layout, group, scale, result)
    return result


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    layout: PagedLayout,
    group: QueryGroup,
    scale: float,
    result: torch.Tensor,
) -> None:
    kv_heads, head_dim = keys.shape[0], keys.shape[3]
    shared = query.shape[1] // kv_heads
    items, queries, context = group.items, group.queries, group.context
    real = queries * shared
    q = query.index_select(0, group.tokens).float().mul_(scale).view(items, queries, kv_heads, shared, head_dim)
    q = q.permute(0, 2, 1, 3, 4).reshape(items * kv_heads, real, head_dim)
    q = F.pad(q, (0, 0, 0, max(0, MIN_QUERY_ROWS - real)))
    k, v = _gather("keys", keys, layout, group), _gather("values", values, layout, group)
    weights = layout.buffer("weights", (items * kv_heads, q.shape[1], context), q)
    torch.bmm(q, k.transpose(1, 2), out=weights)
    # Padding rows stay as they are: zeros, the products of zeros with finite keys.
    scores = weights[:, :real]
    scores.view(items, kv_heads, queries, shared, context).masked_fill_(group.blocked, float("-inf"))
    scores.sub_(scores.amax(-1, keepdim=True)).exp_()
    by_tile = scores.view(items * kv_heads, real, context // KEY_TILE, KEY_TILE).sum(-1)
    total = by_tile[:, :, :1].clone()
    out = torch.bmm(weights[:, :, :KEY_TILE], v[:, :KEY_TILE])
    for tile in range(1, context // KEY_TILE):
        at = slice(tile * KEY_TILE, (tile + 1) * KEY_TILE)
        out.baddbmm_(weights[:, :, at], v[:, at])
        total += by_tile[:, :, tile : tile + 1]
    out = (out[:, :real] / total).view(items, kv_heads, queries, shared, head_dim).permute(0, 2, 1, 3, 4)
    flat = out.reshape(items * queries, kv_heads * shared, head_dim).to(query.dtype)
    result.index_copy_(0, group.into, flat.index_select(0, group.keep))


def _gather(name: str, memory: torch.Tensor, layout: PagedLayout, group: QueryGroup) -> torch.Tensor:
    """The context of each item, [items · kv_heads, context, head_dim] in float32, in order of position."""
    kv_heads, pages, page_size, head_dim = memory.shape
    rows = memory.view(kv_heads * pages, page_size * head_dim)
    held = layout.buffer(name, (len(group.pages), page_size * head_dim), memory)
    torch.index_select(rows, 0, group.pages, out=held)
    return held.view(group.items * kv_heads, -1, head_dim)[:, : group.context].float()


def _groups(
    layout: PagedLayout, shared: int, memory: tuple[int, int], window: int | None, device: torch.device
) -> Iterator[QueryGroup]:
    """Cut rows into pieces of at most `QUERY_ROWS` query rows; put pieces of like size and context together.

    `memory`: (kv_heads, pages) of the keys.
    """
    most = max(QUERY_ROWS // shared, 1)
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
        context = max(-(-(start + count) // KEY_TILE) for _, start, count, _ in members) * KEY_TILE
        at_once = max(1, SCORE_BYTES // (4 * memory[0] * queries * shared * context))
        for low in range(0, len(members), at_once):
            some = np.array(members[low : low + at_once])
            yield _group(layout, some, queries, context, memory, window, device)


def _group(
    layout: PagedLayout,
    members: IntArray,
    queries: int,
    context: int,
    memory: tuple[int, int],
    window: int | None,
    device: torch.device,
) -> QueryGroup:
    row, start, count, first = members.T
    inner = np.arange(queries)
    real = inner[None, :] < count[:, None]
    # A padding query looks at position 0 alone: it must see something, and what it gets is dropped.
    positions = np.where(real, start[:, None] + inner, 0)
    tokens = np.where(real, first[:, None] + inner, first[:, None])
    seen = np.arange(context)
    blocked = seen[None, None, :] > positions[:, :, None]
    if window is not None:
        blocked |= seen[None, None, :] <= positions[:, :, None] - window
    each = -(-context // layout.page_size)
    pages = np.zeros((len(members), each), dtype=np.int64)
    width = min(each, layout.pages.shape[1])
    pages[:, :width] = layout.pages[row, :width]
    by_head = pages[:, None, :] + np.arange(memory[0])[None, :, None] * memory[1]
    return QueryGroup(
        items=len(members),
        queries=queries,
        context=context,
        pages=torch.from_numpy(by_head.reshape(-1)).to(device),
        tokens=torch.from_numpy(tokens.reshape(-1)).to(device),
        blocked=torch.from_numpy(blocked[:, None, :, None, :]).to(device),
        keep=torch.from_numpy(np.flatnonzero(real)).to(device),
        into=torch.from_numpy(tokens[real]).to(device),
    )
