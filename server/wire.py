"""What the HTTP process and the engine process say to each other: typed frames of JSON, never pickles.

A message is two ZMQ frames: a one-byte tag and a JSON body. Events travel in the log's own record format.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from leftfold.events import Event, decode, encode
from leftfold.executor.base import Score


class WireError(Exception):
    """A message that is not of this format."""


@dataclass(frozen=True, slots=True)
class Submit:
    """An event for the engine's inbox; the engine stamps its time anew."""

    event: Event


@dataclass(frozen=True, slots=True)
class StatsRequest:
    """Asks for the engine's gauges; `call` comes back with the answer."""

    call: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends the engine process after the step that runs."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Asks for all that is known of choices from a position on; rows come, then an `Answered` for `call`.

    `wanted`: [rid, epoch, choice, position]; `calls`: control calls that wait for their answers.
    """

    call: str
    wanted: Sequence[Sequence[Any]]
    calls: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine takes work. `info`: what the server must know (`max_model_len`, `vocab_size`, …)."""

    info: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine could not start, or go on; `message` is one line for people, and the last that is said."""

    message: str


@dataclass(frozen=True, slots=True)
class Output:
    """New tokens of one choice. `finish_reason` ends it; `error` is {code, text} or None; `version`: of the weights.

    `scores`: of these tokens, and with the first ones of the prompt, if the request wants them.
    """

    rid: str
    choice: int
    position: int
    tokens: Sequence[int]
    finish_reason: str | None
    error: Mapping[str, Any] | None
    usage: Mapping[str, Any] | None
    version: str = ""
    scores: Sequence[Score] = ()


@dataclass(frozen=True, slots=True)
class Outputs:
    """All that one event made visible."""

    rows: Sequence[Output]


@dataclass(frozen=True, slots=True)
class Stats:
    """The engine's gauges, read from its state for `call`."""

    call: int
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Status:
    """How the engine stands, said whenever it changes: its gate, what is `asleep` of weights and kv.

    `refusing`: why it admits nothing, whatever its gate (a log that cannot be written), "" where it does.
    """

    gate: str
    asleep: Sequence[str] = ()
    refusing: str = ""


@dataclass(frozen=True, slots=True)
class Answered:
    """The one answer to a control call, after its effect; `info`: what came of it, or why nothing did."""

    call: str
    ok: bool
    info: Any = None


Message = Submit | StatsRequest | Stop | Ask | Ready | Failed | Outputs | Stats | Status | Answered

_TAGS: Mapping[type, bytes] = {
    Submit: b"E", StatsRequest: b"Q", Stop: b"X", Ready: b"R", Failed: b"F", Outputs: b"O", Stats: b"S",
    Status: b"G", Answered: b"A", Ask: b"K",
}  # fmt: skip
_TYPES = {tag: kind for kind, tag in _TAGS.items()}


def to_frames(message: Message) -> list[bytes]:
    """The two frames of a message."""
    if isinstance(message, Submit):
        body = encode(message.event)
    elif isinstance(message, Outputs):
        body = _dumps([_row(row) for row in message.rows])
    else:
        body = _dumps({f.name: getattr(message, f.name) for f in dataclasses.fields(message)})
    return [_TAGS[type(message)], body]


def from_frames(frames: Sequence[bytes]) -> Message:
    """The message in `frames`. Raises WireError if there is none."""
    if len(frames) != 2 or (kind := _TYPES.get(bytes(frames[0]))) is None:
        raise WireError(f"not a message: {len(frames)} frames, tag {bytes(frames[0])[:8] if frames else b''!r}")
    try:
        body = orjson.loads(frames[1])
        if kind is Submit:
            return Submit(decode(_typed(body, dict)))
        if kind is Outputs:
            return Outputs([_output(row) for row in _typed(body, list)])
        message: Message = kind(**_typed(body, dict))
    except (ValueError, TypeError, KeyError) as error:
        raise WireError(f"a {kind.__name__} message that cannot be read: {error}") from error
    for name, expected in _FIELDS.get(kind, ()):
        if not isinstance(getattr(message, name), expected):
            raise WireError(f"a {kind.__name__} message whose {name} is no {expected.__name__}")
    return message


_FIELDS: Mapping[type, Sequence[tuple[str, type]]] = {
    StatsRequest: (("call", int),),
    Ask: (("call", str), ("wanted", list), ("calls", list)),
    Ready: (("info", dict),),
    Failed: (("message", str),),
    Stats: (("call", int), ("values", dict)),
    Status: (("gate", str), ("asleep", list), ("refusing", str)),
    Answered: (("call", str), ("ok", bool)),
}
_ROW: Sequence[Any] = (str, int, int, list, (str, type(None)), (dict, type(None)), (dict, type(None)), str, list)
_SCORE: Sequence[Any] = (int, int, (float, int), list)


def _row(output: Output) -> list[Any]:
    *plain, scores = (getattr(output, field.name) for field in dataclasses.fields(Output))
    return [*plain, [list(score) for score in scores]]


def _output(row: Any) -> Output:
    if not all(isinstance(v, t) for v, t in zip(_typed(row, list), _ROW, strict=True)):
        raise ValueError(f"not an output: {row!r}"[:200])
    if not all(isinstance(token, int) for token in row[3]):
        raise ValueError(f"not token ids: {row[3]!r}"[:200])
    return Output(*row[:-1], tuple(_score(score) for score in row[-1]))


def _score(row: Any) -> Score:
    if not all(isinstance(v, t) for v, t in zip(_typed(row, list), _SCORE, strict=True)):
        raise ValueError(f"not a score: {row!r}"[:200])
    position, token, logprob, top = row
    for pair in top:
        if not (isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], int)):
            raise ValueError(f"not an alternative: {pair!r}"[:200])
    return Score(position, token, float(logprob), tuple((other, float(value)) for other, value in top))


def _typed(value: Any, expected: type) -> Any:
    if not isinstance(value, expected):
        raise ValueError(f"{value!r} is no {expected.__name__}"[:200])
    return value


def output_row(row: Any, scores: Sequence[Score] = ()) -> Output:
    """A row of an engine's `Effects.outputs` as it travels, with what came beside it."""
    reason = None if row.finish_reason is None else str(getattr(row.finish_reason, "value", row.finish_reason))
    tokens = row.tokens.tolist() if isinstance(row.tokens, np.ndarray) else [int(t) for t in row.tokens]
    error, usage = _plain(row.error), _plain(row.usage)
    return Output(row.rid, row.choice, row.position, tokens, reason, error, usage, row.version, tuple(scores))


def _plain(value: Any) -> Any:
    """A mapping, a dataclass or a named tuple as a dictionary; None stays None."""
    if value is None or isinstance(value, dict):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value._asdict() if hasattr(value, "_asdict") else dict(value)


def _dumps(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
