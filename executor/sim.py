"""An executor on virtual time: it applies plans to mirrors of its own and says how long they would have taken.

Its tokens come from a `Tape` of what was said before, or are made up, or (by default) come from a toy model whose K/V
at a position is a hash of everything up to it: then a row that is given wrong pages says something else. Values beside
tokens (`Joined.want`) are not made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from leftfold.events import Control, Copy, ExecutionPlan, Joined, chain_digest
from leftfold.events.digest import START
from leftfold.executor.base import NO_TOKENS, Result, void
from leftfold.executor.cost import CostModel, Work
from leftfold.executor.errors import PlanError, RowError

IntArray = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

Key = tuple[str, int, int]
"""A row: rid, epoch, choice."""

FREE = CostModel({"step": 1.0}, "every step takes 1 µs")
MADE_UP = 1 << 30
"""Made-up tokens are at least this, so that they are in nobody's prompt."""

_MIX = 0x9E3779B97F4A7C15  # odd, hence invertible modulo 2**64
_UNMIX = pow(_MIX, -1, 1 << 64)
_WRAP = (1 << 64) - 1


class Speech(Enum):
    """Where tokens come from when there is no tape. `TOY`: from what stands in the pages; `MADE_UP`: from nowhere."""

    TOY = "toy"
    MADE_UP = "made up"


class Tape:
    """What rows are to say: `said[key]` are the tokens after the prompt. Rows without an entry get made-up ones."""

    def __init__(self, said: Mapping[Key, Sequence[int] | npt.NDArray[np.int32]]) -> None:
        self.starts: dict[Key, int] = {}
        parts: list[npt.NDArray[np.int64]] = []
        at = 0
        for key, tokens in said.items():
            self.starts[key] = at
            parts.append(np.asarray(tokens, dtype=np.int64))
            at += len(parts[-1])
        self.tokens = np.concatenate([*parts, np.zeros(1, np.int64)])


class SimExecutor:
    """See the module. `cost`: what a step takes; after each `execute`, `took` is that in µs and `work` why.

    `busy`: µs of all steps so far. `attest` False leaves the digest as the plan has it, where nothing can be lost.
    Positions a row may compute are bounded by its pages alone. Columns grow with the slots seen.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        cost: CostModel = FREE,
        *,
        vocab_size: int = MADE_UP,
        speech: Speech = Speech.TOY,
        tape: Tape | None = None,
        attest: bool = True,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.cost = cost
        self.vocab_size = vocab_size
        self.attest = attest
        self.took = 0
        self.busy = 0
        self.work = Work()
        self._tape = tape
        self._toy = speech is Speech.TOY and tape is None
        self._planned_failure: tuple[str, tuple[int, ...]] | None = None
        self._weights = 0
        self.reset()

    def reset(self) -> None:
        """Forget all rows and K/V content, restart the digest chain."""
        self._memory: Hashes = np.zeros(self.num_pages * self.page_size if self._toy else 0, np.uint64)
        self._held: IntArray = np.zeros(0, np.int64)  # positions that a row's pages hold
        self._computed: IntArray = np.zeros(0, np.int64)
        self._known: IntArray = np.zeros(0, np.int64)
        self._offset: IntArray = np.zeros(0, np.int64)  # the token at position p: tape[offset + p], or offset + p
        self._last: IntArray = np.zeros(0, np.int64)
        self._pages: dict[int, list[int]] = {}  # by slot, in the order they joined
        self._order: IntArray | None = None
        self._digest = START
        self._last_step: int | None = None
        self._failures = 0

    def fail_next(self, text: str, rows: tuple[int, ...] = ()) -> None:
        """Let the next step fail after its deltas, as a fault of the device would."""
        self._planned_failure = (text, rows)

    def execute(self, plan: ExecutionPlan) -> Result:
        """Apply one plan. Never raises; an error without `retry` means that the plan was wrong."""
        self._digest = digest = chain_digest(self._digest, plan) if self.attest else plan.digest
        self.work, self.took = Work(), 0
        controls: list[tuple[int, Any, str | None]] = []
        try:
            self._apply_deltas(plan)
            if plan.voids < self._failures:
                return void(plan, digest)
            controls += [self._control(op) for op in plan.ops if isinstance(op, Control)]
            if self._planned_failure is not None:
                (text, rows), self._planned_failure = self._planned_failure, None
                raise RowError(text, rows)
            tokens = self._compute(plan)
        except RowError as error:
            self._failures += 1
            told = {"text": str(error), "retry": True, "rows": error.rows}
            return Result(plan.step, NO_TOKENS, digest, told, controls)
        except (PlanError, LookupError, ValueError) as error:
            self._failures += 1
            text = f"step {plan.step} does not fit the simulator's mirrors: {type(error).__name__}: {error}"
            return Result(plan.step, NO_TOKENS, digest, {"text": text, "retry": False, "rows": ()}, controls)
        finally:
            self.took = self.cost.micros(self.work)
            self.busy += self.took
        return Result(plan.step, tokens, digest, None, controls)

    # Deltas

    def _apply_deltas(self, plan: ExecutionPlan) -> None:
        delta = plan.plan
        if delta.base not in (None, self._last_step) or delta.width != 1:
            raise PlanError(f"base {delta.base} (the last step was {self._last_step}) or width {delta.width}")
        self._last_step = delta.step
        if plan.ended or delta.preempt or plan.joined:
            self._order = None
        for slot in (*plan.ended, *delta.preempt):
            del self._pages[slot]
        for joined in plan.joined:
            self._enter(joined)
        for grow in delta.grow:
            self._grow(_ints(grow.slots), _ints(grow.pages))
        for operation in delta.ops:
            if isinstance(operation, Copy):
                self._copy(operation)
            elif not isinstance(operation, Control):
                raise PlanError(f"the simulator does not know the operation {operation}")

    def _enter(self, joined: Joined) -> None:
        slot, count = joined.slot, len(joined.tokens)
        if slot in self._pages:
            raise PlanError(f"{joined.rid!r} joins slot {slot}, which already holds a row")
        if not 0 <= joined.start < count:
            raise PlanError(f"{joined.rid!r} joins at position {joined.start} with {count} tokens")
        self._check_pages(joined.pages)
        self._widen(slot + 1)
        self._pages[slot] = list(joined.pages)
        self._held[slot] = len(joined.pages) * self.page_size
        self._computed[slot] = joined.start
        self._known[slot] = count
        self._last[slot] = joined.tokens[-1]
        self._offset[slot] = self._speaks(joined)

    def _speaks(self, joined: Joined) -> int:
        """Where what this row says begins: on the tape, or (from `MADE_UP` on) in the air."""
        key = (joined.rid, joined.epoch, joined.choice)
        if self._tape is not None and key in self._tape.starts:
            return self._tape.starts[key] - joined.prompt_len
        return MADE_UP + hash_of(key) % (MADE_UP - (1 << 24))

    def _check_pages(self, pages: Sequence[int]) -> None:
        if len(pages) and not (0 <= min(pages) and max(pages) < self.num_pages):
            raise PlanError(f"pages {list(pages)} are granted; there are pages 0 to {self.num_pages - 1}")

    def _grow(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        self._check_pages(pages)
        for slot, page in zip(slots, pages, strict=True):
            self._pages[slot].append(page)
            self._held[slot] += self.page_size

    def _copy(self, operation: Copy) -> None:
        if self._toy:
            memory = self._memory.reshape(self.num_pages, self.page_size)
            memory[list(operation.dst)] = memory[list(operation.src)]

    def _control(self, control: Control) -> tuple[int, Any, str | None]:
        """Every verb takes no time; K/V is lost in its sleep, other weights say other things."""
        if control.verb == "sleep" and "kv" in control.args["tags"]:
            self._memory[:] = 0
        elif control.verb == "update_weights":
            self._weights = hash_of((control.args["version"], 0, 0))
        return control.op, {"verb": control.verb}, None

    def _widen(self, slots: int) -> None:
        short = slots - len(self._held)
        if short > 0:
            short = max(short, len(self._held))
            for name in ("_held", "_computed", "_known", "_offset", "_last"):
                setattr(self, name, np.pad(getattr(self, name), (0, short)))

    # Rows

    def _compute(self, plan: ExecutionPlan) -> npt.NDArray[np.int32]:
        decode, chunks = self._decode_rows(plan), []
        computed = self._computed[decode]
        if (computed >= self._held[decode]).any() or (self._known[decode] - computed != 1).any():
            raise PlanError("a row decodes past its pages, or has more than one token to compute; it needs a chunk")
        work = Work(len(decode), int(computed.sum()) + len(decode))
        for (slot, length, samples), tokens in zip(plan.plan.chunks, plan.chunk_tokens, strict=True):
            start = int(self._computed[slot])
            if slot not in self._pages:
                raise PlanError(f"slot {slot} computes, but holds no row")
            if length != len(tokens) or start + length > min(self._known[slot], self._held[slot]):
                raise PlanError(f"slot {slot} computes {length} tokens from {start}, given {len(tokens)}")
            if length:
                chunks.append((slot, start, tokens, samples))
                work = work.chunk(start, length)
        self.work = work
        sampling = [slot for slot, _, _, samples in chunks if samples]
        drawing = np.concatenate((decode, np.array(sampling, np.int64))) if sampling else decode
        if self._toy:
            drawn = self._toy_tokens(decode, chunks)
        else:
            drawn = self._said(drawing, self._known[drawing])
        self._computed[decode] += 1
        for slot, start, tokens, _ in chunks:
            self._computed[slot] = start + len(tokens)
        self._known[drawing] += 1
        self._last[drawing] = drawn
        return drawn.astype(np.int32)

    def _decode_rows(self, plan: ExecutionPlan) -> IntArray:
        if self._order is None:
            self._order = np.fromiter(self._pages, np.int64, len(self._pages))
        if not plan.plan.chunks:
            return self._order
        named = [chunk.slot for chunk in plan.plan.chunks]
        if len(set(named)) != len(named) or min(named) < 0 or max(named) >= len(self._held):
            raise PlanError(f"slots {named} are no different rows")
        absent = np.zeros(len(self._held), np.bool_)
        absent[named] = True
        return self._order[~absent[self._order]]

    def _said(self, slots: IntArray, positions: IntArray) -> IntArray:
        at = self._offset[slots] + positions
        if self._tape is None:
            return at
        taped = at < len(self._tape.tokens)
        return np.where(taped, self._tape.tokens[np.where(taped, at, 0)], at)

    # The toy: K/V at a position is h(p) = h(p - 1) · MIX + token + 1, modulo 2**64

    def _toy_tokens(self, decode: IntArray, chunks: Sequence[tuple[int, int, Any, bool]]) -> IntArray:
        tokens = []
        for slot in decode.tolist():
            value = self._write(slot, int(self._computed[slot]), self._last[slot : slot + 1])
            tokens.append(self._token(value))
        for slot, start, given, samples in chunks:
            value = self._write(slot, start, given)
            if samples:
                tokens.append(self._token(value))
        return np.array(tokens, np.int64)

    def _write(self, slot: int, start: int, tokens: npt.NDArray[Any]) -> int:
        """Write the K/V of `tokens` from position `start` on; that of the last of them."""
        pages, size = np.asarray(self._pages[slot], np.int64), self.page_size
        before = 0
        if start:
            before = int(self._memory[pages[(start - 1) // size] * size + (start - 1) % size])
        count = len(tokens)
        with np.errstate(over="ignore"):
            powers = np.cumprod(np.full(count, _MIX, np.uint64))
            unmixed = np.cumprod(np.full(count, _UNMIX, np.uint64))
            sums = np.cumsum((tokens.astype(np.int64).astype(np.uint64) + np.uint64(1)) * unmixed)
            values = powers * (np.uint64(before) + sums)
        positions = np.arange(start, start + count)
        self._memory[pages[positions // size] * size + positions % size] = values
        return int(values[-1])

    def _token(self, value: int) -> int:
        mixed = (value ^ self._weights ^ value >> 29) * _MIX & _WRAP
        return (mixed >> 31) % self.vocab_size


def hash_of(key: Key) -> int:
    """31 bits that depend on nothing but the key."""
    return crc32(f"{key[0]}\n{key[1]}\n{key[2]}".encode()) >> 1


def _ints(values: Sequence[int] | IntArray) -> Sequence[int]:
    return values.tolist() if isinstance(values, np.ndarray) else values


__all__ = ["FREE", "MADE_UP", "SimExecutor", "Speech", "Tape"]
