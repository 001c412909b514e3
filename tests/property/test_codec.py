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
    codec,
    decode,
    encode,
    same,
)
from leftfold.events.codec import OPERATIONS, TAGS
from leftfold.events.shapes import JUDGED
from leftfold.fsm import Config, State, step

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
    "media": st.lists(objects, max_size=2), "scores": st.lists(st.lists(json_values, max_size=3), max_size=2),
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
        ({"t": True, "type": "tick"}, "t True"),
        ({"t": 1 << 63, "type": "tick"}, "t 92"),
        ({"t": 0, "type": "tick", "plan": 5}, "plan 5"),
        ({"t": 0, "type": "tick", "plan": {"step": 1.0}}, "step 1.0"),
        ({"t": 0, "type": "tick", "plan": {"step": True}}, "step True"),
        ({"t": 0, "type": "tick", "plan": {"preempt": [1, None]}}, "preempt"),
        ({"t": 0, "type": "tick", "plan": {"join": [[0, "a", 0, 0, [["x"]]]]}}, "join"),
        ({"t": 0, "type": "tick", "plan": {"join": [[0, "a", 0, 0, [[1]], 0, 9]]}}, "join"),
        ({"t": 0, "type": "tick", "plan": {"chunks": [[0, 1, 1]]}}, "chunks"),
        ({"t": 0, "type": "tick", "plan": {"grow": [[0, 1]]}}, "grow"),
        ({"t": 0, "type": "tick", "plan": {"evict": [["device", 0, [1 << 63]]]}}, "evict"),
        ({"t": 0, "type": "tick", "plan": {"ends": [["a", 0, None]]}}, "ends"),
        ({"t": 0, "type": "tick", "plan": {"memo": {"x": 1.5}}}, "memo"),
        ({"t": 0, "type": "tick", "plan": {"memo": {"x": 1 << 63}}}, "memo"),
        ({"t": 0, "type": "tick", "plan": {"ops": [5]}}, "operation type 5"),
        ({"t": 0, "type": "tick", "plan": {"ops": [{"type": ["copy"]}]}}, "operation type"),
        ({"t": 0, "type": "tick", "plan": {"ops": 7}}, "ops 7"),
        ({"t": 0, "type": "admit", "rid": 5}, "rid 5"),
        ({"t": 0, "type": "admit", "rid": "a", "params": []}, "params"),
        ({"t": 0, "type": "admit", "rid": "a", "epoch": None}, "epoch None"),
        ({"t": 0, "type": "admit", "rid": "a", "tenant": ["x"]}, "tenant"),
        ({"t": 0, "type": "admit", "rid": "a", "want": "logprobs"}, "want"),
        ({"t": 0, "type": "admit", "rid": "a", "params": {"temperature": "hot"}}, "temperature"),
        ({"t": 0, "type": "admit", "rid": "a", "params": {"top_p": True}}, "top_p"),
        ({"t": 0, "type": "admit", "rid": "a", "params": {"seed": 1 << 64}}, "seed"),
        ({"t": 0, "type": "admit", "rid": "a", "params": {"logit_bias": {"x": 1}}}, "logit_bias"),
        ({"t": 0, "type": "admit", "rid": "a", "params": {"logit_bias": {"01": 1}}}, "logit_bias"),
        ({"t": 0, "type": "admit", "rid": "a", "params": {"logit_bias": {"1": "x"}}}, "logit_bias"),
        ({"t": 0, "type": "admit", "rid": "a", "params": {"_json": "{}"}}, "_json"),
        ({"t": 0, "type": "forward_done", "step": "1"}, "step '1'"),
        ({"t": 0, "type": "forward_done", "step": 1, "digest": 5}, "digest 5"),
        ({"t": 0, "type": "started", "config": [1]}, "config"),
        ({"t": 0, "type": "started", "kept": [1]}, "kept"),
        ({"t": 0, "type": "sleep", "tags": "kv"}, "tags 'kv'"),
        ({"t": 0, "type": "pause"}, "mode"),
    ],
)
def test_what_is_no_event_is_refused_by_name(raw: dict[str, Any], says: str) -> None:
    with pytest.raises(CodecError, match=says):
        decode(raw)


# Fields that the reducer judges itself may hold anything: the log gives it back as it was.

numbers = st.sampled_from([0, 1, 16, -1, 16.0, 0.0, 1.5, True, False, None, "16", "", 2**63, 2**64 - 1])
odd = st.one_of(
    numbers, st.lists(numbers, max_size=3), st.dictionaries(texts, numbers, max_size=2),
    st.lists(st.lists(numbers, max_size=2), max_size=2), st.sampled_from(["use", "read", "off"]),
)  # fmt: skip
odd_lists = odd | st.lists(st.integers(0, 40), max_size=6).map(tuple) | st.lists(st.integers(-1, 40), max_size=6).map(
    lambda x: np.array(x, np.int64))  # fmt: skip
odd_params = dict.fromkeys(JUDGED[SamplingParams], odd) | {"stop_token_ids": odd_lists}
odd_fields = dict.fromkeys(JUDGED[Admit], odd) | {"prompt": odd_lists}
sound = {"prompt": [1, 2, 3]}


@settings(max_examples=300)
@given(
    st.fixed_dictionaries({}, optional=odd_params), st.fixed_dictionaries({}, optional=odd_fields),
    st.fixed_dictionaries({}, optional={"tokens": odd_lists, "counts": st.none() | odd, "ended": odd, "error": odd}),
)  # fmt: skip
def test_an_odd_value_means_the_same_when_it_is_read_back(
    params: dict[str, Any], admit: dict[str, Any], result: dict[str, Any]
) -> None:
    config = Config(num_pages=8, page_size=2, max_running=2, max_batch_tokens=8, max_model_len=12)
    live, replayed = State(config), State(config)
    events: list[Event] = [
        Admit(t=0, rid="b", prompt=[5, 6]),
        Admit(t=1, rid="a", params=SamplingParams(**params), **{**sound, **admit}),
        Tick(t=2),
        ForwardDone(t=3, step=1, **result),
        Tick(t=4),
    ]
    for event in events:
        try:
            raw = encode(event)
        except (CodecError, TypeError):
            return  # nothing of it would be in a log
        outcomes: list[Any] = []
        for state, one in ((live, event), (replayed, decode(orjson.loads(raw)))):
            effects = step(state, one)
            outcomes.append([list(effects.outputs), effects.acks, effects.wake_at, state.digest()])
        assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_tokens", 16.0), ("min_tokens", False), ("n", True), ("n", 1.0), ("max_tokens", 16), ("min_tokens", 0.0)],
)
def test_what_equals_a_default_but_is_of_another_type_is_written(name: str, value: Any) -> None:
    back = decode(orjson.loads(encode(Admit(t=0, rid="a", params=SamplingParams(**{name: value})))))
    assert isinstance(back, Admit)
    found = getattr(back.params, name)
    assert found == value and type(found) is type(value)


def test_a_deadline_of_no_integer_is_written() -> None:
    back = decode(orjson.loads(encode(Admit(t=0, rid="a", deadline=0.0))))  # type: ignore[arg-type]
    assert isinstance(back, Admit) and type(back.deadline) is float


@pytest.mark.parametrize(
    "event",
    [
        Admit(t=0, rid=5),  # type: ignore[arg-type]
        Admit(t=1.5, rid="a"),  # type: ignore[arg-type]
        Admit(t=0, rid="a", prompt=[float("nan")]),  # type: ignore[list-item]
        Admit(t=0, rid="a", prompt=np.array([1.5])),  # type: ignore[arg-type]
        Admit(t=0, rid="a", params=None),  # type: ignore[arg-type]
        Admit(t=0, rid="a", params=SamplingParams(temperature=float("nan"))),
        Admit(t=0, rid="a", params=SamplingParams(temperature=float("inf"))),
        Admit(t=0, rid="a", params=SamplingParams(max_tokens=np.int64(5))),  # type: ignore[arg-type]
        Admit(t=0, rid="a", params=SamplingParams(max_tokens=(1,))),  # type: ignore[arg-type]
        Admit(t=0, rid="a", params=SamplingParams(logit_bias={"5": 1.0})),  # type: ignore[dict-item]
        ForwardDone(t=0, step="1"),  # type: ignore[arg-type]
        ForwardDone(t=0, step=1, digest=5),  # type: ignore[arg-type]
        Started(t=0, laws="1"),  # type: ignore[arg-type]
    ],
    ids=str,
)
def test_what_would_not_read_back_as_it_is_is_not_written(event: Event) -> None:
    with pytest.raises(CodecError):
        encode(event)


wild = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False) | texts,  # JSON has no more
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=3), max_leaves=8,
)  # fmt: skip


@settings(max_examples=300)
@given(every_event, st.data())
def test_a_record_with_anything_in_it_is_read_or_refused(event: Event, draw: st.DataObject) -> None:
    """Whatever stands in a whole record, `decode` gives an event or raises `CodecError`; an event is written again."""
    raw = orjson.loads(encode(event))
    names = [*raw, "plan", "params", "digest"] if len(raw) < 3 else [*raw]
    target = raw
    while True:
        name = draw.draw(st.sampled_from(sorted(names)))
        inner = target.get(name)
        if isinstance(inner, dict) and inner and draw.draw(st.booleans()):
            target, names = inner, [*inner]
            continue
        target[name] = draw.draw(wild)
        break
    try:
        back = decode(raw)
    except CodecError:
        return
    assert same(decode(orjson.loads(encode(back))), back)


usual_params = st.builds(SamplingParams, max_tokens=counts, stop_token_ids=lists.map(tuple), seed=st.none() | counts)
plain_admits = st.builds(Admit, t=counts, rid=texts, prompt=tokens, params=usual_params | params)


@given(plain_admits, st.none() | counts)
def test_a_request_like_most_is_written_as_any_other(admit: Admit, seq: int | None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "_is_plain_admit", lambda admit: False)
        field_by_field = encode(admit, seq)
    assert encode(admit, seq) == field_by_field
