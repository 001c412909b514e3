"""Which requests of a log an id means: one's own, or that of the answer which the HTTP API gave for them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import orjson

from leftfold.events import LogReader
from leftfold.replay.walking import opened

_ANSWER = re.compile(r"(?:chatcmpl-|cmpl-|resp_)?(.+)", re.DOTALL)
"""An answer's id: a prefix that says what kind of answer it is, and what its requests' ids begin with."""

SHOWN = 5


class Named(NamedTuple):
    """`rids`: the ids of the requests that are meant, in the order they came; `known`: all that the log has."""

    rids: list[str]
    known: list[str]

    def others(self) -> str:
        """What could have been asked for instead."""
        if not self.known:
            return "it holds no request"
        newest = ", ".join(repr(rid) for rid in self.known[-SHOWN:])
        if len(self.known) <= SHOWN:
            return f"it holds {newest}"
        return f"it holds {len(self.known)} ids, the newest of them {newest} (leftfold log cat has all)"


def named(log: LogReader, asked: str) -> Named:
    """The requests that `asked` names: by their id, else by the id of an answer (`chatcmpl-BASE`, `cmpl-BASE`,
    `resp_BASE`, or BASE alone), of which each prompt and choice is the request `BASE-NUMBER`.

    Raises a `LogError` for damage.
    """
    known = list(dict.fromkeys(_ids(log)))
    match = _ANSWER.fullmatch(asked)
    base = match[1] if match else asked
    return Named([asked] if asked in known else [rid for rid in known if _is_of(rid, base)], known)


def _is_of(rid: str, base: str) -> bool:
    before, dash, number = rid.rpartition("-")
    return rid == base or (before == base and dash == "-" and number.isdecimal())


def _ids(log: LogReader) -> Iterator[str]:
    """Of requests that were there when the log begins, and of those that came."""
    if log.first_seq > 1:
        state = opened(log)[0].state
        if state is not None:
            yield from state.requests
    for line in log.lines():
        if b'"type":"admit"' in line[:120]:
            rid = orjson.loads(line).get("rid")
            if isinstance(rid, str):
                yield rid


__all__ = ["Named", "named"]
