"""Every event that can be written reads back as the same event, and says so in one form only."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leftfold.events import (
    EVENTS,
    Admit,
    Chunk,
    CodecError,
    End,
    Event,
    Evict,
    FlushCache,
    ForwardDone,
    Grow,
    Join,
    Plan,
    Resume,
    SamplingParams,
    Started,
    Tick,
    decode,
    encode,
    same,
)
from leftfold.events.codec import OPERATIONS, TAGS

ids = st.integers(0, 2**31 - 1)
counts = st.integers(0, 2**53)
signed = st.integers(-(2**62), 2**62)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
optional_text = st.none() | texts
lists = st.lists(ids, max_size=6)
tokens = lists | lists.map(tuple) | lists.map(lambda x: np.array(x, np.int32)) | lists.map(
    lambda x: np.array([*x, *x], np.int32)[::2])  # fmt: skip
pages = lists | lists.map(lambda x: np.array(x, np.int64))
json_values = st.recursive(
    st.none() | st.booleans() | signed | texts, lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(texts, inner, max_size=3), max_leaves=6,
)  # fmt: skip
objects = st.dictionaries(texts, json_values, max_size=3)
fractions = st.floats(0, 1)

params = st.builds(
    SamplingParams, max_tokens=counts, min_tokens=counts, stop_token_ids=lists.map(tuple), ignore_eos=st.booleans(),
    temperature=st.floats(0, 2), top_p=fractions, top_k=counts, min_p=fractions,
    seed=st.none() | st.integers(0, 2**64 - 1), presence_penalty=st.floats(-2, 2), frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.1, 2), logit_bias=st.none() | st.dictionaries(ids, st.floats(-100, 100), max_size=3),
    n=st.integers(1, 4), grammar=st.none() | objects, processors=st.just(()) | st.lists(texts, max_size=2),
)  # fmt: skip

BY_NAME: dict[str, st.SearchStrategy[Any]] = {
    "params": params, "prompt": tokens, "tokens": tokens, "config": st.none() | objects, "want": st.none() | objects,
    "set": objects, "args": objects, "info": json_values, "counts": st.none() | lists,
    "ended": lists, "kept": st.lists(texts, max_size=2), "tags": st.lists(texts, max_size=2),
    "media": st.lists(objects, max_size=2),
    "open": st.booleans(), "last": st.booleans(), "hold": st.booleans(), "src": pages, "dst": pages,
    "pages": st.lists(lists, max_size=2), "priority": signed, "t": counts,
}  # fmt: skip
BY_TYPE: dict[str, st.SearchStrategy[Any]] = {
    "int": counts, "int | None": st.none() | counts, "str": texts, "str | None": optional_text,
}  # fmt: skip
forward_errors = st.none() | st.fixed_dictionaries({"text": texts, "retry": st.booleans()}, optional={"rows": lists})


def values(cls: type) -> dict[str, st.SearchStrategy[Any]]:
    names = {f.name: str(f.type) for f in fields(cls) if not f.name.startswith("_")}
    known = BY_NAME | ({"error": forward_errors} if cls is ForwardDone else {})
    return {name: known[name] if name in known else BY_TYPE[kind] for name, kind in names.items()}


operations = st.one_of([st.builds(cls, **values(cls)) for cls in OPERATIONS])
plans = st.builds(
    Plan, step=st.none() | counts, base=st.none() | counts,
    join=st.lists(st.builds(Join, ids, texts, ids, ids, st.lists(lists, max_size=2), ids), max_size=3).map(tuple),
    preempt=pages, chunks=st.lists(st.builds(Chunk, ids, ids, st.booleans()), max_size=3).map(tuple),
    width=st.integers(1, 5), grow=st.lists(st.builds(Grow, pages, pages), max_size=2).map(tuple),
    evict=st.lists(st.builds(Evict, texts, ids, pages), max_size=2).map(tuple),
    ops=st.lists(operations, max_size=2).map(tuple),
    ends=st.lists(st.builds(End, texts, ids, texts, ids), max_size=2).map(tuple),
    memo=st.none() | st.dictionaries(texts, signed, max_size=3),
)  # fmt: skip
BY_NAME["plan"] = st.none() | plans
every_event = st.one_of([st.builds(cls, **values(cls)) for cls in EVENTS])


@settings(max_examples=300)
@given(every_event, st.integers(1, 2**53))
def test_an_event_reads_back_as_the_same(event: Event, seq: int) -> None:
    raw = encode(event, seq)
    back = decode(orjson.loads(raw))
    assert same(back, event) and same(event, back)
    assert encode(back, seq) == raw
    assert raw.startswith(b'{"seq":%d,"t":%d,"type":"%s"' % (seq, event.t, TAGS[type(event)].encode()))
    assert b"\n" not in raw


def plain(value: Any) -> Any:
    """A record as lists, dicts and scalars, which Python itself can compare."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value) if not f.name.startswith("_")}
    return value


@settings(max_examples=300)
@given(every_event, st.data())
def test_events_that_differ_in_one_field_are_the_same_only_if_its_values_are(event: Event, draw: st.DataObject) -> None:
    choices = values(type(event))
    name = draw.draw(st.sampled_from(sorted(choices)))
    other = replace(event, **{name: draw.draw(choices[name])})
    assert same(event, other) == (plain(event) == plain(other))
    if encode(event) == encode(other):
        assert same(event, other)


def test_events_of_two_types_are_never_the_same() -> None:
    assert not same(Resume(t=1), FlushCache(t=1))


def test_tags_are_distinct() -> None:
    assert len(set(TAGS.values())) == len(TAGS)


def test_a_field_at_its_default_is_left_out() -> None:
    assert encode(Admit(t=5, rid="a"), 1) == b'{"seq":1,"t":5,"type":"admit","rid":"a"}'
    assert encode(Tick(t=5), 1) == b'{"seq":1,"t":5,"type":"tick"}'
    assert encode(Tick(t=5, plan=Plan(memo={})), 1) == b'{"seq":1,"t":5,"type":"tick","plan":{"memo":{}}}'


def test_a_seed_keeps_all_its_bits() -> None:
    event = Admit(t=0, rid="a", params=SamplingParams(seed=2**64 - 1))
    back = decode(orjson.loads(encode(event)))
    assert isinstance(back, Admit) and back.params.seed == 2**64 - 1


def test_a_fortran_view_and_a_column_are_written_as_lists() -> None:
    table = np.arange(6, dtype=np.int32).reshape(2, 3)
    back = decode(orjson.loads(encode(ForwardDone(t=0, step=1, tokens=table[:, 1]))))
    assert isinstance(back, ForwardDone) and list(back.tokens) == [1, 4]
    assert b"[[0,3],[1,4],[2,5]]" in encode(Started(t=0, config={"x": table.T}))


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ({"t": 0}, "unknown event type None"),
        ({"t": 0, "type": "teleport"}, "'teleport'"),
        ({"t": 0, "type": ["tick"]}, "unknown event type"),
        ({"type": "tick"}, "t None"),
        ({"t": "1", "type": "tick"}, "t '1'"),
        ({"t": 1.5, "type": "tick"}, "t 1.5"),
        ({"t": 0, "type": "tick", "colour": 1}, "colour"),
        ({"t": 0, "type": "admit"}, "rid"),
        ({"t": 0, "type": "admit", "rid": "a", "params": {"heat": 1}}, "heat"),
        ({"t": 0, "type": "tick", "plan": {"speed": 1}}, "speed"),
        ({"t": 0, "type": "tick", "plan": {"join": [[1]]}}, "join"),
        ({"t": 0, "type": "tick", "plan": {"join": 3}}, "join"),
        ({"t": 0, "type": "tick", "plan": {"ops": [{"type": "fly"}]}}, "fly"),
        ({"t": 0, "type": "tick", "plan": {"ops": [{"type": "send"}]}}, "op"),
    ],
)
def test_what_is_no_event_is_refused_by_name(raw: dict[str, Any], says: str) -> None:
    with pytest.raises(CodecError, match=says):
        decode(raw)
