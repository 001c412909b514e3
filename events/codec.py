"""Events and plans as JSON records and back; a field at its default is left out.

`encode` writes one record as bytes, `decode` reads a parsed record. Numpy arrays are written directly. A record of an
unknown type, with an unknown or missing field or a value of the wrong kind raises `CodecError`, which names it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any

import numpy as np
import orjson

from leftfold.events import types
from leftfold.events.plan import Chunk, End, Evict, Grow, Join, Operation, Plan
from leftfold.events.types import Event, ForwardDone, SamplingParams, Tick

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


class CodecError(ValueError):
    """A record that is not of this format; the message names type, field and value."""


def _tag(cls: type) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()


def _layout(cls: type) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (f.name, f.default) for f in fields(cls) if not f.name.startswith("_") and f.name != "t"
    )


OPERATIONS: tuple[type[Operation], ...] = Operation.__args__
TAGS: Mapping[type, str] = {cls: _tag(cls) for cls in (*types.EVENTS, *OPERATIONS)}
_EVENT_TYPES: Mapping[str, type[Event]] = {TAGS[cls]: cls for cls in types.EVENTS}
_OPERATION_TYPES: Mapping[str, type[Operation]] = {TAGS[cls]: cls for cls in OPERATIONS}
_LAYOUTS: Mapping[type, tuple[tuple[str, Any], ...]] = {
    cls: _layout(cls) for cls in (*types.EVENTS, *OPERATIONS, SamplingParams, Plan)
}


def _contiguous(value: Any) -> Any:
    """What orjson cannot write itself: views of arrays, numpy scalars."""
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value) if not value.flags.c_contiguous else value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be written to a log")


def _present(record: Any, layout: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, default in layout:
        value = getattr(record, name)
        if value is default:
            continue
        if type(value) is SamplingParams:
            encoded = params_json(value)
            if encoded != b"{}":
                out[name] = orjson.Fragment(encoded)
        elif isinstance(value, np.ndarray) or value != default:
            out[name] = value
    return out


def _dumps(record: dict[str, Any]) -> bytes:
    return orjson.dumps(record, _contiguous, _OPTIONS)


# Writing


def params_json(params: SamplingParams) -> bytes:
    """Sampling parameters as JSON, defaults left out; computed once, since log and digest both need it."""
    if params._json is None:
        object.__setattr__(params, "_json", _dumps(_present(params, _LAYOUTS[SamplingParams])))
    encoded = params._json
    assert encoded is not None
    return encoded


def _without_epoch(row: Join | End) -> list[Any]:
    values: list[Any] = [*row]
    return values if row.epoch else values[:-1]


def _operation(op: Operation) -> dict[str, Any]:
    return {"type": TAGS[type(op)], **_present(op, _LAYOUTS[type(op)])}


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
        out["grow"] = [[*group] for group in plan.grow]
    if plan.evict:
        out["evict"] = [[*dropped] for dropped in plan.evict]
    if plan.ops:
        out["ops"] = [_operation(op) for op in plan.ops]
    if plan.ends:
        out["ends"] = [_without_epoch(row) for row in plan.ends]
    if plan.memo is not None:
        out["memo"] = dict(plan.memo)
    encoded = _dumps(out)
    object.__setattr__(plan, "_json", encoded)
    return encoded


def encode(event: Event, seq: int | None = None) -> bytes:
    """One event as a JSON object: `{"seq":17,"t":…,"type":"forward_done",…}` (no `seq` when None)."""
    cls = type(event)
    out: dict[str, Any] = {} if seq is None else {"seq": seq}
    out["t"] = event.t
    out["type"] = TAGS[cls]
    if cls is ForwardDone and event.error is None and event.counts is None and not event.ended:  # type: ignore[union-attr]
        out["step"] = event.step  # type: ignore[union-attr]
        out["tokens"] = event.tokens  # type: ignore[union-attr]
        if event.digest is not None:  # type: ignore[union-attr]
            out["digest"] = event.digest  # type: ignore[union-attr]
        return orjson.dumps(out, _contiguous, _OPTIONS)
    if cls is Tick:
        if event.plan is not None:  # type: ignore[union-attr]
            out["plan"] = orjson.Fragment(plan_json(event.plan))  # type: ignore[union-attr]
        return orjson.dumps(out, _contiguous, _OPTIONS)
    out.update(_present(event, _LAYOUTS[cls]))
    return _dumps(out)


# Reading


def _build(cls: type, raw: Mapping[str, Any], where: str) -> Any:
    known = _LAYOUTS[cls]
    names = {name for name, _ in known} | ({"t"} if cls in _EVENT_TYPES.values() else set())
    if unknown := raw.keys() - names:
        raise CodecError(f"{where}: unknown field {min(unknown)!r}")
    if missing := [name for name, default in known if default is MISSING and name not in raw]:
        raise CodecError(f"{where}: field {missing[0]!r} is missing")
    return cls(**raw)


def _rows(where: str, field: str, raw: Any, make: Callable[..., Any]) -> tuple[Any, ...]:
    try:
        return tuple(make(*row) for row in raw)
    except TypeError as error:
        raise CodecError(f"{where}: {field} {raw!r} is not a list of {make.__name__} rows") from error


def _decode_operation(raw: Mapping[str, Any]) -> Operation:
    cls = _OPERATION_TYPES.get(raw.get("type", ""))
    if cls is None:
        raise CodecError(f"unknown operation type {raw.get('type')!r}")
    operation: Operation = _build(cls, {k: v for k, v in raw.items() if k != "type"}, f"operation {raw['type']}")
    return operation


_PLAN_ROWS: Mapping[str, Callable[..., Any]] = {
    "join": Join, "chunks": Chunk, "grow": Grow, "evict": Evict, "ends": End,
}  # fmt: skip


def decode_plan(raw: Mapping[str, Any]) -> Plan:
    """A plan from its parsed JSON. Raises `CodecError`."""
    values = dict(raw)
    for name, make in _PLAN_ROWS.items():
        if name in values:
            values[name] = _rows("plan", name, values[name], make)
    if "ops" in values:
        values["ops"] = tuple(_decode_operation(op) for op in values["ops"])
    plan: Plan = _build(Plan, values, "plan")
    return plan


def decode_params(raw: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters from their parsed JSON. Raises `CodecError`."""
    values = dict(raw)
    if values.get("logit_bias"):
        values["logit_bias"] = {int(token): bias for token, bias in values["logit_bias"].items()}
    params: SamplingParams = _build(SamplingParams, values, "params")
    return params


def decode(raw: Mapping[str, Any]) -> Event:
    """An event from its parsed record (`crc` and `seq` are ignored). Raises `CodecError`."""
    tag = raw.get("type")
    cls = _EVENT_TYPES.get(tag) if isinstance(tag, str) else None
    if cls is None:
        raise CodecError(f"unknown event type {tag!r}")
    if not isinstance(raw.get("t"), int):
        raise CodecError(f"{tag}: t {raw.get('t')!r} is not an integer")
    values = {key: value for key, value in raw.items() if key not in ("crc", "seq", "type")}
    if isinstance(values.get("plan"), dict):
        values["plan"] = decode_plan(values["plan"])
    if isinstance(values.get("params"), dict):
        values["params"] = decode_params(values["params"])
    event: Event = _build(cls, values, str(tag))
    return event


def _equal(a: Any, b: Any) -> bool:
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
    return all(_equal(getattr(a, name), getattr(b, name)) for name, _ in _LAYOUTS[type(a)])


__all__ = [
    "CodecError", "OPERATIONS", "TAGS", "decode", "decode_params", "decode_plan", "encode", "params_json", "plan_json",
    "same",
]  # fmt: skip
