"""The file beside the log that says which answers can be read again, and holds those that have ended.

JSON lines, for the owner's eyes alone: {"open": terms}, {"end": id, "at": seconds since 1970, "choices": […]},
{"drop": id}. Tokens of what has not ended are the log's. A line that cannot be read is passed over: the last one may
have been cut off. Lines of answers that are not kept any more are left out at a start, and before that once they are
many.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from leftfold.events.stores import sync_folder
from leftfold.server.choices import Choice
from leftfold.server.kept import Kept, Terms
from leftfold.server.wire import Output
from leftfold.server.workers import Workers

NAME = "answers.jsonl"
_DEAD_BYTES = 2**26
"""With so many bytes of lines that nobody needs, and more of them than of others, the file is written anew."""
_log = logging.getLogger("leftfold.server")


class AnswerFile:
    """Appends in a thread, many lines at a time. `durable`: a line that was waited for is on disk, not only written."""

    def __init__(self, path: Path, durable: bool, seconds: float) -> None:
        self._path = path
        self._durable = durable
        self._seconds = seconds
        self._workers = Workers("answers", count=1, most=2**20)
        self._pending: list[tuple[str, bytes]] = []
        self._writing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._places: dict[str, list[tuple[int, int]]] = {}  # of what is kept: offset and length of its lines
        self._known = True  # whether all lines that are needed have their places
        self._size = self._live = 0
        self._dead_most = _DEAD_BYTES
        self._failing = False
        self._fd = -1

    async def opened(self, terms: Terms) -> None:
        """Returns once the answer's terms are in the file (or it is known that they cannot be)."""
        self._places[terms.id] = []
        await asyncio.shield(self._later(terms.id, _line({"open": terms.to_dict()})))

    def ended(self, kept: Kept, at: float) -> None:
        """What has come of an answer; nobody waits for that."""
        self._later(kept.terms.id, _end_line(kept.terms, kept.group.choices, at))

    def dropped(self, name: str) -> None:
        """It is not to be found by the next process."""
        self._later("", _line({"drop": name}))
        self.forgotten(name)

    def forgotten(self, name: str) -> None:
        """It was kept long enough; its lines may stay or go."""
        self._live -= sum(length for _, length in self._places.pop(name, ()))

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
        """The file holds these and nothing else."""
        lines = []
        for terms, choices, at in kept:
            lines.append((terms.id, _line({"open": terms.to_dict()})))
            if at is not None:
                lines.append((terms.id, _end_line(terms, choices, at)))
        try:
            self._replace(line for _, line in lines)
            self._sync_name()
        except OSError as error:
            self._known = False
            self._report(error)
        else:
            self._places = {terms.id: [] for terms, _, _ in kept}
            self._note(0, lines)

    def _replace(self, lines: Iterable[bytes]) -> None:
        beside = self._path.with_suffix(".new")
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, self._path)

    def _sync_name(self) -> None:
        if self._durable:
            sync_folder(self._path.parent)

    def _note(self, at: int, lines: Iterable[tuple[str, bytes]]) -> None:
        """These lines were written from offset `at` on."""
        for name, line in lines:
            if name in self._places:
                self._places[name].append((at, len(line)))
                self._live += len(line)
            at += len(line)
        self._size = at

    def _later(self, name: str, line: bytes) -> asyncio.Task[None]:
        """In a task of its own, since it writes for others as well: whoever waits for it may be gone before it ends."""
        self._pending.append((name, line))
        task = asyncio.create_task(self._write())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _write(self) -> None:
        """Writes what waits; whoever comes meanwhile waits for the next turn and goes with all the others then."""
        async with self._writing:
            lines, self._pending = self._pending, []
            if not lines:
                return
            try:
                self._note(await self._workers.run(lambda: self._append(b"".join(line for _, line in lines))), lines)
                self._failing = False
                await self._compact_if_due()
            except OSError as error:
                self._report(error)

    def _append(self, data: bytes) -> int:
        """The offset it begins at. What cannot be written whole is not there at all: no later line hangs on to it."""
        if self._fd < 0:
            self._fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        at = os.fstat(self._fd).st_size
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError:
            os.ftruncate(self._fd, at)
            raise
        if self._durable:
            os.fsync(self._fd)
        return at

    async def _compact_if_due(self) -> None:
        dead = self._size - self._live
        if not self._known or dead <= max(self._dead_most, self._live):
            return
        self._dead_most = 2 * dead  # should it fail
        kept = sorted((place, name) for name, places in self._places.items() for place in places)
        await self._workers.run(lambda: self._copy([place for place, _ in kept]))
        self._dead_most = _DEAD_BYTES
        self._places = {name: [] for name in self._places}
        self._size = 0
        for (_, length), name in kept:
            if name in self._places:  # else it was forgotten meanwhile
                self._places[name].append((self._size, length))
            self._size += length
        await self._workers.run(self._sync_name)  # last: if it fails the file has its new lines and places all the same

    def _copy(self, places: Sequence[tuple[int, int]]) -> None:
        self._replace(os.pread(self._fd, length, at) for at, length in places)
        os.close(self._fd)
        self._fd = -1

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


def _line(data: Mapping[str, Any]) -> bytes:
    return orjson.dumps(data) + b"\n"


def _end_line(terms: Terms, choices: Sequence[Choice], at: float) -> bytes:
    return _line({"end": terms.id, "at": at, "choices": [_plain(choice) for choice in choices]})


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
