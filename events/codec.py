"""Events and plans as JSON records and back; a field at its default is left out.

`encode` writes a record as bytes, `decode` reads a parsed one. Numpy arrays are written directly. A record of an
unknown type, with an unknown or missing field or a value of the wrong kind (events/shapes.py) raises `CodecError`,
which names it; what `encode` has written, `decode` reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING
from typing import Any, NoReturn

import numpy as np
import orjson

from leftfold.events import types
from leftfold.events.plan import Chunk, End, Evict, Grow, Join, Operation, Plan
from leftfold.events.quick import filler, untouched
from leftfold.events.shapes import Layout, is_integer
from leftfold.events.types import Admit, Event, ForwardDone, SamplingParams, Tick

_INT32 = np.dtype(np.int32)
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1


_FEW = 96
"""Up to so many ids are written faster from a list."""


class CodecError(ValueError):
    """A record that is not of this format; the message names type, field and value."""


def _tag(cls: type) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()


OPERATIONS: tuple[type[Operation], ...] = Operation.__args__
TAGS: Mapping[type, str] = {cls: _tag(cls) for cls in (*types.EVENTS, *OPERATIONS)}
_EVENT_TYPES: Mapping[str, type[Event]] = {TAGS[cls]: cls for cls in types.EVENTS}
_OPERATION_TYPES: Mapping[str, type[Operation]] = {TAGS[cls]: cls for cls in OPERATIONS}
_LAYOUTS: Mapping[type, Layout] = {cls: Layout(cls) for cls in (*types.EVENTS, *OPERATIONS, SamplingParams, Plan)}


def _contiguous(value: Any) -> Any:
    """What orjson cannot write itself: views of arrays, numpy scalars."""
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value) if not value.flags.c_contiguous else value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be written to a log")


def _is_default(value: Any, default: Any) -> bool:
    """Whether a field that holds no tuple may be left out: an empty list or array reads back as the default ()."""
    kind = type(value)
    return default == () and (kind is list or kind is np.ndarray) and not len(value)


def _present(record: Any, where: str) -> dict[str, Any]:
    """The fields that are not at their defaults. Raises `CodecError` for one that could not be read back."""
    out: dict[str, Any] = {}
    _FILL[type(record)](out, record, where)
    return out


def _dumps(record: dict[str, Any]) -> bytes:
    """Raises TypeError for what JSON cannot hold, keys that are no text included: they would not be read back."""
    return orjson.dumps(record, _contiguous, orjson.OPT_SERIALIZE_NUMPY)


# Writing

_keep_json: Callable[[Plan, bytes], None] = Plan.__dict__["_json"].__set__  # past the freeze: it is derived
_keep_params_json: Callable[[SamplingParams, bytes], None] = SamplingParams.__dict__["_json"].__set__


def params_json(params: SamplingParams) -> bytes:
    """Sampling parameters as JSON, defaults left out; computed once, since log and digest both need it.

    Raises `CodecError` or `TypeError` for what could not be read back.
    """
    if params._json is None:
        present = _present(params, "params")
        if params.logit_bias:
            present["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
        encoded = _dumps(present)
        _keep_params_json(params, encoded)
        return encoded
    return params._json


def _without_epoch(row: Join | End) -> list[Any]:
    values: list[Any] = [*row]
    return values if row.epoch else values[:-1]


def _operation(op: Operation) -> dict[str, Any]:
    return {"type": TAGS[type(op)], **_present(op, "operation")}


def plan_json(plan: Plan) -> bytes:
    """A plan's delta as JSON; computed once per plan, since log and digest both need it."""
    if plan._json is not None:
        return plan._json
    out: dict[str, Any] = {}
    if plan.step is not None:
        out["step"] = plan.step
    if plan.base is not None:
        out["base"] = plan.base
    if plan.join:
        out["join"] = [_without_epoch(row) for row in plan.join]
    if len(plan.preempt):
        out["preempt"] = plan.preempt
    if plan.chunks:
        out["chunks"] = [[slot, length, bool(samples)] for slot, length, samples in plan.chunks]
    if plan.width != 1:
        out["width"] = plan.width
    if plan.grow:
        out["grow"] = [*map(list, plan.grow)]
    if plan.evict:
        out["evict"] = [*map(list, plan.evict)]
    if plan.ops:
        out["ops"] = [_operation(op) for op in plan.ops]
    if plan.ends:
        out["ends"] = [_without_epoch(row) for row in plan.ends]
    if plan.memo is not None:
        out["memo"] = dict(plan.memo)
    encoded = _dumps(out)
    _keep_json(plan, encoded)
    return encoded


def _listed(tokens: Any) -> Any:
    """An array of ids as what costs less to write."""
    return tokens.tolist() if len(tokens) <= _FEW else tokens


def _refuse(where: str, name: str, value: Any) -> NoReturn:
    shown = repr(value)
    raise CodecError(f"{where}: {name} {shown if len(shown) <= 80 else shown[:80] + '…'} is not of its kind")


def _nested(params: SamplingParams) -> orjson.Fragment | None:
    encoded = params_json(params)
    return orjson.Fragment(encoded) if encoded != b"{}" else None


_SELDOM: Mapping[type, Sequence[str]] = {
    SamplingParams: (
        "min_tokens", "ignore_eos", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
        "logit_bias", "n", "grammar", "processors",
    ),
}  # fmt: skip

_FILL: Mapping[type, Callable[[dict[str, Any], Any, str], None]] = {
    cls: filler(layout.writes, _is_default, _refuse, {SamplingParams: _nested}, _SELDOM.get(cls, ()))
    for cls, layout in _LAYOUTS.items()
}
_says_no_more = untouched(
    {name: default for name, default in _LAYOUTS[Admit].fields if name not in ("rid", "prompt", "params")}
)
_tells_no_more = untouched(
    {name: default for name, default in _LAYOUTS[ForwardDone].fields if name in ("counts", "ended", "error", "scores")}
)


def _is_plain_admit(admit: Admit) -> bool:
    """Whether it is a request as most are, which needs no look at its fields one by one."""
    plain = _is_id_array(admit.prompt) and type(admit.rid) is str and type(admit.params) is SamplingParams
    return plain and _says_no_more(admit)


def encode(event: Event, seq: int | None = None) -> bytes:
    """One event as a JSON object: `{"seq":17,"t":…,"type":"forward_done",…}` (no `seq` when None).

    Raises `CodecError` for one that `decode` would refuse, `TypeError` for what JSON cannot hold.
    """
    t, kind = event.t, type(event)
    if type(t) is not int or not _LEAST <= t <= _MOST:
        _refuse(TAGS[kind], "t", t)
    if type(event) is Tick and event.plan is not None and seq is not None:
        return b'{"seq":%d,"t":%d,"type":"tick","plan":%b}' % (seq, t, plan_json(event.plan))
    tag = TAGS[kind]
    out: dict[str, Any] = {"t": t, "type": tag} if seq is None else {"seq": seq, "t": t, "type": tag}
    if type(event) is Tick:
        if event.plan is not None:
            out["plan"] = orjson.Fragment(plan_json(event.plan))
    elif type(event) is ForwardDone and is_plain(event):
        out["step"], out["tokens"] = event.step, _listed(event.tokens)
        if event.digest is not None:
            out["digest"] = event.digest
    elif type(event) is Admit and _is_plain_admit(event):
        out["rid"], out["prompt"] = event.rid, _listed(event.prompt)
        params = params_json(event.params)
        if params != b"{}":
            out["params"] = orjson.Fragment(params)
    else:
        _FILL[kind](out, event, tag)
    return _dumps(out)


def plain(event: Event) -> dict[str, Any]:
    """One event as the plain data that `decode` reads."""
    found: dict[str, Any] = orjson.loads(encode(event))
    return found


def plain_params(params: SamplingParams) -> dict[str, Any]:
    """Sampling parameters as the plain data that `decode_params` reads."""
    found: dict[str, Any] = orjson.loads(params_json(params))
    return found


def _is_id_array(tokens: Any) -> bool:
    """Whether it is an array of token ids that is not empty, as most are."""
    return type(tokens) is np.ndarray and tokens.dtype is _INT32 and tokens.ndim == 1 and len(tokens) > 0


def is_plain(done: ForwardDone) -> bool:
    """A result as executors give it: it can be encoded, and needs no look at its fields one by one."""
    step, digest = done.step, done.digest
    if not _tells_no_more(done):
        return False
    if type(step) is not int or not 0 <= step <= _MOST or (digest is not None and type(digest) is not str):
        return False
    return _is_id_array(done.tokens)


# Reading


def _build(cls: type, raw: Mapping[str, Any], where: str) -> Any:
    """A record from its fields, each checked (`t` by the caller)."""
    checks = _LAYOUTS[cls].reads
    for name, value in raw.items():
        if name not in checks:
            raise CodecError(f"{where}: unknown field {name!r}")
        check = checks[name]
        if check is not None and not check(value):
            _refuse(where, name, value)
    try:
        return cls(**raw)
    except TypeError as error:  # all names are known, so one is missing
        missing = [name for name, default in _LAYOUTS[cls].fields if default is MISSING and name not in raw]
        raise CodecError(f"{where}: field {missing[0]!r} is missing") from error


def _decode_operation(raw: Any) -> Operation:
    tag = raw.get("type") if isinstance(raw, dict) else raw
    cls = _OPERATION_TYPES.get(tag) if isinstance(tag, str) else None
    if cls is None:
        raise CodecError(f"unknown operation type {tag!r}")
    values = dict(raw)
    del values["type"]
    operation: Operation = _build(cls, values, f"operation {tag}")
    return operation


_PLAN_ROWS: Mapping[str, Callable[..., Any]] = {
    "join": Join, "chunks": Chunk, "grow": Grow, "evict": Evict, "ends": End,
}  # fmt: skip


def decode_plan(raw: Mapping[str, Any]) -> Plan:
    """A plan from its parsed JSON. Raises `CodecError`."""
    values = dict(raw)
    if isinstance(values.get("ops"), list):
        values["ops"] = tuple([_decode_operation(op) for op in values["ops"]])
    plan: Plan = _build(Plan, values, "plan")
    for name in values:
        if name in _PLAN_ROWS:
            make = _PLAN_ROWS[name]
            object.__setattr__(plan, name, tuple([make(*row) for row in values[name]]))
    return plan


def _biases(raw: Mapping[str, Any]) -> dict[int, Any]:
    """JSON has no integer keys: they were written as text."""
    try:
        found = {int(token): bias for token, bias in raw.items()}
    except ValueError:
        found = {}
    if [str(token) for token in found] != [*raw]:
        _refuse("params", "logit_bias", raw)
    return found


def decode_params(raw: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters from their parsed JSON. Raises `CodecError`."""
    values = dict(raw)
    if isinstance(values.get("logit_bias"), dict):
        values["logit_bias"] = _biases(values["logit_bias"])
    params: SamplingParams = _build(SamplingParams, values, "params")
    return params


def decode(raw: Mapping[str, Any]) -> Event:
    """An event from its parsed record (`crc` and `seq` are ignored). Raises `CodecError`."""
    tag = raw.get("type")
    cls = _EVENT_TYPES.get(tag) if isinstance(tag, str) else None
    if cls is None:
        raise CodecError(f"unknown event type {tag!r}")
    values = dict(raw)
    values.pop("crc", None)
    values.pop("seq", None)
    del values["type"]
    if not is_integer(raw.get("t")):
        raise CodecError(f"{tag}: t {raw.get('t')!r} is not an integer")
    if cls is Tick and isinstance(values.get("plan"), dict):
        values["plan"] = decode_plan(values["plan"])
    elif cls is Admit and isinstance(values.get("params"), dict):
        values["params"] = decode_params(values["params"])
    event: Event = _build(cls, values, str(tag))
    return event


def _equal(a: Any, b: Any) -> bool:
    kind = type(a)
    if kind is type(b) and (kind is int or kind is str):  # as most are
        return bool(a == b)
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.array_equal(np.asarray(a), np.asarray(b))
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_equal(value, b[key]) for key, value in a.items())
    if type(a) in _LAYOUTS and type(a) is type(b):
        return same(a, b)
    return bool(a == b)


def same(a: Any, b: Any) -> bool:
    """Whether two records (events, plans, operations, parameters) say the same; arrays compare as lists do."""
    if type(a) is not type(b) or getattr(a, "t", None) != getattr(b, "t", None):
        return False
    return all(_equal(getattr(a, name), getattr(b, name)) for name, _ in _LAYOUTS[type(a)].fields)


__all__ = [
    "CodecError", "OPERATIONS", "TAGS", "decode", "decode_params", "decode_plan", "encode", "is_plain", "params_json",
    "plain", "plain_params", "plan_json", "same",
]  # fmt: skip
