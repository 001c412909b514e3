"""A log as two tables, for whoever wants to plot: one row a request (each choice by itself), one row a step."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from leftfold.events import Event, ForwardDone, Plan, Tick
from leftfold.fsm import Effects, State
from leftfold.replay.errors import ReplayError
from leftfold.replay.snapshots import Log, whole

REQUESTS = (
    "rid", "epoch", "choice", "tenant", "priority", "admitted_us", "joined_us", "first_token_us", "finished_us",
    "prompt_tokens", "cached_tokens", "output_tokens", "preemptions", "finish_reason", "error",
)  # fmt: skip
"""`*_us`: µs since the first `Started`; empty for what has not happened (or had before the log begins)."""

STEPS = (
    "step", "incarnation", "seq", "planned_us", "done_us", "rows", "prefill_rows", "prefill_tokens", "sampled",
    "joined", "preempted", "waiting", "pages_free", "pages_cached", "failed",
)  # fmt: skip
"""`waiting` and pages: after the step was planned. `failed`: whether its result was an error (empty: never came)."""

BATCH = 65_536

Key = tuple[str, int, int]
Row = dict[str, Any]


class ExportError(ReplayError):
    """The tables cannot be written in this form here."""


def export(log: Log, out: Path, form: str = "csv") -> dict[str, Any]:
    """Write `requests` and `steps` into the folder `out`, as CSV or Parquet; how many rows each has, and `first_seq`,
    the record that they begin with (1 unless the log's beginning was removed).

    Requests that still live are rows, too. What is there already is replaced when both are whole. Raises `ExportError`,
    `LogError`, `ReplayError`, `OSError`.
    """
    make = {"csv": _Csv, "parquet": _parquet}[form]
    out.mkdir(parents=True, exist_ok=True)
    with _replacing(out / f"requests.{form}") as one, _replacing(out / f"steps.{form}") as other:
        with make(one, REQUESTS) as requests, make(other, STEPS) as steps:
            tables = _Tables()
            for name, row in tables.rows(log):
                (requests if name == "requests" else steps).write(row)
    return {"requests": requests.count, "steps": steps.count, "first_seq": tables.first_seq, "out": str(out)}


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A file beside `path` that takes its place if all goes well, and is removed otherwise."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


class _Tables:
    """Follows a fold and gives each row once it is complete."""

    def __init__(self) -> None:
        self._requests: dict[Key, Row] = {}
        self._steps: dict[int, Row] = {}
        self.first_seq = 1

    def rows(self, log: Log) -> Iterator[tuple[str, Row]]:
        fold, records = whole(log)
        self.first_seq = fold.seq + 1
        if fold.state is not None:
            self._adopt(fold.state)
        for record in records:
            effects = fold.take(record.seq, record.event)
            assert fold.state is not None
            yield from self._take(record.seq, record.event, effects, fold.state)
        yield from (("steps", row) for row in self._steps.values())
        yield from (("requests", row) for row in self._requests.values())

    def _adopt(self, state: State) -> None:
        """What lived already where the fold begins."""
        for request in state.live.values():
            row = self._begin(request, None)
            row["output_tokens"] = state.known(request) - request.prompt_len

    def _begin(self, request: Any, t: int | None) -> Row:
        row: Row = dict.fromkeys(REQUESTS)
        names = ("rid", "epoch", "choice", "tenant", "priority")
        row.update({name: getattr(request, name) for name in names})
        row.update(admitted_us=t, prompt_tokens=request.prompt_len, output_tokens=0, preemptions=request.preemptions)
        self._requests[request.key] = row
        return row

    def _take(self, seq: int, event: Event, effects: Effects, state: State) -> Iterator[tuple[str, Row]]:
        t = event.t
        for request in state.by_rid.get(getattr(event, "rid", None) or "", ()):
            if request.key not in self._requests:
                self._begin(request, t)
        if isinstance(event, Tick) and event.plan is not None:
            self._planned(seq, t, event.plan, effects, state)
        elif isinstance(event, ForwardDone) and event.step in self._steps:
            row = self._steps.pop(event.step)
            row.update(done_us=t, failed=event.error is not None)
            yield "steps", row
        for output in effects.outputs:
            yield from self._told(output, t)

    def _planned(self, seq: int, t: int, plan: Plan, effects: Effects, state: State) -> None:
        for join in plan.join:
            row = self._requests.get((join.rid, join.epoch, join.choice))
            if row is not None and row["joined_us"] is None:
                row.update(joined_us=t, cached_tokens=join.start)
        if effects.plan is None:
            return
        for request in state.waiting if plan.preempt else ():
            if request.preemptions and request.key in self._requests:
                self._requests[request.key]["preemptions"] = request.preemptions
        stats, chunks = state.stats(), [chunk for chunk in plan.chunks if chunk.length]
        flight = state.in_flight[-1].rows
        self._steps[effects.plan.step] = {
            "step": effects.plan.step, "incarnation": state.incarnation, "seq": seq, "planned_us": t, "done_us": None,
            "rows": len(flight.decode) + len(chunks), "prefill_rows": len(chunks),
            "prefill_tokens": sum(chunk.length for chunk in chunks),
            "sampled": len(flight.decode) + sum(chunk.samples for chunk in chunks), "joined": len(plan.join),
            "preempted": len(plan.preempt), "waiting": stats["waiting"], "pages_free": stats["pages_free"],
            "pages_cached": stats["pages_cached"], "failed": None,
        }  # fmt: skip

    def _told(self, output: Any, t: int) -> Iterator[tuple[str, Row]]:
        key = (output.rid, output.epoch, output.choice)
        row = self._requests.get(key)
        if row is None:  # refused: it never lived
            row = dict.fromkeys(REQUESTS)
            row.update(zip(("rid", "epoch", "choice"), key, strict=True), admitted_us=t, output_tokens=0, preemptions=0)
        if len(output.tokens):
            row["output_tokens"] += len(output.tokens)
            if row["first_token_us"] is None and row["admitted_us"] is not None:
                row["first_token_us"] = t
        if output.finish_reason is not None:
            self._requests.pop(key, None)
            error = None if output.error is None else output.error["text"]
            row.update(finished_us=t, finish_reason=output.finish_reason.value, error=error)
            yield "requests", row


class _Csv:
    """A CSV file with a header; empty for what is not there."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        self.count = 0
        self._file = path.open("w", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(self._file, names)
        self._writer.writeheader()

    def write(self, row: Row) -> None:
        self._writer.writerow(row)
        self.count += 1

    def __enter__(self) -> _Csv:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()


def _parquet(path: Path, names: Sequence[str]) -> Any:
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise ExportError("--format parquet needs pyarrow: pip install 'leftfold[export]'") from error

    kinds = {
        "rid": pyarrow.string(), "tenant": pyarrow.string(), "finish_reason": pyarrow.string(),
        "error": pyarrow.string(), "failed": pyarrow.bool_(),
    }  # fmt: skip
    schema = pyarrow.schema([(name, kinds.get(name, pyarrow.int64())) for name in names])

    class Parquet:
        def __init__(self) -> None:
            self.count = 0
            self._rows: list[Row] = []
            self._writer = parquet.ParquetWriter(path, schema)

        def write(self, row: Row) -> None:
            self._rows.append(row)
            self.count += 1
            if len(self._rows) == BATCH:
                self._flush()

        def _flush(self) -> None:
            self._writer.write_table(pyarrow.Table.from_pylist(self._rows, schema))
            self._rows = []

        def __enter__(self) -> Parquet:
            return self

        def __exit__(self, *exc: object) -> None:
            if self._rows:
                self._flush()
            self._writer.close()

    return Parquet()


__all__ = ["REQUESTS", "STEPS", "ExportError", "export"]
