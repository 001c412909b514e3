"""Public trace formats as jobs. What kind a file is, it says itself; prompts are made when they are needed.

* Mooncake JSONL: `timestamp` (ms), `input_length`, `output_length`, `hash_ids` (blocks of 512 tokens).
* Azure LLM inference CSV: TIMESTAMP, ContextTokens, GeneratedTokens.
* Requests with token ids (LLMServingSim, ShareGPT): `input_toks`, `output_toks`, `arrival_time_ns`, `input_tok_ids`;
  without ids, and with `queued_ts` (seconds), as a measured run writes them.
* ShareGPT JSON: `conversations` of turns; the first question, and the length of its answer.
* Agent sessions JSON (a file, or a folder of them): each request comes after the one before it has ended.
* OpenAI batch JSONL: `body` with a prompt or messages; all at once, or at `rate`.

Where a trace holds text, four bytes count as a token. Where it does not say what prompts share, they share nothing.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from leftfold.replay.simulating.jobs import Job, TraceError, block_prompt, drawn_prompt, job, text_prompt

MOONCAKE_BLOCK = 512
BATCH_TOKENS = 256
"""Output tokens of a batch line that does not say."""


@dataclass(frozen=True, slots=True)
class Trace:
    """`jobs` in order of arrival; `kind`: the format."""

    kind: str
    jobs: list[Job]

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and answer."""
        return max((one.prompt_tokens + one.output_tokens for one in self.jobs), default=1)


def read_trace(path: str | Path, limit: int | None = None, seed: int = 0, rate: float | None = None) -> Trace:
    """The first `limit` requests of a trace. `rate`: arrivals per second, drawn anew from `seed` (Poisson).

    Raises `TraceError`.
    """
    path = Path(path)
    try:
        kind, jobs = _read(path, limit, seed)
    except (OSError, UnicodeDecodeError, orjson.JSONDecodeError, csv.Error) as error:
        raise TraceError(f"{path}: {error}") from error
    if not jobs:
        raise TraceError(f"{path}: no request in it")
    if rate is not None:
        gaps = np.random.default_rng((seed, len(jobs))).exponential(1e6 / rate, len(jobs))
        jobs = [
            one if one.after is not None else replace(one, t=int(t)) for one, t in zip(jobs, gaps.cumsum(), strict=True)
        ]
    first = min(one.t for one in jobs if one.after is None)
    jobs = [one if one.after is not None else replace(one, t=one.t - first) for one in jobs]
    return Trace(kind, sorted(jobs, key=lambda one: one.t if one.after is None else 1 << 62))


def _read(path: Path, limit: int | None, seed: int) -> tuple[str, list[Job]]:
    if path.is_dir():
        files = sorted(path.glob("*.json"))
        if not files:
            raise TraceError(f"{path}: a folder without *.json files")
        made = [job for number, file in enumerate(files) for job in _sessions(file, number)]
        return "agent sessions", made[:limit]
    with path.open("rb") as file:
        head = file.read(1 << 16).lstrip()
    if head.startswith(b"TIMESTAMP"):
        return "azure", list(islice(_azure(path, seed), limit))
    if not head.startswith((b"{", b"[")):
        raise TraceError(f"{path}: neither JSON nor a CSV that begins with TIMESTAMP")
    first = head.partition(b"\n")[0]
    if head.startswith(b"[") or b'"hash_id_scope"' in first or b'"requests"' in first or not _is_object(first):
        whole = orjson.loads(path.read_bytes())
        if isinstance(whole, list):
            return "sharegpt", list(islice(_conversations(path, whole), limit))
        return "agent sessions", list(_sessions(path, 0))[:limit]
    kind, make = _line_kind(path, orjson.loads(first))
    return kind, list(islice(_lines(path, make, seed), limit))


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(orjson.loads(line), dict)
    except orjson.JSONDecodeError:
        return False


_Make = Callable[[Mapping[str, Any], int, int], Job]


def _line_kind(path: Path, first: Mapping[str, Any]) -> tuple[str, _Make]:
    if "hash_ids" in first and "input_length" in first:
        return "mooncake", _mooncake
    if "input_toks" in first and "output_toks" in first:
        return "token ids" if "input_tok_ids" in first else "measured", _sized
    if "conversations" in first:
        return "sharegpt", lambda raw, number, seed: _conversation(raw, number)
    if "body" in first:
        return "openai batch", _batch
    raise TraceError(f"{path}, line 1: fields {', '.join(first)} are of no known format")


def _lines(path: Path, make: _Make, seed: int) -> Iterator[Job]:
    with path.open("rb") as file:
        for number, line in enumerate(file):
            if not line.strip():
                continue
            try:
                yield make(orjson.loads(line), number, seed)
            except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
                raise TraceError(f"{path}, line {number + 1}: {type(error).__name__}: {error}") from error


def _size(value: Any, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{value!r} is not a number of tokens of at least {least}")
    return value


def _mooncake(raw: Mapping[str, Any], number: int, seed: int) -> Job:
    length = _size(raw["input_length"])
    blocks = np.array(raw["hash_ids"], np.int32)
    prompt = partial(block_prompt, blocks, MOONCAKE_BLOCK, length)
    if len(blocks) * MOONCAKE_BLOCK < length:
        raise ValueError(f"{len(blocks)} hash_ids are too few for {length} tokens")
    return job(f"m{number}", int(raw["timestamp"]) * 1000, prompt, length, max(1, _size(raw["output_length"], 0)))


def _sized(raw: Mapping[str, Any], number: int, seed: int) -> Job:
    length = _size(raw["input_toks"])
    at = raw["arrival_time_ns"] // 1000 if "arrival_time_ns" in raw else round(float(raw["queued_ts"]) * 1e6)
    ids = raw.get("input_tok_ids")
    tokens = None if ids is None else np.array(ids, np.int32)
    if tokens is not None and len(tokens) != length:
        raise ValueError(f"input_toks is {length}, but there are {len(tokens)} ids")
    prompt = partial(drawn_prompt, seed, number, length) if tokens is None else tokens.copy
    rid = str(raw.get("request_id", f"r{number}"))
    return job(rid, at, prompt, length, max(1, _size(raw["output_toks"], 0)))


def _azure(path: Path, seed: int) -> Iterator[Job]:
    with path.open(newline="") as file:
        for number, row in enumerate(csv.DictReader(file)):
            try:
                whole, _, fraction = row["TIMESTAMP"].strip().partition(".")
                stamp = datetime.fromisoformat(whole + "+00:00").timestamp()
                at = int(stamp) * 1_000_000 + int((fraction + "000000")[:6])
                length = _size(int(row["ContextTokens"]))
                output = max(1, _size(int(row["GeneratedTokens"]), 0))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise TraceError(f"{path}, line {number + 2}: {type(error).__name__}: {error}") from error
            yield job(f"a{number}", at, partial(drawn_prompt, seed, number, length), length, output)


def _conversations(path: Path, whole: list[Any]) -> Iterator[Job]:
    for number, raw in enumerate(whole):
        try:
            yield _conversation(raw, number)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise TraceError(f"{path}, conversation {number}: {type(error).__name__}: {error}") from error


def _conversation(raw: Mapping[str, Any], number: int) -> Job:
    asked, answered = [turn["value"] for turn in raw["conversations"][:2]]
    prompt = text_prompt(asked or " ")
    return job(str(raw.get("id", f"s{number}")), 0, prompt.copy, len(prompt), max(1, len(text_prompt(answered))))


def _batch(raw: Mapping[str, Any], number: int, seed: int) -> Job:
    body = raw["body"]
    prompt = body["prompt"] if "prompt" in body else "\n".join(_said(message) for message in body["messages"])
    tokens = np.array(prompt, np.int32) if isinstance(prompt, list) else text_prompt(str(prompt) or " ")
    most = body.get("max_completion_tokens") or body.get("max_tokens") or BATCH_TOKENS
    return job(str(raw.get("custom_id", f"b{number}")), 0, tokens.copy, len(tokens), _size(most))


def _said(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content)
    return f"{message['role']}: {content}"


def _sessions(path: Path, number: int) -> Iterator[Job]:
    """A session's requests, each after the one before it; block numbers mean something within the session alone."""
    raw = orjson.loads(path.read_bytes())
    try:
        name, size = str(raw.get("id", path.stem)), _size(raw["block_size"])
        base = 0 if raw.get("hash_id_scope") == "global" else (number + 1) << 16
        before: Mapping[str, Any] | None = None
        for index, one in enumerate(raw["requests"]):
            if "in" not in one:
                continue  # a sub-agent's summary, without a request of its own
            length, blocks = _size(one["in"]), np.array(one["hash_ids"], np.int64) + base
            prompt = partial(block_prompt, blocks, size, length)
            if not len(blocks):  # shorter than a block: shared with nobody
                prompt = partial(drawn_prompt, number, index, length)
            after = None if before is None else f"{name}/{before['index']}"
            gap = _pause(before, one) if before is not None else float(one["t"])
            yield job(f"{name}/{index}", round(gap * 1e6), prompt, length, max(1, _size(one["out"], 0)), after)
            before = {**one, "index": index}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TraceError(f"{path}: {type(error).__name__}: {error}") from error


def _pause(before: Mapping[str, Any], one: Mapping[str, Any]) -> float:
    """Seconds between the end of a request and the next one: as recorded, else what is left of their distance."""
    if one.get("think_time") is not None:
        return max(0.0, float(one["think_time"]))
    return max(0.0, float(one["t"]) - float(before["t"]) - float(before.get("api_time") or 0.0))


__all__ = ["Trace", "read_trace"]
