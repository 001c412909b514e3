"""Two logs beside each other: the first record that differs, requests that were served otherwise, the states."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import orjson

from leftfold.events import Record, encode
from leftfold.replay.fold import Fold
from leftfold.replay.show import snapshot
from leftfold.replay.walking import walk

UNTOLD = ("crc", "seq", "wall_ns", "code")
"""What says nothing about what an engine did."""


@dataclass(frozen=True, slots=True)
class Served:
    """What one choice got: its tokens and why it ended ("" if it did not)."""

    tokens: tuple[int, ...] = ()
    reason: str = ""


Key = tuple[str, int, int]


def diff(a: Iterable[Record], b: Iterable[Record], at: int | None = None, times: bool = False) -> dict[str, Any]:
    """What differs, as plain data; `equal` says whether nothing does.

    `record`: the first record (by place) of which more than the time differs (`times`: that as well), with both.
    `requests`: by id, what differs in what was said. `state`: figures that differ after the last record (or after
    record `at` of both). Raises what folding raises.
    """
    sides = [_Side(a, at), _Side(b, at)]
    record = None
    for one, other in zip_longest(*(side.run(times) for side in sides)):
        if record is None and one != other:
            record = {"seq": (one or other or {}).get("seq"), "a": one, "b": other, "fields": _fields(one, other)}
    states = [snapshot(side.fold) if side.fold.state is not None else {} for side in sides]
    requests = _requests(sides[0].served, sides[1].served)
    figures = {
        name: [states[0].get(name), states[1].get(name)]
        for name in {**states[0], **states[1]}
        if name not in ("t", "seq", "requests", "controls") and states[0].get(name) != states[1].get(name)
    }
    digests = [None if side.fold.state is None else side.fold.state.digest() for side in sides]
    return {
        "equal": record is None and not requests and not figures,
        "records": [side.count for side in sides],
        "record": record,
        "requests": requests,
        "state": figures,
        "digests": digests,
    }


class _Side:
    def __init__(self, records: Iterable[Record], at: int | None) -> None:
        self.records = records
        self.at = at
        self.fold = Fold()
        self.served: dict[Key, Served] = {}
        self.count = 0

    def run(self, times: bool) -> Iterator[dict[str, Any]]:
        """The records as plain data, less what says nothing; what they lead to is noted beside."""
        for (seq, event), effects, state in walk(self.records, self.at):
            self.count += 1
            self.fold.state, self.fold.seq, self.fold.t = state, seq, event.t
            for output in effects.outputs:
                key = (output.rid, output.epoch, output.choice)
                before = self.served.get(key, Served())
                reason = before.reason if output.finish_reason is None else output.finish_reason.value
                self.served[key] = Served((*before.tokens, *(int(token) for token in output.tokens)), reason)
            told = orjson.loads(encode(event, seq))
            yield {name: value for name, value in told.items() if name == "seq" or name not in UNTOLD
                   and (times or name != "t")}  # fmt: skip


def _fields(one: dict[str, Any] | None, other: dict[str, Any] | None) -> list[str]:
    if one is None or other is None:
        return ["record"]
    return [name for name in {**one, **other} if one.get(name) != other.get(name)]


def _requests(one: dict[Key, Served], other: dict[Key, Served]) -> list[dict[str, Any]]:
    found = []
    for key in {**one, **other}:
        a, b = one.get(key), other.get(key)
        if a == b:
            continue
        rid, epoch, choice = key
        who = {"rid": rid, "epoch": epoch, "choice": choice}
        if a is None or b is None:
            found.append({**who, "only": "b" if a is None else "a"})
            continue
        pairs = zip_longest(a.tokens, b.tokens)
        first = next((at for at, (x, y) in enumerate(pairs) if x != y), None)
        found.append({**who, "token": first, "reasons": [a.reason, b.reason],
                      "tokens": [len(a.tokens), len(b.tokens)]})  # fmt: skip
    return found


def describe(found: dict[str, Any]) -> str:
    """Some lines for a reader."""
    if found["equal"]:
        return f"no difference in {found['records'][0]} records"
    lines = [f"{found['records'][0]} records and {found['records'][1]} records"]
    if found["record"] is not None:
        record = found["record"]
        lines.append(f"the first difference is at seq {record['seq']}, in {', '.join(record['fields'])}")
        for side in ("a", "b"):
            shown = "nothing" if record[side] is None else orjson.dumps(record[side]).decode()
            lines.append(f"  {side} {shown if len(shown) <= 400 else shown[:400] + '…'}")
    for one in found["requests"]:
        which = "".join(f" {name} {one[name]}" for name in ("epoch", "choice") if one[name])
        if "only" in one:
            lines.append(f"request {one['rid']}{which}: only in {one['only']}")
        elif one["token"] is None:
            lines.append(f"request {one['rid']}{which}: ended with {one['reasons'][0]!r} and {one['reasons'][1]!r}")
        else:
            lines.append(f"request {one['rid']}{which}: output token {one['token']} is the first that differs")
    lines += [f"state: {name} is {a!r} and {b!r}" for name, (a, b) in found["state"].items()]
    return "\n".join(lines)


__all__ = ["Served", "describe", "diff"]
