"""What the page asks for: a few paths, answered with JSON. Knows nothing of sockets, and only ever reads the log."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from leftfold.events import CodecError, Event, LogError, Record, decode
from leftfold.replay.errors import ReplayError
from leftfold.replay.ui import views
from leftfold.replay.ui.hypothetical import BadEdit, Edit, Hypothesis, admit_of
from leftfold.replay.ui.page import Answer, static_files
from leftfold.replay.worlds import OutOfRange, World

MOST_WORLDS = 6
"""Hypothetical worlds that are kept; the oldest goes."""
INSERTS = ("admit", "abort", "pause", "resume", "flush_cache", "reconfigure", "executor_lost", "shutdown")


class Wrong(Exception):
    """A question that cannot be answered, with its status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(slots=True)
class Entry:
    """A world that can be looked at. `hypothesis`: how it was made; `left`: nobody wants it any more."""

    world: World
    title: str
    hypothesis: Hypothesis | None = None
    base: int = 0
    left: bool = False


Query = Mapping[str, str]


class Api:
    """The recorded world is number 0; hypothetical ones are numbered from 1 on."""

    def __init__(self, records: Iterable[Record], name: str, expected: int = 0) -> None:
        """Raises what opening a log raises; nothing is read before `start`."""
        world, self._rest = World.of(records)
        world.expected = expected
        self.name = name
        self.entries: dict[int, Entry] = {0: Entry(world, "recorded")}
        self._numbers = 0
        self._lock = threading.Lock()
        self._static = static_files()
        self._gets: Mapping[str, Callable[[Query], Any]] = {
            "meta": self._meta, "strip": self._strip, "lanes": self._lanes, "moment": self._moment,
            "explain": self._explain, "search": self._search, "compare": self._compare, "jump": self._jump,
            "request": self._request, "differences": self._differences,
        }  # fmt: skip

    def start(self) -> threading.Thread:
        """Read the log in a thread of its own."""
        thread = threading.Thread(target=self._read, name="reads the log", daemon=True)
        thread.start()
        return thread

    def _read(self) -> None:
        world = self.entries[0].world
        try:
            for record in self._rest:
                world.take(record.event)
        except (LogError, CodecError, ReplayError) as error:
            world.error = str(error)
        world.done = True

    def answer(self, method: str, path: str, query: Query, body: bytes = b"") -> Answer:
        """`path` without a leading slash: "" is the page, `api/…` what it asks for. Raises nothing."""
        try:
            if not path.startswith("api/"):
                return self._file(method, path)
            name = path[4:]
            if name == "worlds" and method == "POST":
                return self._json(self._imagine(body))
            if name in self._gets and method == "GET":
                return self._json(self._gets[name](query))
            raise Wrong(404 if name not in (*self._gets, "worlds") else 405, f"{method} {path[:80]}: there is no such")
        except Wrong as wrong:
            return self._json({"error": str(wrong)}, wrong.status)
        except OutOfRange as error:
            return self._json({"error": str(error)}, 404)
        except ReplayError as error:
            return self._json({"error": str(error)}, 400)

    def _json(self, found: Any, status: int = 200) -> Answer:
        return Answer(status, "application/json", views.dumps(found))

    def _file(self, method: str, path: str) -> Answer:
        name = path or "index.html"
        if method != "GET":
            raise Wrong(405, f"{method}: only GET")
        if name not in self._static:
            raise Wrong(404, f"{name[:80]!r}: there is no such file")
        return Answer(200, *self._static[name])

    def _entry(self, query: Query, name: str = "world") -> Entry:
        number = _integer(query, name, 0)
        if number not in self.entries:
            raise Wrong(404, f"there is no world {number} any more")
        return self.entries[number]

    def _meta(self, query: Query) -> Any:
        entry = self._entry(query)
        worlds = [
            {"world": number, "title": one.title, "base": one.base, "done": one.world.done,
             "kept": None if one.hypothesis is None else one.hypothesis.kept}
            for number, one in list(self.entries.items())
        ]  # fmt: skip
        made_up = 0 if entry.hypothesis is None else entry.hypothesis.made_up
        return {"name": self.name, "worlds": worlds, "made_up": made_up, **views.meta(entry.world)}

    def _strip(self, query: Query) -> Any:
        return views.strip(self._entry(query).world, _integer(query, "width", 600))

    def _lanes(self, query: Query) -> Any:
        return views.lanes(self._entry(query).world, _integer(query, "first"), _integer(query, "last"))

    def _moment(self, query: Query) -> Any:
        world = self._entry(query).world
        return views.moment(world, world.moment(_integer(query, "seq"), reasons=True))

    def _life(self, world: World, query: Query) -> Any:
        number = _integer(query, "life")
        lives = world.overview.lives.all
        if not 0 <= number < len(lives):
            raise Wrong(404, f"there is no request number {number}")
        return lives[number]

    def _request(self, query: Query) -> Any:
        world = self._entry(query).world
        return views.about(world, self._life(world, query))

    def _explain(self, query: Query) -> Any:
        world = self._entry(query).world
        life = self._life(world, query)
        seq = _integer(query, "seq")
        world.check(seq)
        if seq < life.seq:
            return {"sentences": [], "outcome": [f"It arrives at record {life.seq}."], "divergence": None}
        found = world.explain(life, seq)
        return {"sentences": found.sentences(), "outcome": found.outcome, "divergence": found.divergence}

    def _search(self, query: Query) -> Any:
        return views.search(self._entry(query).world, query.get("text", "")[:200])

    def _compare(self, query: Query) -> Any:
        sides = [self._entry(query, f"{side}_world").world.moment(_integer(query, side)) for side in "ab"]
        return views.compare(*sides)

    def _jump(self, query: Query) -> Any:
        """The next or previous record of a kind: `edge` (a request's), `tick`, `loud` (neither step nor admission)."""
        world = self._entry(query).world
        seq, back = _integer(query, "seq"), query.get("back") == "1"
        what = query.get("what", "edge")
        if what == "time":
            return {"seq": world.overview.at_time(_integer(query, "t"))}
        if what == "edge":
            life = self._life(world, query)
            places = [life.seq, life.first_seq, life.end_seq, *life.preempted, *(span.seq for span in life.spans)]
            marks = sorted({at for at in places if at >= 0})
            found = [at for at in marks if at < seq] if back else [at for at in marks if at > seq]
            return {"seq": None if not found else found[-1 if back else 0]}
        if what not in ("tick", "loud"):
            raise Wrong(400, f"what={what[:40]!r}: edge, tick, loud or time")
        codes, at = world.overview.code, seq - world.first + (-1 if back else 1)
        passed = {at for at in range(len(views.NAMES)) if at != views.TICK} if what == "tick" else views.QUIET
        while 0 <= at < len(codes) and codes[at] in passed:
            at += -1 if back else 1
        return {"seq": world.first + at if 0 <= at < len(codes) else None}

    def _differences(self, query: Query) -> Any:
        entry = self._entry(query)
        if entry.hypothesis is None:
            raise Wrong(400, "the recorded world differs from nothing")
        return views.differences(entry.hypothesis.base, entry.world, entry.hypothesis.kept)

    def _imagine(self, body: bytes) -> Any:
        """Make a hypothetical world in a thread of its own; asked for: world, seq, skip or event, horizon."""
        try:
            asked = orjson.loads(body)
        except ValueError as error:
            raise Wrong(400, f"the body is no JSON: {error}") from error
        if not isinstance(asked, dict):
            raise Wrong(400, "the body is no object")
        base, seq, horizon = (_whole(asked, name, default) for name, default in
                              (("world", 0), ("seq", -1), ("horizon", 4000)))  # fmt: skip
        if base not in self.entries:
            raise Wrong(404, f"there is no world {base} any more")
        world = self.entries[base].world
        world.check(seq)
        event = None if asked.get("skip") else self._event(asked.get("event"), world, seq)
        hypothesis = Hypothesis(world, Edit(seq, event, horizon))
        return self._enter(hypothesis, base)

    def _event(self, raw: Any, world: World, seq: int) -> Event:
        if not isinstance(raw, dict) or raw.get("type") not in INSERTS:
            raise BadEdit(f"event.type is one of {', '.join(INSERTS)}")
        t = world.overview.t[seq - world.first]
        if raw["type"] == "admit":
            return admit_of(raw, world, t)
        try:
            return decode({**raw, "t": t})
        except (CodecError, TypeError, ValueError) as error:
            raise BadEdit(f"event: {error}") from error

    def _enter(self, hypothesis: Hypothesis, base: int) -> Any:
        with self._lock:
            self._numbers += 1
            entry = Entry(hypothesis.world, hypothesis.edit.text, hypothesis, base)
            self.entries[self._numbers] = entry
            number = self._numbers
            for old in [old for old in self.entries if old][:-MOST_WORLDS]:
                self.entries.pop(old).left = True
        threading.Thread(target=self._make, args=(entry,), name="makes a world", daemon=True).start()
        return {"world": number, "title": entry.title, "kept": hypothesis.kept}

    def _make(self, entry: Entry) -> None:
        assert entry.hypothesis is not None
        try:
            for _ in entry.hypothesis.run():
                if entry.left:
                    return
        except ReplayError as error:
            entry.world.error = str(error)
        except Exception as error:  # the boundary: a planner's fault is what somebody may be looking for
            entry.world.error = f"{type(error).__name__}: {error}"
        entry.world.done = True


def _whole(asked: Mapping[str, Any], name: str, default: int) -> int:
    value = asked.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise Wrong(400, f"{name} is a whole number of at least 0")
    return value


def _integer(query: Query, name: str, default: int | None = None) -> int:
    raw = query.get(name)
    if raw is None and default is not None:
        return default
    try:
        return int(raw or "")
    except ValueError:
        raise Wrong(400, f"{name}={str(raw)[:40]!r} is not a whole number") from None


__all__ = ["Api"]
