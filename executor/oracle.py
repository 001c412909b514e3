"""An executor with a toy model, whose next token is a hash of the context read back through its own page table.

Its KV memory is one token id per page slot, so an aliased, stale, unwritten or too early reused page changes what
it says, and `expected_tokens` tells what it must say. It keeps mirrors of its own, written apart from
`executor.mirrors`, and is quick enough to be driven at tens of thousands of steps per second.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from struct import Struct
from typing import Any
from zlib import crc32

import numpy as np

from leftfold.events import Control, Copy, ExecutionPlan, Joined, chain_digest
from leftfold.events.digest import START
from leftfold.executor.base import NO_TOKENS, Attachment, Result, Score, Wanted, void, wanted_of
from leftfold.executor.errors import PlanError, RowError

UNWRITTEN = -1
_MIX = 0x9E3779B1
_MASK = 0xFFFFFFFF
_INT32 = np.dtype(np.int32)
_pack = Struct("i").pack


def _next_token(context_crc: int, length: int, vocab_size: int) -> int:
    """Multiplicative mix (Fibonacci hashing) of a CRC-32 over the context's int32 ids and of its length."""
    return (((context_crc ^ length * _MIX) * _MIX & _MASK) >> 7) % vocab_size


def expected_tokens(prompt: Sequence[int], count: int, vocab_size: int, version: str = "") -> list[int]:
    """The `count` tokens that the toy model says after `prompt`, whatever the chunks, batches or pages.

    `version`: of its weights; the tokens are those of a request that sees no other.
    """
    crc = crc32(array("i", prompt), crc32(version.encode()))
    tokens: list[int] = []
    for length in range(len(prompt), len(prompt) + count):
        token = _next_token(crc, length, vocab_size)
        tokens.append(token)
        crc = crc32(_pack(token), crc)
    return tokens


def _score(context_crc: int, position: int, token: int, top: int, vocab_size: int) -> Score:
    """What the toy thinks of `token` after a context; alternatives are the token it would say and the next ids."""
    first = _next_token(context_crc, position, vocab_size)
    others = [(first + index) % vocab_size for index in range(top)]
    return Score(
        position,
        token,
        -_next_token(context_crc ^ token * _MIX & _MASK, position, 1 << 12) / 256,
        tuple((other, -float(index)) for index, other in enumerate(others)),
    )


def expected_scores(tokens: Sequence[int], first: int, top: int, vocab_size: int, version: str = "") -> list[Score]:
    """The toy's scores of `tokens[first:]` (`first` at least 1), each from the tokens before it."""
    crc = crc32(array("i", tokens[:first]), crc32(version.encode()))
    scores = []
    for position in range(first, len(tokens)):
        scores.append(_score(crc, position, tokens[position], top, vocab_size))
        crc = crc32(array("i", tokens[position : position + 1]), crc)
    return scores


class _Row:
    """A running row: its pages in order of position, tokens computed and known, and the last known token.

    `prompt`: the tokens at its join, for a row that wants their scores.
    """

    __slots__ = ("computed", "known", "last", "pages", "prompt", "wanted")

    def __init__(self, joined: Joined) -> None:
        self.wanted = wanted_of(joined)
        self.prompt: Sequence[int] = () if self.wanted is None else joined.tokens.tolist()
        self.pages = list(joined.pages)
        self.computed = joined.start
        self.known = len(joined.tokens)
        self.last = int(joined.tokens[-1])


class OracleExecutor:
    """See the module. A page that a row is granted is wiped at once: whoever still reads it is found out."""

    def __init__(self, num_pages: int, page_size: int, vocab_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.vocab_size = vocab_size
        self._blank = array("i", [UNWRITTEN]) * page_size
        self._planned_failure: tuple[str, tuple[int, ...]] | None = None
        self._weights = 0
        self.reset()

    def reset(self) -> None:
        """Forget all rows and KV content, restart the digest chain."""
        self._memory = [self._blank[:] for _ in range(self.num_pages)]
        self._rows: dict[int, _Row] = {}  # by slot, in the order they joined
        self._wanted = False
        self._digest = START
        self._last_step: int | None = None
        self._failures = 0

    def fail_next(self, text: str, rows: tuple[int, ...] = ()) -> None:
        """Let the next step fail after its deltas, as a fault of the device would."""
        self._planned_failure = (text, rows)

    def execute(self, plan: ExecutionPlan) -> Result:
        """Apply one plan. Never raises; an error without `retry` means that the plan was wrong."""
        step = plan.step
        self._digest = digest = chain_digest(self._digest, plan)
        controls: list[tuple[int, Any, str | None]] = []
        try:
            self._apply_deltas(plan)
            if plan.voids < self._failures:
                return void(plan, digest)
            if plan.plan.ops:
                controls += [self._control(op) for op in plan.plan.ops if isinstance(op, Control)]
            if self._planned_failure is not None:
                (text, rows), self._planned_failure = self._planned_failure, None
                raise RowError(text, rows)
            decoding, chunks = self._work(plan)
            tokens = self._compute(decoding, chunks)
        except RowError as error:
            self._failures += 1
            return Result(step, NO_TOKENS, digest, {"text": str(error), "retry": True, "rows": error.rows}, controls)
        except (PlanError, LookupError, ValueError) as error:
            self._failures += 1
            text = f"step {step} does not fit the oracle's mirrors: {type(error).__name__}: {error}"
            return Result(step, NO_TOKENS, digest, {"text": text, "retry": False, "rows": ()}, controls)
        attachments = self._attachments(decoding, chunks) if self._wanted else ()
        return Result(step, np.array(tokens, _INT32), digest, None, controls, attachments)

    def _attachments(self, decoding: Collection[_Row], chunks: list[tuple[_Row, array[int], bool]]) -> list[Attachment]:
        """What the rows of a step that went well want beside their tokens."""
        made = [self._attachment(row, row.wanted, 1, True) for row in decoding if row.wanted is not None]
        for row, chunk, samples in chunks:
            if row.wanted is not None:
                made.append(self._attachment(row, row.wanted, len(chunk), samples))
        return [attachment for attachment in made if attachment.scores]

    def _attachment(self, row: _Row, wanted: Wanted, length: int, samples: bool) -> Attachment:
        end, context = row.computed, b"".join(map(self._memory.__getitem__, row.pages))
        tokens = [(at, row.prompt[at]) for at in wanted.predicted(end - length, length)]
        if samples and wanted.drawn:
            tokens.append((end, row.last))
        scores = [
            _score(crc32(context[: 4 * at], self._weights), at, token, wanted.top, self.vocab_size)
            for at, token in tokens
        ]
        return Attachment(wanted.rid, wanted.epoch, wanted.choice, scores)

    def _apply_deltas(self, plan: ExecutionPlan) -> None:
        delta, rows, base = plan.plan, self._rows, plan.plan.base
        if (base is not None and base != self._last_step) or delta.width != 1:
            raise PlanError(f"base {base} (the last step was {self._last_step}) or width {delta.width}")
        self._last_step = delta.step
        for slot in plan.ended:
            del rows[slot]
        for slot in delta.preempt:
            del rows[slot]
        for joined in plan.joined:
            self._enter(joined)
        for grow in delta.grow:
            for slot, page in zip(_ints(grow.slots), _ints(grow.pages), strict=True):
                rows[slot].pages.append(page)
                self._wipe(page, 0)
        for operation in delta.ops:
            if isinstance(operation, Control):
                continue
            if not isinstance(operation, Copy):
                raise PlanError(f"the oracle does not know the operation {operation}")
            held = [self._memory[page][:] for page in operation.src]
            for page, content in zip(operation.dst, held, strict=True):
                self._memory[page][:] = content

    def _control(self, control: Control) -> tuple[int, Any, str | None]:
        """Carry out a control verb; the toy's K/V is lost in its sleep, and its weights are the name of a version."""
        if control.verb == "sleep" and "kv" in control.args["tags"]:
            self._memory = [self._blank[:] for _ in range(self.num_pages)]
        elif control.verb == "update_weights":
            if control.args["source"] == "missing":
                return control.op, None, "there are no weights at missing"
            self._weights = crc32(control.args["version"].encode())
        return control.op, {"verb": control.verb}, None

    def _enter(self, joined: Joined) -> None:
        if joined.slot in self._rows:
            raise PlanError(f"{joined.rid!r} joins slot {joined.slot}, which already holds a row")
        if not 0 <= joined.start < len(joined.tokens):
            raise PlanError(f"{joined.rid!r} joins at position {joined.start} with {len(joined.tokens)} tokens")
        self._rows[joined.slot] = row = _Row(joined)
        self._wanted = self._wanted or row.wanted is not None
        full, rest = divmod(joined.start, self.page_size)
        for page in row.pages[full:]:
            self._wipe(page, rest)
            rest = 0

    def _wipe(self, page: int, offset: int) -> None:
        if page < 0:
            raise PlanError(f"page {page} is granted; pages count from 0")
        self._memory[page][offset:] = self._blank[offset:]

    def _work(self, plan: ExecutionPlan) -> tuple[Collection[_Row], list[tuple[_Row, array[int], bool]]]:
        """The decode rows, and the chunks with their input and whether they draw; both in plan order."""
        rows, chunks = self._rows, plan.plan.chunks
        if not chunks:
            return rows.values(), []
        named = {chunk.slot for chunk in chunks}
        if len(named) != len(chunks):
            raise PlanError(f"a slot is named twice in {chunks}")
        work = []
        for chunk, tokens in zip(chunks, plan.chunk_tokens, strict=True):
            row = rows[chunk.slot]
            if chunk.length != len(tokens) or row.computed + chunk.length > row.known:
                known = row.known - row.computed
                raise PlanError(f"slot {chunk.slot} computes {chunk.length} of {known} tokens, given {len(tokens)}")
            if chunk.length:
                work.append((row, array("i", np.asarray(tokens, dtype=np.intc).tobytes()), chunk.samples))
        return [row for slot, row in rows.items() if slot not in named], work

    def _compute(self, decoding: Collection[_Row], chunks: list[tuple[_Row, array[int], bool]]) -> list[int]:
        """Write every row's input, then read every context back; rows advance only when all went well."""
        memory, size = self._memory, self.page_size
        for row in decoding:
            at = row.computed
            if row.known - at != 1:
                raise PlanError(f"a row decodes with {row.known - at} tokens to compute; it needs a chunk")
            memory[row.pages[at // size]][at % size] = row.last
        for row, chunk, _ in chunks:
            self._write(row, chunk)
        read, vocab_size, page_of, weights = _next_token, self.vocab_size, memory.__getitem__, self._weights
        tokens = []
        for row in decoding:
            known = row.known
            tokens.append(read(crc32(b"".join(map(page_of, row.pages))[: 4 * known], weights), known, vocab_size))
        for row, chunk, samples in chunks:
            if samples:
                end = row.computed + len(chunk)
                tokens.append(read(crc32(b"".join(map(page_of, row.pages))[: 4 * end], weights), end, vocab_size))
        # The writes above have already failed for a row that lacks a page, so every context was read in full.
        drawn = iter(tokens)
        for row in decoding:
            row.computed += 1
            row.known += 1
            row.last = next(drawn)
        for row, chunk, samples in chunks:
            row.computed += len(chunk)
            if samples:
                row.known += 1
                row.last = next(drawn)
        return tokens

    def _write(self, row: _Row, chunk: array[int]) -> None:
        size, position, done = self.page_size, row.computed, 0
        while done < len(chunk):
            offset = position % size
            part = chunk[done : done + size - offset]
            self._memory[row.pages[position // size]][offset : offset + len(part)] = part
            position += len(part)
            done += len(part)


def _ints(values: Sequence[int] | np.ndarray) -> Sequence[int]:
    return values.tolist() if isinstance(values, np.ndarray) else values
