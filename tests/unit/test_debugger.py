"""The debugger's server side: what it answers, whom it refuses, and what would have come of it."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from leftfold.events import (
    Abort,
    Admit,
    ControlDone,
    Event,
    EventLog,
    ForwardDone,
    Pause,
    Plan,
    Retention,
    SamplingParams,
    Sleep,
    Tick,
    Wake,
    encode,
    prune,
)
from leftfold.replay.ui import hypothetical, views
from leftfold.replay.ui.api import MOST_WORLDS, Api
from leftfold.replay.ui.http import Server
from leftfold.replay.ui.hypothetical import BadEdit, Edit, Hypothesis
from leftfold.replay.ui.views import compare, cut, differences, moment, pages
from leftfold.replay.worlds import World
from tests.logs import CONFIG, Recorder, record
from tests.unit.test_log_snapshots import NOW, log_with_snapshots
from tests.unit.test_replay_views import simulated


@pytest.fixture(scope="module")
def log() -> EventLog:
    return simulated()


@pytest.fixture(scope="module")
def api(log: EventLog) -> Api:
    made = Api(log, "made")
    made.start().join(60)
    return made


def ask(api: Api, name: str, status: int = 200, **query: Any) -> Any:
    answer = api.answer("GET", f"api/{name}", {key: str(value) for key, value in query.items()})
    assert answer.status == status, answer.body
    return json.loads(answer.body)


def imagine(api: Api, status: int = 200, **body: Any) -> Any:
    answer = api.answer("POST", "api/worlds", {}, json.dumps(body).encode())
    assert answer.status == status, answer.body
    for thread in [one for one in threading.enumerate() if one.name == "makes a world"]:
        thread.join(60)
    return json.loads(answer.body)


# What it answers


def test_meta_strip_and_lanes_are_of_the_whole_log(api: Api, log: EventLog) -> None:
    meta = ask(api, "meta")
    assert (meta["first"], meta["last"], meta["requests"], meta["done"]) == (1, len(log), 12, True)
    strip = ask(api, "strip", width=20)
    assert strip["buckets"] == 20 == len(strip["held"]) and max(strip["running"]) == 4
    assert sum(strip["preempted"]) > 0
    lanes = ask(api, "lanes", first=1, last=len(log))
    assert len(lanes["lanes"]) == 12 and len(lanes["codes"]) == len(log)
    assert {lane["rid"] for lane in lanes["lanes"]} == {f"r{n}" for n in range(12)}
    late = ask(api, "lanes", first=len(log) - 3, last=len(log))
    assert 0 < len(late["lanes"]) < 12


def test_a_moment_has_record_plan_state_and_pages(api: Api, log: EventLog) -> None:
    tick = next(seq for seq, event in log if isinstance(event, Tick) and event.plan is not None and event.plan.preempt)
    found = ask(api, "moment", seq=tick)
    assert found["type"] == "tick" and found["plan"]["seq"] == tick and found["plan"]["flying"]
    assert {row["rid"] for row in found["plan"]["rows"]} <= {row["rid"] for row in found["live"]}
    assert any(reason["kind"] == "victim" for reason in found["reasons"])
    owners, counts = found["pages"]["runs"][::2], found["pages"]["runs"][1::2]
    held = sum(count for owner, count in zip(owners, counts, strict=True) if owner >= 0)
    assert found["figures"]["pages_held"] == held
    after = ask(api, "moment", seq=tick + 1)
    assert after["outputs"] and after["plan"]["seq"] == tick


def test_shared_and_cached_pages_are_told_apart() -> None:
    made = EventLog.memory()
    record(made)
    world = World.read(made)
    seen: dict[str, int] = {"shared": 0, "cached": 0, "free": 0, "held": 0}
    for seq in range(world.first, world.last + 1):
        state = world.fold_at(seq).state
        assert state is not None
        found = pages(state)
        owners = found["runs"][::2]
        counts = found["runs"][1::2]
        assert sum(counts) == found["count"] == len(state.pool)
        assert [[page, refs] for page, refs, _ in found["shared"]] == [
            [page, refs] for page, refs in enumerate(state.pool.refs) if refs > 1
        ]
        for page, refs, by in found["shared"]:
            assert len(by) == refs and all(page in state.live[tuple(found["owners"][at])].seat.pages for at in by)
        seen["shared"] += len(found["shared"])
        for owner, count in zip(owners, counts, strict=True):
            seen[{-1: "free", -2: "cached"}.get(owner, "held")] += count
    assert all(seen.values()), seen


def test_search_jump_and_explain(api: Api) -> None:
    found = ask(api, "search", text="R1")
    assert found["count"] == 3 and {one["rid"] for one in found["found"]} == {"r1", "r10", "r11"}
    life = next(one for one in found["found"] if one["rid"] == "r11")
    told = ask(api, "explain", life=life["number"], seq=life["end"])
    assert any("waited" in text for text in told["sentences"]) and told["outcome"][-1].endswith("it ended: length.")
    edges = []
    seq = 1
    while (after := ask(api, "jump", seq=seq, what="edge", life=life["number"])["seq"]) is not None:
        edges.append(seq := after)
    assert edges == sorted(set(edges)) and edges[-1] == life["end"] and life["first"] in edges
    assert ask(api, "jump", seq=seq, what="edge", life=life["number"], back=1)["seq"] == edges[-2]
    assert ask(api, "jump", seq=1, what="time", t=10**12)["seq"] == ask(api, "meta")["last"]
    assert ask(api, "jump", seq=1, what="loud")["seq"] is None


def test_a_comparison_with_itself_is_empty_and_with_another_names_what_differs(api: Api) -> None:
    assert ask(api, "compare", a=40, b=40) == {
        "a": {"seq": 40, "t": ask(api, "moment", seq=40)["t"]}, "b": {"seq": 40, "t": ask(api, "moment", seq=40)["t"]},
        "figures": [], "requests": [], "request_count": 0, "pages": [], "same": True,
    }  # fmt: skip
    found = ask(api, "compare", a=40, b=90)
    assert not found["same"] and found["requests"] and found["pages"]
    assert {name for name, _, _ in found["figures"]} >= {"steps", "generation_tokens"}


@pytest.mark.parametrize(("name", "query", "status"), [
    ("moment", {}, 400), ("moment", {"seq": "x"}, 400), ("moment", {"seq": 10**9}, 404), ("moment", {"seq": 0}, 404),
    ("moment", {"seq": 1, "world": 77}, 404), ("nothing", {}, 404), ("request", {"life": 999}, 404),
    ("jump", {"seq": 1, "what": "x"}, 400), ("differences", {}, 400), ("worlds", {}, 405),
    ("explain", {"life": 3, "seq": 10**9}, 404),
])  # fmt: skip
def test_wrong_questions_are_told_so(api: Api, name: str, query: dict[str, Any], status: int) -> None:
    assert ask(api, name, status, **query)["error"]


def test_before_a_request_arrives_there_is_nothing_to_explain(api: Api) -> None:
    [life] = ask(api, "search", text="r11")["found"]
    assert life["seq"] > 1
    told = ask(api, "explain", life=life["number"], seq=1)
    assert told == {"sentences": [], "outcome": [f"It arrives at record {life['seq']}."], "divergence": None}


def test_at_the_end_only_those_that_end_there_are_named(api: Api, log: EventLog) -> None:
    found = ask(api, "moment", seq=len(log))
    assert found["live"] == [] and 0 < len(found["numbers"]) < 12
    assert {rid for rid, _, _, _ in found["numbers"]} == {out["rid"] for out in found["outputs"]}


def test_before_the_first_record_is_read_there_is_a_strip_without_buckets() -> None:
    made = Api(EventLog.memory(), "nothing yet", expected=7)
    assert ask(made, "strip") == {"first": 1, "last": 0, "buckets": 0}
    meta = ask(made, "meta")
    assert (meta["first"], meta["last"], meta["expected"], meta["done"]) == (1, 0, 7, False)


def test_a_log_that_breaks_off_is_shown_as_far_as_it_goes_and_says_why(tmp_path: Path) -> None:
    with EventLog.open(tmp_path) as made:
        record(made)
        events = len(made)
    segment = tmp_path / "00000001.jsonl"
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    broken = Api(EventLog.read(tmp_path), "broken")
    broken.start().join(60)
    meta = ask(broken, "meta")
    assert meta["done"] and "00000001.jsonl" in meta["error"] and 0 < meta["last"] < events
    assert ask(broken, "moment", seq=meta["last"])["seq"] == meta["last"]


def test_long_texts_are_cut_and_say_how_long_they_are() -> None:
    made = EventLog.memory()
    Recorder(made, model="m" * 5000)
    told = moment(world := World.read(made), world.moment(1))["record"]["model"]
    assert told == "m" * 2000 + "… 5000 characters"
    assert cut({"a": [1] * 70, "b": "x" * 2000}) == {"a": [*[1] * 64, "… 70 in all"], "b": "x" * 2000}


def test_lanes_of_many_records_have_no_types(monkeypatch: pytest.MonkeyPatch, api: Api) -> None:
    monkeypatch.setattr(views, "MOST_CODES", 20)
    few, many = ask(api, "lanes", first=1, last=21), ask(api, "lanes", first=1, last=22)
    assert len(few["codes"]) == len(few["t"]) == 21 and "codes" not in many and "t" not in many
    assert few["count"] == many["count"] == 12


def test_a_pool_of_another_size_has_no_pages_to_compare() -> None:
    made = Recorder(EventLog.memory())
    made.config = replace(CONFIG, num_pages=20)
    made.start()
    made.admit("a", [1, 2, 3])
    made.run()
    found = compare((world := World.read(made.log)).moment(1), world.moment(world.last))
    assert found["pages"] == [] and ["num_pages", 8, 20] in found["figures"] and not found["same"]


def test_files_are_those_of_the_page_alone(api: Api) -> None:
    assert api.answer("POST", "app.js", {}).status == 405
    page = api.answer("GET", "", {})
    assert page.status == 200 and b"<script" in page.body and b"<script>" not in page.body
    for path in ("app.js", "style.css", "icon.svg", "panels.js"):
        assert api.answer("GET", path, {}).status == 200
    for path in ("../api.py", "__init__.py", "/etc/passwd", "app.js/../x"):
        assert api.answer("GET", path, {}).status == 404


# What would have come of it


def test_an_event_that_changes_nothing_leaves_everything_as_it_was(log: EventLog) -> None:
    """The future is decided anew, and is the same record by record, since nothing that decides it has changed."""
    base = World.read(log)
    for seq in (3, 40, base.last // 2):
        hypothesis = Hypothesis(base, Edit(seq, Abort(t=0, rid="nobody")))
        for _ in hypothesis.run():
            pass
        world = hypothesis.world
        assert world.done and world.last == base.last + 1 and hypothesis.made_up == 0
        for at in range(base.first, base.last + 1):
            there = at if at <= seq else at + 1
            assert encode(world.tape.event(there), 1) == encode(base.tape.event(at), 1), at
        assert differences(base, world, hypothesis.kept)["rows"] == []
        ours, theirs = world.fold_at(world.last).state, base.fold_at(base.last).state
        assert ours is not None and theirs is not None
        assert {**ours.stats(), "ignored": 0} == {**theirs.stats(), "ignored": 0}


def test_moments_before_the_edit_are_the_bases_and_later_ones_its_own(log: EventLog) -> None:
    base = World.read(log)
    rid = next(iter(base.fold_at(60).state.live))[0]  # type: ignore[union-attr]
    hypothesis = Hypothesis(base, Edit(60, Abort(t=0, rid=rid)))
    for _ in hypothesis.run():
        hypothesis.world.end.state.check()  # type: ignore[union-attr]
    world = hypothesis.world
    for seq in (1, 30, 60):
        assert world.moment(seq).state.digest() == base.moment(seq).state.digest()
    assert isinstance(world.tape.event(61), Abort)
    assert world.moment(61).state.digest() != base.moment(61).state.digest()
    told = differences(base, world, hypothesis.kept)
    assert {row["rid"] for row in told["rows"]} >= {rid}
    later = World.read(list(world.tape.between(1, world.last)))
    assert later.end.state.digest() == world.end.state.digest(), "its records alone give it"  # type: ignore[union-attr]


def test_without_a_request_the_others_are_served_sooner(api: Api, log: EventLog) -> None:
    seq = next(seq for seq, event in log if isinstance(event, Admit) and event.rid == "r0")
    made = imagine(api, seq=seq, skip=True, horizon=0)
    meta = ask(api, "meta", world=made["world"])
    assert meta["done"] and not meta["error"] and meta["requests"] == 11
    assert meta["worlds"][-1]["title"] == f"without record {seq}"
    found = ask(api, "differences", world=made["world"])
    gains = [row["after"]["ttft_ms"] - row["before"]["ttft_ms"] for row in found["rows"] if row["before"]]
    assert gains and sum(gains) < 0
    compared = ask(api, "compare", a=seq, b=seq, b_world=made["world"])
    assert not compared["same"]


def test_a_request_that_is_put_in_runs_to_its_end(api: Api, log: EventLog) -> None:
    made = imagine(api, seq=len(log), event={"type": "admit", "rid": "new", "prompt_tokens": 9, "max_tokens": 5})
    world = ask(api, "meta", world=made["world"])
    [new] = ask(api, "search", world=made["world"], text="new")["found"]
    assert new["reason"] == "length" and new["tokens"] == 5 and world["made_up"] == 5
    [row] = ask(api, "differences", world=made["world"])["rows"]
    assert row["rid"] == "new" and row["before"] is None and row["after"]["tokens"] == 5
    like = imagine(api, seq=10, event={"type": "admit", "rid": "twin", "like": "r3"})
    [twin] = ask(api, "search", world=like["world"], text="twin")["found"]
    assert twin["prompt"] == 13


@pytest.mark.parametrize(("body", "status"), [
    ({"seq": 1, "skip": True}, 400), ({"seq": 10**9, "skip": True}, 404), ({"seq": True, "skip": True}, 400),
    ({"seq": 5, "event": {"type": "tick"}}, 400), ({"seq": 5, "event": {"type": "pause"}}, 400), ({"seq": 5}, 400),
    ({"seq": 5, "event": {"type": "pause", "mode": 3}}, 400), ({"seq": 5, "skip": True, "world": 99}, 404),
    ({"seq": 5, "event": {"type": "admit", "like": "who"}}, 400), ({"seq": 5, "skip": True, "horizon": -1}, 400),
    ({"seq": 5, "event": {"type": "admit", "prompt_tokens": "x"}}, 400), ([5], 400),
    ({"seq": 5, "event": {"type": "admit", "rid": 7}}, 400),
    ({"seq": 5, "event": {"type": "admit", "max_tokens": 0}}, 400),
])  # fmt: skip
def test_edits_that_cannot_be_made_are_told_so(api: Api, body: Any, status: int) -> None:
    answer = api.answer("POST", "api/worlds", {}, json.dumps(body).encode())
    assert answer.status == status and json.loads(answer.body)["error"]
    assert api.answer("POST", "api/worlds", {}, b"{").status == 400


def test_the_engines_own_events_cannot_be_put_in(log: EventLog) -> None:
    with pytest.raises(BadEdit, match="a Tick cannot be put in"):
        Hypothesis(World.read(log), Edit(5, Tick(t=0)))


def test_a_pause_that_is_put_in_stops_the_rows_and_a_log_of_everything_can_be_edited_anywhere() -> None:
    made = EventLog.memory()
    record(made)
    base = World.read(made)
    for seq in range(2, base.last + 1):
        more = Admit(t=0, rid="x", prompt=[1, 2, 3], params=SamplingParams(max_tokens=3))
        for edit in (Edit(seq), Edit(seq, Pause(t=0, mode="keep")), Edit(seq, more)):
            hypothesis = Hypothesis(base, edit)
            for _ in hypothesis.run():
                hypothesis.world.end.state.check(False)  # type: ignore[union-attr]
            assert hypothesis.world.done


def made_of(base: World, edit: Edit) -> Hypothesis:
    hypothesis = Hypothesis(base, edit)
    for _ in hypothesis.run():
        hypothesis.world.end.state.check(False)  # type: ignore[union-attr]
    assert hypothesis.world.done
    return hypothesis


def events_after(hypothesis: Hypothesis) -> list[Event]:
    world = hypothesis.world
    return [one.event for one in world.tape.between(hypothesis.kept + 1, world.last)]


def idle_between(gap: int) -> World:
    """Two requests, `gap` µs apart, each done soon."""
    made = Recorder(EventLog.memory())
    made.admit("first", [1, 2, 3])
    made.run()
    made.t += gap
    made.admit("second", [1, 2, 3])
    made.run()
    return World.read(made.log)


def test_while_the_logs_engine_idles_another_may_work() -> None:
    """At the log's own pace, from the last thing that happened until the next that comes from outside."""
    base = idle_between(95)
    more = Admit(t=0, rid="more", prompt=[7, 8], params=SamplingParams(max_tokens=20))
    hypothesis = made_of(base, Edit(2, more))
    second = next(event for event in events_after(hypothesis) if getattr(event, "rid", "") == "second")
    before = [event.t for event in events_after(hypothesis) if isinstance(event, ForwardDone) and event.t < second.t]
    recorded = [one.event.t for one in base.tape.between(1, base.last) if isinstance(one.event, ForwardDone)]
    idle = [t for t in before if t not in recorded]
    assert len(idle) > 3 and {b - a for a, b in zip(idle, idle[1:], strict=False)} == {hypothesis._pace}
    assert [life.reason for life in hypothesis.world.overview.lives.all] == ["length"] * 3
    kept = differences(base, hypothesis.world, hypothesis.kept)
    assert [row["rid"] for row in kept["rows"]][0] == "more" and hypothesis.made_up == 20


def test_a_horizon_ends_the_world_early(log: EventLog) -> None:
    base = World.read(log)
    hypothesis = made_of(base, Edit(40, Abort(t=0, rid="nobody"), horizon=6))
    assert hypothesis.world.last == 40 + 1 + 6 and hypothesis.world.end.state.live  # type: ignore[union-attr]


def test_after_the_logs_end_no_more_is_made_than_so_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hypothetical, "BEYOND", 9)
    base = idle_between(0)
    more = Admit(t=0, rid="more", prompt=[7, 8], params=SamplingParams(max_tokens=20))
    hypothesis = made_of(base, Edit(base.last, more))
    assert hypothesis.world.last == base.last + 1 + 9
    assert [life.reason for life in hypothesis.world.overview.lives.all] == ["length", "length", ""]


def test_a_deadline_comes_although_nothing_else_does() -> None:
    made = Recorder(EventLog.memory())
    made.take(Admit, rid="a", prompt=[1, 2], params=SamplingParams(max_tokens=5), deadline=70_000)
    arrived = made.t
    made.run()
    base = World.read(made.log)
    hypothesis = made_of(base, Edit(2, Pause(t=0, mode="keep")))
    *_, last = events_after(hypothesis)
    assert isinstance(last, Tick) and last.t == arrived + 70_000
    [life] = hypothesis.world.overview.lives.all
    assert (life.reason, life.end_t) == ("deadline", last.t)


def test_operations_end_where_they_did() -> None:
    made = Recorder(EventLog.memory())
    made.admit("a", [1, 2, 3], max_tokens=9)
    made.run(2)
    made.operate(Sleep, call="nap", tags=("kv",))
    made.operate(Wake, call="up", tags=("kv",))
    made.run()
    base = World.read(made.log)
    same = made_of(base, Edit(3, Abort(t=0, rid="nobody")))
    assert same.world.last == base.last + 1 and differences(base, same.world, same.kept)["rows"] == []
    without = made_of(base, Edit(next(seq for seq, event in made.log if isinstance(event, Sleep))))
    told = [type(event) for event in events_after(without)]
    assert Wake in told and told.count(ControlDone) <= 1  # nobody sleeps: the first of them has nothing to end
    assert without.world.end.state.asleep == base.end.state.asleep == []  # type: ignore[union-attr]


def test_like_a_request_that_came_before_the_log_begins_there_can_be_none(tmp_path: Path) -> None:
    log_with_snapshots(tmp_path, every=3)
    assert prune(tmp_path, Retention(size=0), NOW)
    made = Api(EventLog.read(tmp_path), "pruned")
    made.start().join(60)
    world = made.entries[0].world
    rid = world.overview.lives.all[0].key[0]
    event = {"type": "admit", "like": rid}
    answer = imagine(made, 400, seq=world.last, event=event)
    assert answer["error"] == "like: that request came before the log's first record"


def test_only_so_many_worlds_are_kept_and_those_that_left_are_not_made_on(
    log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Api(log, "made")
    made.start().join(60)
    go = threading.Event()
    run = Hypothesis.run

    def waits(self: Hypothesis) -> Iterator[None]:
        go.wait(60)
        yield from run(self)

    monkeypatch.setattr(Hypothesis, "run", waits)
    body = json.dumps({"seq": 40, "skip": True}).encode()
    entries = []
    for number in range(1, MOST_WORLDS + 2):
        assert json.loads(made.answer("POST", "api/worlds", {}, body).body)["world"] == number
        entries.append(made.entries[number])
    go.set()
    for thread in [one for one in threading.enumerate() if one.name == "makes a world"]:
        thread.join(60)
    assert [entry.world.done for entry in entries] == [False] + [True] * MOST_WORLDS
    assert "no world 1 any more" in ask(made, "meta", 404, world=1)["error"]
    assert [one["world"] for one in ask(made, "meta")["worlds"]] == [0, *range(2, MOST_WORLDS + 2)]


@pytest.mark.parametrize(("planner", "said"), [
    (lambda state, t: {}["planted"], "KeyError: 'planted'"),
    (lambda state, t: Plan(step=state.next_step, preempt=(99,)), "preempt"),
])  # fmt: skip
def test_a_planner_that_fails_is_shown_with_what_it_made(
    api: Api, planner: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hypothetical, "decide", planner)
    made = imagine(api, seq=40, event={"type": "abort", "rid": "nobody"})
    meta = ask(api, "meta", world=made["world"])
    assert meta["done"] and said in meta["error"] and meta["last"] >= 41


# Whom it refuses


@pytest.fixture
def server(api: Api) -> Iterator[Server]:
    with Server(api) as made:
        thread = threading.Thread(target=made.serve_forever, daemon=True)
        thread.start()
        yield made
        made.shutdown()
        thread.join(10)


def fetch(server: Server, path: str, method: str = "GET", body: bytes | None = None, **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body, named)
    answer = connection.getresponse()
    return answer.status, answer


def test_the_token_opens_and_nothing_else_does(server: Server) -> None:
    path = f"/{server.token}/"
    status, answer = fetch(server, path)
    assert status == 200 and "default-src 'none'" in answer.headers["Content-Security-Policy"]
    assert answer.headers["Referrer-Policy"] == "no-referrer"
    assert server.url == f"http://127.0.0.1:{server.server_address[1]}{path}"
    assert fetch(server, f"{path}api/moment?{urlencode({'seq': 5})}")[0] == 200
    last = "y" if server.token.endswith("x") else "x"
    for wrong in ("/", "/api/meta", f"/{server.token}", f"/{server.token[:-1]}{last}/", f"/x/{server.token}/", "//"):
        assert fetch(server, wrong)[0] == 403, wrong


def test_an_address_of_the_sixth_version_is_bracketed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "server_address", ("::1", 8000, 0, 0))
    assert server.url == f"http://[::1]:8000/{server.token}/"


@pytest.mark.parametrize(("host", "status"), [
    ("evil.example", 421), ("localhost.evil.example:80", 421), ("", 421), ("127.0.0.1:1", 200), ("localhost", 200),
    ("[::1]:99", 200), ("user@evil.example", 421), ("[bad", 400),
])  # fmt: skip
def test_a_host_that_nobody_named_is_refused(server: Server, host: str, status: int) -> None:
    assert fetch(server, f"/{server.token}/api/meta", Host=host)[0] == status


def test_what_is_posted_is_json_of_a_size(server: Server) -> None:
    path = f"/{server.token}/api/worlds"
    body = json.dumps({"seq": 5, "skip": True}).encode()
    assert fetch(server, path, "POST", body, Content_Type="text/plain")[0] == 415
    assert fetch(server, path, "POST", body, Content_Type="application/json")[0] == 200
    assert fetch(server, path, "POST", None, Content_Type="application/json", Content_Length=str(1 << 30))[0] == 413
    assert fetch(server, path, "PUT", body)[0] == 501
