"""Make a log as small as it can be and still show what is wrong, and write that as a regression test.

Delta debugging (Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input", 2002) over the log's items
(see `rerun`), then over prompts, lengths and settings. Every candidate is run by the planner that is here, so what is
left over can really happen.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from leftfold.events import Admit, Event, Started, Tick, encode
from leftfold.fsm import ConfigError
from leftfold.replay.checkout import Checkout
from leftfold.replay.errors import NotStarted, ReplayError
from leftfold.replay.fuzzing.shrink import smaller
from leftfold.replay.rerun import Found, Item, Outcome, OutOfTime, Predicate, plain_params, rerun

KINDS = ("violation", "divergence", "predicate")


class NothingFound(ReplayError):
    """The log's inputs do not show what is looked for."""


@dataclass(frozen=True, slots=True)
class Shrunk:
    """The smallest list of events found. `kind`, `text`: what it shows; `tries`: runs it took."""

    kind: str
    text: str
    events: list[Event]
    before: int
    tries: int


def shrink(
    items: Sequence[Item],
    kind: str,
    *,
    other: Checkout | None = None,
    predicate: Predicate | None = None,
    go_on: Callable[[], bool] = lambda: True,
) -> Shrunk:
    """Shrink `items` to what still shows a violation, a divergence from `other`, or what `predicate` (of the events)
    says is there. `go_on`, asked before each item of each run, says whether there is time left: what is smallest by
    then is the answer. Raises `NothingFound`, also when not even the whole list could be run in the time.
    """
    return _Shrinker(list(items), kind, other, predicate, go_on).shrink()


class _Shrinker:
    def __init__(
        self, items: list[Item], kind: str, other: Checkout | None, predicate: Predicate | None,
        go_on: Callable[[], bool],
    ) -> None:  # fmt: skip
        self.items = items
        self.kind = kind
        self.other = other
        self.predicate = predicate
        self.go_on = go_on
        self.tries = 0

    def shrink(self) -> Shrunk:
        before = len(self.items)
        try:
            self.best = self._run(self.items)
        except OutOfTime as error:
            text = f"{error.at} of the log's {before} records could be run again in the time given"
            raise NothingFound(f"{text}, and show no {self.kind}: give it more") from None
        found = self.best.found
        if found is None:
            raise NothingFound(f"run again, the log's {before} records show no {self.kind}")
        self.looked_for = found.kind
        self.items = self.items[: found.item + 1]
        try:
            weight = -1
            while weight != (weight := len(repr(self.items))):
                self._cut()
                self._simplify()
        except OutOfTime:
            pass
        assert self.best.found is not None
        return Shrunk(self.best.found.kind, self.best.found.text, self._written(), before, self.tries)

    def _run(self, items: Sequence[Item]) -> Outcome:
        outcome = rerun(items, self.other if self.kind == "divergence" else None, self.go_on)
        found = outcome.found
        if found is not None and (found.kind.startswith("divergence") != (self.kind == "divergence")):
            found = None
        if self.kind == "predicate":
            assert self.predicate is not None
            said = self.predicate(outcome.events)
            found = Found("predicate", f"the predicate says {said!r}", len(items) - 1) if said else None
        return Outcome(outcome.events, found)

    def _try(self, items: list[Item]) -> bool:
        self.tries += 1
        try:
            outcome = self._run(items)
        except (NotStarted, ConfigError, ValueError):
            return False
        if outcome.found is None or outcome.found.kind != self.looked_for:
            return False
        self.best, self.items = outcome, items[: outcome.found.item + 1]
        return True

    def _cut(self) -> None:
        """Drop stretches of items, longer ones first; then each request with all its neighbours in time kept."""
        length = len(self.items) // 2
        while length:
            at = 1  # the first item makes the state
            while at < len(self.items):
                if not self._try(self.items[:at] + self.items[at + length :]):
                    at += length
            length //= 2

    def _simplify(self) -> None:
        at = 0
        while at < len(self.items):
            while at < len(self.items) and any(self._replace(at, event) for event in _simpler(self.items[at].event)):
                pass
            at += 1

    def _replace(self, at: int, event: Event) -> bool:
        same = encode(event) == encode(self.items[at].event)
        return not same and self._try([*self.items[:at], Item(self.items[at].t, event), *self.items[at + 1 :]])

    def _written(self) -> list[Event]:
        """The events as a test needs them: decisions that are not to be judged are made anew there."""
        events = list(self.best.events)
        if self.kind == "divergence":
            return events
        return [Tick(t=event.t) if isinstance(event, Tick) else event for event in events]


def _listed(prompt: Any) -> Any:
    """Token ids as a list; what is none stays as it is."""
    if isinstance(prompt, np.ndarray):
        return prompt.tolist()
    return list(prompt) if isinstance(prompt, tuple) else prompt


def _simpler(event: Event) -> Iterator[Event]:
    if isinstance(event, Admit):
        yield replace(event, params=plain_params(event.params), want=None)
        for less in smaller(_listed(event.prompt)):
            yield replace(event, prompt=less)
        for tokens in smaller(event.params.max_tokens):
            yield replace(event, params=replace(event.params, max_tokens=tokens))
    elif isinstance(event, Started) and event.config is not None:
        yield replace(event, model="", code="", wall_ns=0)
        for name, value in event.config.items():
            for less in smaller(value):
                yield replace(event, config={**event.config, name: less})


# The test


def name_of(shrunk: Shrunk) -> str:
    """Equal findings have equal names."""
    mark = blake2b(b"\n".join(encode(event) for event in shrunk.events), digest_size=4).hexdigest()
    kind = re.sub(r"(?<=[a-z])(?=[A-Z])|[^A-Za-z0-9]+", "_", shrunk.kind).lower()
    return f"test_{kind}_{mark}"


def source_of(shrunk: Shrunk, predicate: str | None = None) -> str:
    """A self-contained module of one test, which fails as long as the fault is there."""
    lines = "\n".join(encode(event).decode() for event in shrunk.events)
    said = " ".join(shrunk.text.split())[:200].replace("\\", "\\\\").replace('"', "'")
    head = f'"""Shrunk from a log of {shrunk.before} records: {said}"""  # noqa: E501\n\n'
    quoted = lines.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    records = f'RECORDS = """\n{quoted}\n"""  # noqa: E501\n\n\n'
    if predicate is not None:
        module, _, function = predicate.partition(":")
        imports = f"from {module} import {function}\n\nfrom leftfold.replay.regression import events_of\n\n"
        body = f"    assert not {function}(events_of(RECORDS))\n"
    else:
        imports, body = "from leftfold.replay.regression import refold\n\n", "    refold(RECORDS)\n"
    return f"{head}{imports}{records}def {name_of(shrunk)}() -> None:\n{body}"


def write_test(shrunk: Shrunk, directory: Path, predicate: str | None = None) -> Path:
    """Write the test into `directory` (made if need be) and say where it is."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name_of(shrunk)}.py"
    path.write_text(source_of(shrunk, predicate))
    return path


__all__ = ["KINDS", "NothingFound", "Shrunk", "name_of", "shrink", "source_of", "write_test"]
