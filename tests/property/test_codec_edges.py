"""At the edge of what a field may hold: what is written can be read, and what cannot be read is never written."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, get_type_hints

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leftfold.events import (
    EVENTS,
    Admit,
    CodecError,
    Event,
    ForwardDone,
    Plan,
    SamplingParams,
    Tick,
    decode,
    encode,
    same,
)
from leftfold.events.codec import OPERATIONS
from leftfold.events.shapes import JUDGED
from tests.property.test_codec import every_event, operations, params, texts, values

LEAST, MOST = -(1 << 63), (1 << 63) - 1
EDGES = (LEAST - 1, LEAST, -1, 0, MOST, MOST + 1, 2 * MOST + 1, 2 * MOST + 2)
edges = st.sampled_from(EDGES)
ARRAYS = (
    np.array([1, 2], np.uint8), np.array([-1], np.int8), np.array([MOST], np.int64), np.array([MOST + 1], np.uint64),
    np.array([], np.int64), np.array([], np.float64), np.array([1.0]), np.array([True]), np.array(["1"]),
    np.array(1), np.array([[1, 2], [3, 4]]), np.array([[]], np.int64), np.arange(8, dtype=np.int32)[::3],
)  # fmt: skip
arrays = st.sampled_from(ARRAYS)
odd = st.one_of(
    edges, edges.map(lambda edge: [edge]), edges.map(lambda edge: (1, edge)), edges.map(lambda edge: {"x": edge}),
    edges.map(lambda edge: [[edge]]), edges.map(float), arrays, arrays.map(lambda array: [array]), texts,
    st.sampled_from([None, True, [], (), {}, "\ud800", [True], [1.0], np.int64(1), {1: 2}, {1.5: 1}]),
)  # fmt: skip


def reads_back(event: Event) -> bool:
    """Whether it is written; then it is read as the same, and written the same again."""
    try:
        raw = encode(event, 1)
    except (CodecError, TypeError):
        return False
    back = decode(orjson.loads(raw))
    assert same(back, event)
    assert encode(back, 1) == raw
    return True


def integers_of(cls: type) -> list[str]:
    """Fields that hold an integer, and that the reducer does not judge itself."""
    hints = get_type_hints(cls)
    names = [each.name for each in fields(cls) if not each.name.startswith("_")]
    return [name for name in names if hints[name] in (int, int | None) and name not in JUDGED.get(cls, ())]


CASES = [(cls, name) for cls in (*EVENTS, *OPERATIONS, SamplingParams) for name in integers_of(cls)]


@pytest.mark.parametrize(("cls", "name"), CASES, ids=[f"{cls.__name__}-{name}" for cls, name in CASES])
@settings(max_examples=5)
@given(draw=st.data())
def test_an_integer_of_64_bits_is_written_and_no_other(cls: Any, name: str, draw: st.DataObject) -> None:
    record = draw.draw(params if cls is SamplingParams else st.builds(cls, **values(cls)))
    for edge in EDGES:
        most = 2 * MOST + 1 if (cls, name) == (SamplingParams, "seed") else MOST
        other = replace(record, **{name: edge})
        event: Event = other
        if cls in OPERATIONS:
            event = Tick(t=1, plan=Plan(ops=[other]))
        elif cls is SamplingParams:
            event = Admit(t=1, rid="a", params=other)
        assert reads_back(event) == (LEAST <= edge <= most), edge


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}{[*array.shape]}")
@pytest.mark.parametrize("name", [each.name for each in fields(ForwardDone)])
def test_an_array_in_any_field_of_a_result_is_written_or_refused(name: str, array: np.ndarray) -> None:
    """Executors make arrays: a result is taken for a plain one, or looked at, without asking if an array is true."""
    for tokens in ([1, 2], np.array([1, 2], np.int32)):
        reads_back(replace(ForwardDone(t=1, step=1, tokens=tokens), **{name: array}))


@settings(max_examples=1000)
@given(every_event, st.data())
def test_whatever_is_in_a_field_is_written_so_that_it_can_be_read_or_not_at_all(
    event: Event, draw: st.DataObject
) -> None:
    judged = JUDGED[ForwardDone] if isinstance(event, ForwardDone) else ()  # what is there is told to nobody
    names = [each.name for each in fields(event) if each.name not in ("plan", "params", *judged)]
    name = draw.draw(st.sampled_from(names))
    reads_back(replace(event, **{name: draw.draw(odd)}))


@settings(max_examples=500)
@given(operations, st.data())
def test_so_it_is_in_an_operation(operation: Any, draw: st.DataObject) -> None:
    name = draw.draw(st.sampled_from([each.name for each in fields(operation)]))
    reads_back(Tick(t=1, plan=Plan(ops=[replace(operation, **{name: draw.draw(odd)})])))


@settings(max_examples=500)
@given(st.data())
def test_so_it_is_in_sampling_parameters(draw: st.DataObject) -> None:
    name = draw.draw(st.sampled_from([each.name for each in fields(SamplingParams) if not each.name.startswith("_")]))
    reads_back(Admit(t=1, rid="a", params=SamplingParams(**{name: draw.draw(odd)})))


@pytest.mark.parametrize("kind", [np.int8, np.int32, np.int64, np.uint64, np.longlong, np.ulonglong])
def test_an_integer_of_any_of_numpys_kinds_in_a_plan_is_written_as_the_number_it_is(kind: type[np.integer]) -> None:
    """The JSON library knows most of them, and asks for the rest."""
    found = [encode(Tick(t=0, plan=Plan(step=1, preempt=[one], memo={"x": one})), 1) for one in (kind(3), 3)]
    assert found[0] == found[1]
