"""The executor's own view of running rows, in numpy columns by slot, fed by nothing but execution plans."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from leftfold.events import ExecutionPlan, Joined, SamplingParams
from leftfold.executor.base import Wanted, wanted_of
from leftfold.executor.errors import PlanError

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one step in plan order, columns [rows].

    `starts`, `lengths`: positions computed; `samples` (bool): whether the row draws a token; `tokens` (int64): input
    ids of all rows, one row after the other; `positions` (int64): their absolute positions.
    """

    slots: IntArray
    starts: IntArray
    lengths: IntArray
    samples: npt.NDArray[np.bool_]
    tokens: IntArray
    positions: IntArray


class DeviceState:
    """Mirrors per slot: page table, computed length, token history, parameters; and the row set in join order.

    `apply_deltas` takes a plan's deltas, `lay_out` says what to compute, `commit` takes the drawn tokens. Until then
    no row advances, so a step that failed in between can be planned again. Columns grow with the slots and lengths
    seen. `wanted`: the scores that rows want, for those that do.
    """

    def __init__(self, num_pages: int, page_size: int, slots: int = 0) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.reset()
        self._widen_slots(slots)

    def reset(self) -> None:
        """Forget everything."""
        self.table = np.zeros((0, 1), dtype=np.int64)
        self.history = np.zeros((0, self.page_size), dtype=np.int32)
        self.held = np.zeros(0, dtype=np.int64)
        self.computed = np.zeros(0, dtype=np.int64)
        self.known = np.zeros(0, dtype=np.int64)
        self.prompt_len = np.zeros(0, dtype=np.int64)
        self.params: dict[int, SamplingParams] = {}
        self.choices: dict[int, int] = {}
        self.wanted: dict[int, Wanted] = {}
        self._order: dict[int, None] = {}
        self._order_column: IntArray | None = None
        self._last_step: int | None = None

    @property
    def row_set(self) -> tuple[int, ...]:
        """Slots that hold a row, in the order they joined."""
        return tuple(self._order)

    def apply_deltas(self, plan: ExecutionPlan) -> None:
        """Apply ended, preempt, join and grow. Raises `PlanError` for what cannot be."""
        base = plan.plan.base
        if base is not None and base != self._last_step:
            raise PlanError(f"step {plan.step} starts from step {base}, but the last one here was {self._last_step}")
        self._last_step = plan.step
        for slot in plan.ended:
            self._leave(slot, "ends")
        for slot in plan.preempt:
            self._leave(slot, "preempts")
        for row in plan.joined:
            self._enter(row)
        if len(plan.grow) > 1:
            raise PlanError(f"step {plan.step} grows {len(plan.grow)} groups; this executor has one")
        for grow in plan.grow:
            self._grow(np.asarray(grow.slots, dtype=np.int64), np.asarray(grow.pages, dtype=np.int64))

    def commit(self, rows: StepRows, tokens: npt.NDArray[np.int32]) -> None:
        """Advance the rows by what was computed; `tokens` (one per sampling row) enter their histories."""
        self.computed[rows.slots] += rows.lengths
        drawn = rows.slots[rows.samples]
        if len(drawn):
            at = self.known[drawn]
            self._widen_history(int(at.max()) + 1)
            self.history[drawn, at] = tokens
            self.known[drawn] = at + 1

    def _leave(self, slot: int, verb: str) -> None:
        if slot not in self._order:
            raise PlanError(f"the plan {verb} slot {slot}, which holds no row")
        del self._order[slot], self.params[slot], self.choices[slot]
        self.wanted.pop(slot, None)
        self._order_column = None

    def _enter(self, row: Joined) -> None:
        slot, count, pages = row.slot, len(row.tokens), len(row.pages)
        if slot in self._order:
            raise PlanError(f"{row.rid!r} joins slot {slot}, which already holds a row")
        if not 0 <= row.start < count:
            raise PlanError(f"{row.rid!r} joins at position {row.start} with {count} tokens; at least one is computed")
        self._check_pages(np.asarray(row.pages, dtype=np.int64))
        self._widen_slots(slot + 1)
        self._widen_history(count)
        self._widen_table(pages)
        self.table[slot, :pages] = row.pages
        self.held[slot] = pages
        self.history[slot, :count] = row.tokens
        self.known[slot] = count
        self.computed[slot] = row.start
        self.prompt_len[slot] = row.prompt_len
        self.params[slot] = row.params
        self.choices[slot] = row.choice
        if (wanted := wanted_of(row)) is not None:
            self.wanted[slot] = wanted
        self._order[slot] = None
        self._order_column = None

    def _grow(self, slots: IntArray, pages: IntArray) -> None:
        if len(slots) != len(pages):
            raise PlanError(f"the plan grows {len(slots)} slots by {len(pages)} pages")
        if not len(slots):
            return
        self._check_pages(pages)
        strangers = [slot for slot in slots.tolist() if slot not in self._order]
        if strangers:
            raise PlanError(f"the plan grows slot {strangers[0]}, which holds no row")
        if len(set(slots.tolist())) == len(slots):
            at = self.held[slots]
            self._widen_table(int(at.max()) + 1)
            self.table[slots, at] = pages
            self.held[slots] = at + 1
        else:  # one slot takes several pages: one after the other
            for slot, page in zip(slots.tolist(), pages.tolist(), strict=True):
                self._grow(np.array([slot]), np.array([page]))

    def _check_pages(self, pages: IntArray) -> None:
        if len(pages) and not (0 <= pages.min() and pages.max() < self.num_pages):
            raise PlanError(f"the plan grants pages {pages.tolist()}; there are pages 0 to {self.num_pages - 1}")

    def lay_out(self, plan: ExecutionPlan) -> StepRows:
        """The rows to compute, after the plan's deltas. Raises `PlanError` for what cannot be."""
        chunks = plan.chunks
        named = [chunk.slot for chunk in chunks]
        if len(set(named)) != len(named):
            raise PlanError(f"step {plan.step} names a slot twice in its chunks: {named}")
        for slot in named:
            if slot not in self._order:
                raise PlanError(f"step {plan.step} computes slot {slot}, which holds no row")
        decode = self._decode_rows(named, plan.plan.width)
        working = [(c, tokens) for c, tokens in zip(chunks, plan.chunk_tokens, strict=True) if c.length > 0]
        for chunk, tokens in working:
            if len(tokens) != chunk.length:
                raise PlanError(f"the chunk of slot {chunk.slot} computes {chunk.length} tokens, given {len(tokens)}")
        slots = np.concatenate((decode, np.array([chunk.slot for chunk, _ in working], dtype=np.int64)))
        lengths = np.concatenate((np.ones_like(decode), np.array([c.length for c, _ in working], dtype=np.int64)))
        sampling = np.array([chunk.samples for chunk, _ in working], dtype=np.bool_)
        starts = self.computed[slots]
        self._check_room(slots, starts + lengths)
        inputs = [self.history[decode, self.computed[decode]], *(tokens for _, tokens in working)]
        firsts = np.repeat(np.cumsum(lengths) - lengths, lengths)
        return StepRows(
            slots=slots,
            starts=starts,
            lengths=lengths,
            samples=np.concatenate((np.ones(len(decode), dtype=np.bool_), sampling)),
            tokens=np.concatenate(inputs).astype(np.int64),
            positions=np.repeat(starts, lengths) + np.arange(len(firsts)) - firsts,
        )

    def _decode_rows(self, named: list[int], width: int) -> IntArray:
        if self._order_column is None:
            self._order_column = np.fromiter(self._order, dtype=np.int64, count=len(self._order))
        rows = self._order_column
        if named:
            rows = rows[~np.isin(rows, named)]
        if len(rows) and width != 1:
            raise PlanError(f"decode rows of width {width} are not supported; this executor computes one token each")
        behind = rows[self.known[rows] - self.computed[rows] != 1]
        if len(behind):
            slot = int(behind[0])
            left = int(self.known[slot] - self.computed[slot])
            raise PlanError(f"slot {slot} decodes with {left} tokens to compute; it needs a chunk")
        return rows

    def _check_room(self, slots: IntArray, ends: IntArray) -> None:
        short = np.flatnonzero(self.held[slots] * self.page_size < ends)
        if len(short):
            slot, end = int(slots[short[0]]), int(ends[short[0]])
            raise PlanError(f"slot {slot} computes up to position {end} with {int(self.held[slot])} pages")
        over = np.flatnonzero(self.known[slots] < ends)
        if len(over):
            slot, end = int(slots[over[0]]), int(ends[over[0]])
            raise PlanError(f"slot {slot} computes up to position {end} of {int(self.known[slot])} known tokens")

    def _widen_slots(self, slots: int) -> None:
        short = slots - len(self.held)
        if short > 0:
            short = max(short, len(self.held))
            for name in ("held", "computed", "known", "prompt_len"):
                setattr(self, name, np.pad(getattr(self, name), (0, short)))
            self.table = np.pad(self.table, ((0, short), (0, 0)))
            self.history = np.pad(self.history, ((0, short), (0, 0)))

    def _widen_table(self, pages: int) -> None:
        short = pages - self.table.shape[1]
        if short > 0:
            self.table = np.pad(self.table, ((0, 0), (0, max(short, self.table.shape[1]))))

    def _widen_history(self, tokens: int) -> None:
        short = tokens - self.history.shape[1]
        if short > 0:
            self.history = np.pad(self.history, ((0, 0), (0, max(short, self.history.shape[1]))))
