"""The file beside the log that says which answers can be read again, and holds those that have ended.

JSON lines, for the owner's eyes alone: {"open": terms}, {"end": id, "at": seconds since 1970, "choices": […]},
{"drop": id}. Tokens of what has not ended are the log's. A line that cannot be read is passed over: the last one may
have been cut off.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from leftfold.server.choices import Choice
from leftfold.server.kept import Kept, Terms
from leftfold.server.wire import Output
from leftfold.server.workers import Workers

NAME = "answers.jsonl"
_COMPACT_BYTES = 2**26
_log = logging.getLogger("leftfold.server")


class AnswerFile:
    """Appends in a thread, many lines at a time. `durable`: a line that was waited for is on disk, not only written."""

    def __init__(self, path: Path, durable: bool, seconds: float) -> None:
        self._path = path
        self._durable = durable
        self._seconds = seconds
        self._workers = Workers("answers", count=1, most=2**20)
        self._pending: list[bytes] = []
        self._writing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._bytes = 0
        self._failing = False
        self._fd = -1

    async def opened(self, terms: Terms) -> None:
        """Returns once the answer's terms are in the file (or it is known that they cannot be)."""
        self._pending.append(orjson.dumps({"open": terms.to_dict()}) + b"\n")
        await self._write()

    def ended(self, kept: Kept, at: float) -> None:
        """What has come of an answer; nobody waits for that."""
        self._later({"end": kept.terms.id, "at": at, "choices": [_plain(choice) for choice in kept.group.choices]})

    def dropped(self, name: str) -> None:
        self._later({"drop": name})

    async def close(self) -> None:
        """Everything that was said is in the file."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read(self, now: float) -> list[tuple[Terms, list[Choice], float | None]]:
        """The answers that are still kept: terms, choices, and when they ended; the file is rewritten to hold these."""
        found: dict[str, tuple[Terms, list[Choice], float | None]] = {}
        for line in self._path.read_bytes().splitlines() if self._path.exists() else ():
            try:
                _take(found, orjson.loads(line))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                _log.warning("%s: a line that cannot be read was passed over: %s", self._path, str(error)[:200])
        kept = [one for one in found.values() if one[2] is None or one[2] > now - self._seconds]
        self._rewrite(kept)
        return kept

    def _rewrite(self, kept: Sequence[tuple[Terms, list[Choice], float | None]]) -> None:
        beside = self._path.with_suffix(".new")
        lines = []
        for terms, choices, at in kept:
            lines.append(orjson.dumps({"open": terms.to_dict()}) + b"\n")
            if at is not None:
                lines.append(orjson.dumps({"end": terms.id, "at": at, "choices": [_plain(c) for c in choices]}) + b"\n")
        try:
            with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
                file.writelines(lines)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, self._path)
        except OSError as error:
            self._report(error)

    def _later(self, data: Mapping[str, Any]) -> None:
        self._pending.append(orjson.dumps(data) + b"\n")
        task = asyncio.create_task(self._write())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write(self) -> None:
        """Writes what waits; whoever comes meanwhile waits for the next turn and goes with all the others then."""
        async with self._writing:
            lines, self._pending = self._pending, []
            if not lines:
                return
            try:
                await self._workers.run(lambda: self._append(b"".join(lines)))
            except OSError as error:
                self._report(error)
            else:
                self._failing = False

    def _append(self, data: bytes) -> None:
        if self._fd < 0:
            self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        while data:
            data = data[os.write(self._fd, data) :]
        if self._durable:
            os.fsync(self._fd)

    def _report(self, error: OSError) -> None:
        if not self._failing:
            _log.error("%s cannot be written; a restart may not find all answers: %s", self._path, error)
        self._failing = True


def _take(found: dict[str, tuple[Terms, list[Choice], float | None]], data: Mapping[str, Any]) -> None:
    if "open" in data:
        terms = Terms(**data["open"])
        rids = [f"{terms.base}-{i}" for i in range(len(terms.prompts) * terms.n)]
        choices = [Choice(rid, terms.prompts[i // terms.n]) for i, rid in enumerate(rids)]
        found[terms.id] = (terms, choices, None)
    elif "drop" in data:
        found.pop(data["drop"], None)
    elif data["end"] in found:
        terms, choices, _ = found[data["end"]]
        for choice, plain in zip(choices, data["choices"], strict=True):
            _fill(choice, plain)
        found[terms.id] = (terms, choices, float(data["at"]))


def _plain(choice: Choice) -> dict[str, Any]:
    end = choice.end
    told = {} if end is None else {"reason": end.finish_reason, "error": end.error, "usage": end.usage}
    return {"tokens": choice.tokens.tolist(), "version": choice.version, **told}


def _fill(choice: Choice, plain: Mapping[str, Any]) -> None:
    choice.tokens.extend(plain["tokens"])
    choice.version = plain["version"]
    reason = plain.get("reason") or "abort"
    choice.end = Output(choice.rid, 0, choice.expected, [], reason, plain.get("error"), plain.get("usage"))


__all__ = ["NAME", "AnswerFile"]
