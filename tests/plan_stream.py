"""Make execution plans by hand: a stream that keeps the digest chain, and a driver that serves prompts with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from leftfold.events import Chunk, ExecutionPlan, Grow, Join, Joined, Plan, Row, RowSource, SamplingParams
from leftfold.events.digest import START, digest_of
from leftfold.executor.base import Executor, Result


class NoRows(RowSource):
    """A hand-made plan has no rows to ask for: executors work from the deltas alone."""

    def rows(self) -> Sequence[Row]:
        raise AssertionError("an executor must keep its own mirrors")


class PlanStream:
    """Turns deltas into `ExecutionPlan`s with rising step numbers and chained digests."""

    def __init__(self) -> None:
        self.step = 0
        self.restart()

    def restart(self) -> None:
        self.digest = START
        self.voids = 0

    def failed(self) -> None:
        """From now on plans know of one more failed step."""
        self.voids += 1

    def plan(self, *, ended=(), preempt=(), joined=(), chunks=(), chunk_tokens=(), grow=(), **fields) -> ExecutionPlan:
        self.step += 1
        delta = Plan(
            step=self.step,
            join=tuple(Join(j.slot, j.rid, j.choice, j.start, (list(j.pages),)) for j in joined),
            preempt=tuple(preempt),
            chunks=tuple(Chunk(*chunk) for chunk in chunks),
            grow=(Grow(*grow),) if grow else (),
            **fields,
        )
        tokens = [np.asarray(part, dtype=np.int32) for part in chunk_tokens]
        self.digest = digest_of(self.digest, delta, tuple(ended), tuple(joined), tokens, self.voids)
        return ExecutionPlan(
            plan=delta,
            ended=tuple(ended),
            joined=tuple(joined),
            chunk_tokens=tokens,
            digest=self.digest,
            source=NoRows(),
            voids=self.voids,
        )


def joined(
    slot: int, tokens: Sequence[int], pages: Sequence[int], *, rid="r", start=0, prompt_len=None, params=None, want=None
):
    """A `Joined` with sensible defaults: choice 0, greedy."""
    return Joined(
        slot=slot,
        rid=rid,
        choice=0,
        start=start,
        prompt_len=len(tokens) if prompt_len is None else prompt_len,
        tokens=np.asarray(tokens, dtype=np.int32),
        pages=list(pages),
        params=params or SamplingParams(temperature=0.0),
        want=want,
    )


@dataclass
class Running:
    """One row as the driver sees it."""

    slot: int
    tokens: list[int]
    prompt_len: int
    max_tokens: int
    params: SamplingParams
    want: dict | None = None
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    present: bool = False


class Driver:
    """Serves prompts on an executor by hand-made plans: joins all, prefills in chunks beside decode rows, ends rows.

    `chunk`: tokens of one row's chunk at most. `free`: page ids, taken from the end.
    """

    def __init__(self, executor: Executor, num_pages: int, page_size: int, chunk: int = 1 << 30) -> None:
        self.executor = executor
        self.stream = PlanStream()
        self.page_size = page_size
        self.chunk = chunk
        self.free = list(range(num_pages))
        self.rows: list[Running] = []
        self._ended: list[int] = []
        self._preempted: list[int] = []

    def add(self, slot: int, prompt: Sequence[int], max_tokens: int, params=None, want=None) -> Running:
        row = Running(slot, list(prompt), len(prompt), max_tokens, params or SamplingParams(temperature=0.0), want)
        self.rows.append(row)
        return row

    def preempt(self, row: Running) -> None:
        """Take the row's pages away at the next step; it joins again in the same plan and recomputes."""
        self.free = row.pages + self.free
        row.pages, row.computed, row.present = [], 0, False
        self._preempted.append(row.slot)
        self.rows.remove(row)
        self.rows.append(row)

    def step(self) -> Result:
        """Plan and execute one step with every row in it; rows that reached `max_tokens` leave at the next one."""
        joins, grow, chunks, inputs = [], ([], []), [], []
        decoding = [row for row in self.rows if row.present and len(row.tokens) - row.computed == 1]
        others = [row for row in self.rows if row not in decoding]
        for row in [*decoding, *others]:
            length = min(len(row.tokens) - row.computed, self.chunk)
            new = []
            while (len(row.pages) + len(new)) * self.page_size < row.computed + length:
                new.append(self.free.pop())
            if not row.present:
                known = {"prompt_len": row.prompt_len, "params": row.params, "rid": f"r{row.slot}", "want": row.want}
                joins.append(joined(row.slot, row.tokens, new, **known))
                row.present = True
            else:
                grow[0].extend([row.slot] * len(new))
                grow[1].extend(new)
            row.pages += new
            if row not in decoding:
                chunks.append((row.slot, length, row.computed + length == len(row.tokens)))
                inputs.append(row.tokens[row.computed : row.computed + length])
        plan = self.stream.plan(
            ended=sorted(self._ended),
            preempt=self._preempted,
            joined=joins,
            chunks=chunks,
            chunk_tokens=inputs,
            grow=grow if grow[0] else (),
        )
        self._ended, self._preempted = [], []
        result = self.executor.execute(plan)
        assert result.digest == plan.digest
        if result.error is None:
            self._take([*decoding, *others], result)
        return result

    def _take(self, order: list[Running], result: Result) -> None:
        drawn = iter(result.tokens.tolist())
        for row in order:
            row.computed += min(len(row.tokens) - row.computed, self.chunk)
            if row.computed == len(row.tokens):
                row.tokens.append(next(drawn))
                if len(row.tokens) - row.prompt_len >= row.max_tokens:
                    self.rows.remove(row)
                    self._ended.append(row.slot)
                    self.free = row.pages + self.free
        assert next(drawn, None) is None

    def run(self) -> None:
        """Step until no row is left."""
        while self.rows:
            result = self.step()
            assert result.error is None, result.error


def generate(executor: Executor, prompt, max_tokens, *, num_pages, page_size, chunk=1 << 30, params=None) -> list[int]:
    """The tokens that one request gets alone, from a fresh start."""
    executor.reset()
    driver = Driver(executor, num_pages, page_size, chunk)
    row = driver.add(0, prompt, max_tokens, params)
    driver.run()
    return row.tokens[row.prompt_len :]
