"""A sanitized log replays to equal plans, whatever happens in it, and tells nothing that the log said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leftfold.events import (
    EVENTS,
    Admit,
    Call,
    Control,
    ControlDone,
    Event,
    EventLog,
    ForwardDone,
    Plan,
    Record,
    SamplingParams,
    Started,
    Tick,
    UpdateWeights,
    decode,
    encode,
)
from leftfold.events.codec import plan_json
from leftfold.events.keyed import TokenCipher
from leftfold.events.plan import Copy, Prepare, Send
from leftfold.fsm import Config, Effects, State, step
from leftfold.replay.fuzzing import World
from leftfold.replay.sanitize import SanitizeError, Sanitizer, sanitize, survey
from leftfold.replay.verify import verify
from tests.logs import CONFIG, record
from tests.watching import runs, watch

KEY = b"a key of some length"


def logs_of_runs(seed: int, count: int) -> list[list[Event]]:
    """Logs of random runs, each with the `Started` that a log begins with."""
    worlds: dict[World, None] = {}

    def look(world: World, event: Event, plan: Plan | None, take: Callable[[], Effects]) -> Effects:
        worlds[world] = None
        return take()

    with pytest.MonkeyPatch.context() as patched:
        watch(patched, look)
        runs(seed, count)
    return [[Started(t=0, config=world.first_config.as_dict(), model="m"), *world.log] for world in worlds]


def sanitized(events: list[Event], key: bytes = KEY) -> list[Event]:
    """Through the codec, as a file would be."""
    keyed = Sanitizer(key, *survey(events))
    found = [keyed.take(seq, event) for seq, event in enumerate(events, 1)]
    return [decode(orjson.loads(encode(event))) for event in found]


def records(events: list[Event]) -> list[Record]:
    return [Record(seq, event) for seq, event in enumerate(events, 1)]


def told(events: list[Event]) -> list[Any]:
    """What every event led to, by slot, page and number: nothing of it may change."""
    state, found = State(Config.from_dict(events[0].config)), []  # type: ignore[union-attr, arg-type]
    for event in events:
        effects = step(state, event)
        plan = effects.plan
        rows = [] if plan is None else [(r.choice, r.slot, r.start, r.length, r.samples, r.pages) for r in plan.rows]
        outputs = [(o.epoch, o.choice, o.position, len(o.tokens), o.finish_reason, o.usage) for o in effects.outputs]
        heard = [type(one).__name__ for one in effects.kv_events]
        found.append((rows, outputs, [ack.ok for ack in effects.acks], heard, effects.wake_at, state.stats()["live"]))
    return found


def test_sanitized_runs_replay_to_equal_plans() -> None:
    hits = steps = clean = 0
    for events in logs_of_runs(3, 24):
        copy = sanitized(events)
        was, now = verify(records(events)), verify(records(copy))
        assert was.damage is None and now.damage is None
        found = [(one.divergence.seq, one.divergence.field) if one.divergence else None for one in (was, now)]
        assert found[0] == found[1] and (found[0] is None or found[0][1] == "digest"), "the fuzzer plants wrong digests"
        clean += was.clean
        assert (was.steps, was.tokens) == (now.steps, now.tokens)
        assert told(events) == told(copy)
        names = {event.rid: other.rid for event, other in zip(events, copy, strict=True) if isinstance(event, Admit)}
        assert len(set(names.values())) == len(names)
        for event, other in zip(events, copy, strict=True):
            if isinstance(event, Tick) and event.plan is not None:
                mapped = replace(
                    event.plan,
                    join=[join._replace(rid=names[join.rid]) for join in event.plan.join],
                    ends=[end._replace(rid=names[end.rid]) for end in event.plan.ends],
                    ops=other.plan.ops,
                )
                assert plan_json(mapped) == plan_json(other.plan)
                hits += sum(join.start > 0 for join in event.plan.join)
        steps += was.steps
    assert steps > 500 and hits > 20 and clean > 5


def test_a_divergence_stays_where_it_was() -> None:
    log = EventLog.memory()
    record(log)
    events = [one.event for one in log]
    at = next(i for i, one in enumerate(events) if isinstance(one, Tick) and one.plan and one.plan.chunks and i > 20)
    spoilt = replace(events[at].plan, chunks=[events[at].plan.chunks[0]._replace(length=1, samples=False)])
    events[at] = Tick(t=events[at].t, plan=spoilt)
    was, now = verify(records(events)), verify(records(sanitized(events)))
    assert was.divergence is not None and now.divergence is not None
    assert (was.divergence.seq, was.divergence.field) == (now.divergence.seq, now.divergence.field)


def test_a_wrong_digest_stays_wrong() -> None:
    log = EventLog.memory()
    record(log)
    events = [one.event for one in log]
    at = next(i for i, one in enumerate(events) if isinstance(one, ForwardDone) and i > 10)
    events[at] = replace(events[at], digest="0" * 32)
    was, now = verify(records(events)), verify(records(sanitized(events)))
    assert was.divergence is not None and now.divergence is not None
    assert (was.divergence.seq, was.divergence.field) == (now.divergence.seq, now.divergence.field)


def test_what_is_wrong_in_a_log_stays_as_wrong_and_says_nothing() -> None:
    """What a reducer refuses in the log it refuses in the copy, for the same reason, and no number of it is left."""
    start = Started(t=0, config=CONFIG.as_dict())
    prompts: list[Any] = [np.array([911.5, 7.25]), [[911], [911, 912]], np.array([[911, 912]]), [911, None], 911.5, []]
    events: list[Event] = [start, *(Admit(t=0, rid=f"r{at}", prompt=prompt) for at, prompt in enumerate(prompts))]
    copy = sanitized(events)
    assert told(events) == told(copy) and all(not one[0] for one in told(copy))
    assert len({event.rid for event in copy if isinstance(event, Admit)}) == len(prompts)
    for event in copy:
        assert b"911" not in encode(event) and b"912" not in encode(event) and b"7.25" not in encode(event)
    shapes = [event.prompt for event in copy if isinstance(event, Admit)]
    assert len(shapes[0]) == 2 and shapes[1] == [[0], [0, 0]] == [[0], shapes[2][0]] and not len(shapes[5])


def test_operations_keep_what_they_do_and_lose_whom_they_name() -> None:
    """No engine of today makes most of them; a log may hold them all the same."""
    ops = [
        Copy(src=(1,), dst=(2,)), Prepare(op=2, kind="k", key="secret", rid="secret"),
        Send(op=3, rid="secret", upto=9, last=True, peer="secret"),
        Control(op=6, verb="sleep", args={"secret": "secret"}),
    ]  # fmt: skip
    start = Started(t=0, config=CONFIG.as_dict())
    copy = sanitized([start, Tick(t=1, plan=Plan(step=1, ops=ops))])[1]
    assert isinstance(copy, Tick) and copy.plan is not None and b"secret" not in encode(copy)
    duplicate, prepared, sent, control = copy.plan.ops
    assert (duplicate.src, duplicate.dst) == ([1], [2]) and (control.op, control.verb) == (6, "sleep")
    assert (prepared.op, prepared.kind, sent.op, sent.upto, sent.last) == (2, "k", 3, 9, True)
    assert prepared.key == prepared.rid == sent.rid == sent.peer


def test_an_error_without_a_text_gets_none() -> None:
    events: list[Event] = [Started(t=0), ForwardDone(t=1, step=1, error={"retry": True, "secret": "secret"})]
    assert sanitized(events)[1].error == {"retry": True}  # type: ignore[union-attr]


def secret_events() -> list[Event]:
    """Something secret in every place that can hold a text."""
    config = Config(num_pages=8, page_size=4, max_running=3, max_batch_tokens=8, max_model_len=32, vocab_size=1000)
    params = SamplingParams(max_tokens=3, stop_token_ids=[7, "secret"], grammar={"secret": ["secret", 5]})  # type: ignore[list-item]
    events: list[Event] = [Started(t=0, config=config.as_dict(), model="secret")]
    for cls in EVENTS:
        values: dict[str, Any] = {}
        for field in fields(cls):
            if field.metadata.get("text") in ("content", "name"):
                kind = str(field.type)
                mapping: Any = {"secret": "secret"} if "Mapping" in kind else ["secret"]
                values[field.name] = "secret" if kind.startswith("str") else mapping
        required = {"step": 1, "op": 1, "moved": 0, "open": True, "mode": "keep", "verb": "v", "set": {}}
        values |= {f.name: required[f.name] for f in fields(cls) if f.name in required}
        if cls is Started:
            values |= {"config": config.as_dict()}
        if cls is ForwardDone:
            values |= {"error": {"text": "secret", "retry": True, "rows": [0, 2], "apart": True, "secret": "secret"}}
        if cls is Admit:
            values |= {"prompt": "secret", "params": params, "want": {"secret": 1}, "cache": "secret"}
        events.append(cls(t=0, **values))
    plain = SamplingParams(max_tokens=2, logit_bias={911: 1.0}, processors=["secret"])
    return [*events, Admit(t=0, rid="secret", prompt=["secret", 911, -99, 2**40], params=plain)]


def test_nothing_that_was_declared_content_or_name_is_left() -> None:
    for before, after in zip(secret_events(), sanitized(secret_events()), strict=True):
        assert type(before) is type(after)
        assert b"secret" not in encode(after)
        assert b"911" not in encode(after) or isinstance(after, Started)


def test_what_decides_in_an_error_stays() -> None:
    failed = [event for event in sanitized(secret_events()) if isinstance(event, ForwardDone)]
    error = failed[0].error
    assert error is not None
    assert {name: error[name] for name in error if name != "text"} == {"retry": True, "rows": [0, 2], "apart": True}


def test_every_field_that_can_hold_a_text_is_declared() -> None:
    numbers = {"prompt", "tokens", "params", "plan", "counts", "ended", "stop_token_ids", "logit_bias"}
    for cls in (*EVENTS, SamplingParams):
        for field in fields(cls):
            texts = any(kind in str(field.type) for kind in ("str", "Any", "Mapping"))
            if texts and field.name not in numbers and not field.name.startswith("_"):
                assert field.metadata.get("text") in ("content", "name", "plain"), (cls, field.name)


def test_operations_are_those_that_their_calls_ask_for() -> None:
    config = Config(num_pages=8, page_size=4, max_running=3, max_batch_tokens=8, max_model_len=32)
    state = State(config)
    events: list[Event] = [Started(t=0, config=config.as_dict())]
    step(state, events[0])
    calls = (UpdateWeights(t=1, call="c", source="/secret", version="v"), Call(t=3, verb="go", args={"secret": [1]}))
    for call in calls:
        step(state, call)
        effects = step(state, Tick(t=call.t))
        assert effects.plan is not None
        events += [call, Tick(t=call.t, plan=effects.plan.plan)]
        for done in (
            ControlDone(t=call.t, op=effects.plan.ops[0].op, info="secret"),  # type: ignore[union-attr]
            ForwardDone(t=call.t, step=effects.plan.step, digest=effects.plan.digest),
        ):
            step(state, done)
            events.append(done)
    copy = sanitized(events)
    assert verify(records(copy)).clean
    assert b"secret" not in b"".join(map(encode, copy))


# The cipher


@given(st.integers(1, 3000), st.sets(st.integers(0, 3100), max_size=9), st.binary(max_size=8))
def test_a_permutation_keeps_fixed_ids_and_sizes_and_collides_never(size: int, fixed: set[int], before: bytes) -> None:
    cipher = TokenCipher(KEY, fixed, [size, 2 * size])
    found = [cipher.permute(before, token) for token in range(min(size, 300))]
    assert len(set(found)) == len(found)
    assert all(0 <= token < size for token in found)
    assert all(cipher.permute(before, token) == token for token in fixed)
    assert all(token not in fixed for at, token in enumerate(found) if at not in fixed)
    assert size <= cipher.permute(before, 2 * size - 1) < 2 * size
    assert cipher.permute(before, 2**31 - 1) >= 2 * size
    assert [cipher.permute(before, wrong) for wrong in (-1, 2**31, 2**40)] == [-1, 2**31, 2**40]


def test_sequences_keep_exactly_their_common_beginning() -> None:
    cipher = TokenCipher(KEY, bounds=[50])
    one, two = [1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 5, 6]
    a, b = cipher.sequence(cipher.start, one)[0], cipher.sequence(cipher.start, two)[0]
    assert a[:3] == b[:3] and a[3] != b[3]
    far = [cipher.sequence(cipher.start, [token, 5, 6, 7])[0][1:] for token in range(50)]
    assert len({tuple(rest) for rest in far}) > 40, "what follows another beginning is another permutation"


def test_other_keys_make_other_copies_and_equal_ones_equal() -> None:
    events = secret_events()
    assert [*map(encode, sanitized(events))] == [*map(encode, sanitized(events))]
    assert [*map(encode, sanitized(events))] != [*map(encode, sanitized(events, b"another key of length"))]


def test_a_log_on_disk_becomes_a_log_on_disk(tmp_path: Path) -> None:
    with EventLog.open(tmp_path / "log", segment_bytes=800) as log:
        record(log)
    count = sanitize(EventLog.read(tmp_path / "log"), tmp_path / "copy")
    copy = EventLog.read(tmp_path / "copy")
    assert count == len(copy) == len(EventLog.read(tmp_path / "log"))
    assert verify(copy).clean


def test_a_log_without_its_beginning_is_refused(tmp_path: Path) -> None:
    with EventLog.open(tmp_path, segment_bytes=300) as log:
        record(log)
    (tmp_path / "00000001.jsonl").unlink()
    with pytest.raises(SanitizeError, match="only one that is whole"):
        sanitize(EventLog.read(tmp_path), tmp_path / "copy")
