"""Policies of a user's own: tried at the start, unable to stop the reducer later, loaded again for their logs."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from leftfold.cli import main
from leftfold.errors import ConfigurationError
from leftfold.events import Admit, EventLog, ForwardDone, SamplingParams, Tick
from leftfold.fsm import POLICIES, Config, Policy, State, step
from leftfold.fsm.policy import fcfs, longest_prefix
from leftfold.keeping import KeptLog
from leftfold.replay.policies import PolicyError, load
from leftfold.replay.verify import verify
from tests.engines import CONFIG, Listener, admit, engine

SOURCE = """
import sys
from enum import IntEnum
from leftfold.fsm import Policy
from leftfold.fsm.policy import fcfs, longest_prefix

Kind = IntEnum("Kind", ["A", "B"])

def longest_first(request):
    return (-len(request.tokens),)

def kinds(request):
    return [Kind.A, True]

def arrival_of(request):
    return (-request.prompt_len, request.arrival)

def by_length_alone(request):
    return (request.prompt_len // 100,)

plain = Policy(fcfs)
cached = Policy(fcfs, longest_prefix, preempts=True)
ranked = Policy(arrival_of)
equal = Policy(by_length_alone)
number = 5

def misspelt(request): return (request.promt_len,)
def nothing(request): return None
def spoils(request): request.tokens = None; return (1,)
def text(request): return "x"
def bare(request): return 3
def words(request): return ("1",)
def fraction(request): return (0.5,)
def huge(request): return (1 << 70,)
def leaves(request): sys.exit("bye")
def takes_none(): return ()

class Mute(Exception):
    def __str__(self): raise ValueError

def mute(request): raise Mute

def none(state, waiting): return None
def other(state, waiting): return waiting[0].copy()
def emptied(state, waiting): waiting.clear()
def raising(state, waiting): raise KeyError("two\\nlines")

chooses_none = Policy(fcfs, none)
chooses_other = Policy(fcfs, other)
chooses_emptied = Policy(fcfs, emptied)
chooses_raising = Policy(fcfs, raising)
rank_of_none = Policy(nothing)
no_function = Policy(fcfs, 7)

def last(state, waiting): return waiting.pop()
chooses_last = Policy(fcfs, last)

def long_fails(request):
    if request.prompt_len in (6, 7):
        raise ZeroDivisionError("six or seven")
    return (-request.prompt_len,)

def chooses_badly_of_three(state, waiting):
    return waiting[-1] if len(waiting) != 3 else "third"
of_three = Policy(fcfs, chooses_badly_of_three)
"""
FAILING = {
    "misspelt": "AttributeError: 'Request' object has no attribute 'promt_len'",
    "nothing": "TypeError: it returned None, not a tuple of integers",
    "text": "TypeError: it returned 'x', not a tuple of integers",
    "bare": "TypeError: it returned 3, not a tuple of integers",
    "words": "TypeError: 'str' object cannot be interpreted as an integer",
    "fraction": "TypeError: 'float' object cannot be interpreted as an integer",
    "huge": "ValueError: it returned (1180591620717411303424,), with an integer of more than 64 bits",
    "leaves": "SystemExit: bye",
    "takes_none": "TypeError: takes_none() takes 0 positional arguments but 1 was given",
    "mute": "Mute: it cannot even be told",
    "chooses_none": "ValueError: it chose None, none of those it was given",
    "chooses_other": "none of those it was given",
    "chooses_emptied": "ValueError: it chose None, none of those it was given",
    "chooses_raising": "KeyError: 'two\\nlines'",
    "rank_of_none": "TypeError: it returned None, not a tuple of integers",
    "no_function": "TypeError: 'int' object is not callable",
}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "users_policies.py").write_text(SOURCE)
    (tmp_path / "broken_policies.py").write_text("def f(\n")
    (tmp_path / "needy_policies.py").write_text("import no_such_library_at_all")
    (tmp_path / "quitting_policies.py").write_text("raise SystemExit(0)")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "users_policies", raising=False)
    return "users_policies"


def order(policy: str, lengths: tuple[int, ...] = (3, 9, 5)) -> list[int]:
    """Lengths of prompts that came at once, in the order in which they ran, alone each."""
    state = State(Config(64, 4, 1, 512, 256, policy=policy))
    for index, length in enumerate(lengths):
        step(state, Admit(t=0, rid=f"r{index}", prompt=[1] * length, params=SamplingParams(max_tokens=1)))
    ran: list[int] = []
    while len(ran) < len(lengths):
        state.check()
        for request in [*state.waiting][:1]:
            assert request.rank[-1] == request.arrival
        plan = step(state, Tick(t=1)).plan
        assert plan is not None
        (row,) = plan.rows
        ran.append(lengths[int(row.rid[1:])])
        step(state, ForwardDone(t=1, step=plan.step, tokens=[5], digest=plan.digest))
    return ran


def test_a_function_ranks_requests(module: str) -> None:
    assert order(load(f"{module}:longest_first")) == [9, 5, 3]
    assert order(load(f"{module}:kinds")) == [3, 9, 5]


def test_a_policy_object_is_taken_as_it_is(module: str) -> None:
    assert load(f"{module}:plain") == f"{module}:plain" and load("fcfs") == "fcfs"
    assert POLICIES[f"{module}:plain"] == Policy(fcfs)
    load(f"{module}:cached")
    assert POLICIES[f"{module}:cached"] == Policy(fcfs, longest_prefix, True)
    assert order(load(f"{module}:ranked")) == [9, 5, 3]
    assert order(load(f"{module}:chooses_last")) == [5, 9, 3]


def test_ranks_that_are_equal_are_told_apart_by_arrival(module: str) -> None:
    assert order(load(f"{module}:equal"), (120, 3, 130, 4)) == [3, 4, 120, 130]


@pytest.mark.parametrize(
    "name",
    [
        "nobody", "no_such_module:f", "users_policies:nowhere", "users_policies:number", ":f", "broken_policies:f",
        "quitting_policies:f",
    ],
)  # fmt: skip
def test_what_is_no_policy_is_named(module: str, name: str) -> None:
    with pytest.raises(PolicyError, match=name.replace(".", r"\.")):
        load(name)
    assert name not in POLICIES


def test_whoever_forgot_the_path_is_told_of_it(module: str) -> None:
    text = r"No module named 'no_such_module': it is looked for on PYTHONPATH \(PYTHONPATH=. for this folder\)"
    with pytest.raises(PolicyError, match=text):
        load("no_such_module.deeper:f")
    with pytest.raises(PolicyError, match="No module named 'no_such_library_at_all'$"):
        load("needy_policies:f")


@pytest.mark.parametrize("name", FAILING)
def test_a_policy_that_fails_is_refused_before_anybody_asks(
    module: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(PolicyError) as raised:
        load(f"{module}:{name}")
    text = str(raised.value)
    assert text.startswith(f"policy '{module}:{name}' failed on a request: ") and text.endswith(FAILING[name])
    assert "\n" not in text and f"{module}:{name}" not in POLICIES and not caplog.records


def test_one_that_changes_what_it_is_shown_is_refused(module: str) -> None:
    with pytest.raises(PolicyError, match="failed on a request: TypeError: object of type 'NoneType' has no len"):
        load(f"{module}:spoils")
    assert f"{module}:spoils" not in POLICIES


def test_a_known_one_that_fails_later_stays_known(module: str) -> None:
    name = load(f"{module}:misspelt", tried=False)
    with pytest.raises(PolicyError, match="promt_len"):
        load(name)
    assert name in POLICIES and order(name) == [3, 9, 5]


@pytest.mark.parametrize("name", FAILING)
def test_a_failing_policy_never_stops_the_reducer(module: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    assert order(load(f"{module}:{name}", tried=False), (3, 9, 5, 7)) == [3, 9, 5, 7]
    (said,) = caplog.records
    assert said.levelno == logging.WARNING and f"policy '{module}:{name}' failed on a request" in said.message
    assert FAILING[name] in said.message and "\n" not in said.message


def test_only_what_fails_is_decided_otherwise(module: str, caplog: pytest.LogCaptureFixture) -> None:
    assert order(load(f"{module}:long_fails"), (3, 7, 9, 6)) == [9, 3, 7, 6]
    assert order(load(f"{module}:of_three"), (3, 7, 9, 6)) == [6, 3, 9, 7]
    assert [record.message.partition(":")[2].partition("'")[0] for record in caplog.records] == [
        "long_fails", "of_three",
    ]  # fmt: skip


def test_whoever_asks_for_it_hears_of_every_failure(module: str) -> None:
    for name in ("long_fails", "of_three"):
        with pytest.raises(PolicyError, match=f"{name}' failed on a request"):
            order(load(f"{module}:{name}", strict=True), (3, 7, 9))


@pytest.mark.parametrize("name", ["long_fails", "of_three", "misspelt", "chooses_none", "nothing"])
def test_an_engine_goes_on_and_its_log_replays(name: str, module: str, tmp_path: Path) -> None:
    policy = load(f"{module}:{name}", tried=False)
    config = Config(**{**CONFIG.as_dict(), "max_running": 1, "policy": policy})
    listener = Listener(count=8)
    made = engine(listener, log=EventLog.open(tmp_path / "log"), config=config)
    for index in range(8):
        admit(made, f"r{index}", [1] * (5 + index % 4), max_tokens=3)
    made.run()
    assert all(len(listener.tokens(f"r{index}")) == 3 for index in range(8))
    del POLICIES[policy]
    load(policy, tried=False)
    assert verify(EventLog.read(tmp_path / "log")).clean
    again = Listener()
    made = engine(again, log=EventLog.open(tmp_path / "log"), config=config)
    admit(made, "late", [1] * 7)
    made.run()
    assert len(again.tokens("late")) == 6 and made.fault == ""


def served(log: Path, policy: str, snapshot_every: int) -> None:
    """One start of an engine on `log`, and one request."""
    listener = Listener()
    config = Config(**{**CONFIG.as_dict(), "policy": policy})
    kept = KeptLog(EventLog.open(log), log, snapshot_every=snapshot_every)
    made = engine(listener, log=kept, config=config)
    admit(made, "a")
    made.run()


@pytest.mark.parametrize("snapshot_every", [0, 1])
def test_a_log_of_another_policy_says_how_it_is_folded(
    module: str, snapshot_every: int, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    log, name = tmp_path / "log", f"{module}:longest_first"
    served(log, load(name), snapshot_every)
    del POLICIES[name]
    with pytest.raises(ConfigurationError) as raised:
        served(log, "fcfs", snapshot_every)
    assert f"has the policy '{name}', a user's own: --allow-policy {name} loads it" in str(raised.value)
    assert not recwarn.list
    load(name, tried=False)
    served(log, "fcfs", snapshot_every)
    assert verify(EventLog.read(log)).clean
    if snapshot_every:  # what comes before the snapshot is not folded any more
        del POLICIES[name]
        served(log, "fcfs", snapshot_every)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    from tests import tiny_models

    tiny_models.make("llama", tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.mark.parametrize("snapshot_every", [0, 100])
def test_options_load_what_the_log_was_made_with(
    module: str, tiny: Path, tmp_path: Path, snapshot_every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from leftfold import builder
    from leftfold.options import EngineOptions

    def start(policy: str | None = None, *allowed: str) -> Any:
        POLICIES.pop(f"{module}:longest_first", None)
        options = EngineOptions(
            model=str(tiny), log_dir=str(tmp_path / "log"), kv_tokens=512, device="cpu", policy=policy,
            allow_policy=[*allowed], snapshot_every=snapshot_every,
        )  # fmt: skip
        made = builder.build_engine(options)
        made.start()
        made.close()
        return made.state.config.policy

    name = f"{module}:longest_first"
    assert start(name) == name
    with monkeypatch.context() as patch:
        patch.setattr(builder, "load", None)  # known before the model is loaded
        with pytest.raises(ConfigurationError, match=f"cannot be read: .*--allow-policy {name} loads it"):
            start("fcfs")
    assert start("fcfs", name) == "fcfs"
    if snapshot_every:
        assert start() == "spf"
    with pytest.raises(ConfigurationError, match="--policy: .*misspelt' failed on a request: AttributeError"):
        start(f"{module}:misspelt", name)
    with pytest.raises(ConfigurationError, match="--allow-policy: .*nowhere"):
        start("fcfs", f"{module}:nowhere")


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("name", ["misspelt", "chooses_none", "no_such"])
def test_commands_tell_a_failing_policy_in_one_line(
    module: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served(tmp_path / "log", "fcfs", 0)
    (tmp_path / "trace.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,9,5\n")
    (tmp_path / "cost.json").write_text('{"microseconds": {"step": 1000}}')
    policy = f"{module}:{name}"
    for words in (
        ("replay", "whatif", tmp_path / "log", "--cost", tmp_path / "cost.json", "--policy", policy),
        ("simulate", "--trace", tmp_path / "trace.csv", "--policy", policy),
        ("serve", "--policy", policy),
        ("chat", "--policy", policy),
    ):
        code, out, err = said(capsys, *words)
        assert (code, out, err.count("\n")) == (2, "", 1) and f"policy '{policy}'" in err
    if name == "no_such":
        for words in (("serve",), ("replay", "verify", tmp_path / "log")):
            code, out, err = said(capsys, *words, "--allow-policy", policy)
            assert (code, out, err.count("\n")) == (2, "", 1) and f"policy '{policy}'" in err


@pytest.mark.parametrize("name", ["long_fails", "of_three"])
def test_what_if_and_simulations_tell_what_fails_under_way(
    module: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config(**{**CONFIG.as_dict(), "max_running": 1})
    listener = Listener(count=4)
    made = engine(listener, log=EventLog.open(tmp_path / "log"), config=config)
    for index in range(4):
        admit(made, f"r{index}", [1] * (4 + index))
    made.run()
    lines = "".join(f"2023-11-16 18:15:46.6805900,{4 + index},5\n" for index in range(4))
    (tmp_path / "trace.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + lines)
    (tmp_path / "cost.json").write_text('{"microseconds": {"step": 1000}}')
    policy = f"{module}:{name}"
    for words in (
        ("replay", "whatif", tmp_path / "log", "--cost", tmp_path / "cost.json", "--set", "max_running=1"),
        ("simulate", "--trace", tmp_path / "trace.csv", "--set", "max_running=1"),
    ):
        POLICIES.pop(policy, None)
        code, out, err = said(capsys, *words, "--policy", policy)
        assert (code, out, err.count("\n")) == (2, "", 1), (code, out, err)
        assert f"policy '{policy}' failed on a request" in err


def test_a_log_with_a_policy_is_verified_with_it_and_checked_without(
    module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, name = tmp_path / "log", f"{module}:longest_first"
    served(log, load(name), 1)
    for allowed, code in (("", 1), (name, 0)):
        POLICIES.pop(name, None)
        given = ("--allow-policy", allowed) if allowed else ()
        found, out, _ = said(capsys, "replay", "verify", log, "--json", *given)
        assert found == code and (allowed or f"--allow-policy {name} loads it" in out)
    POLICIES.pop(name, None)
    code, out, err = said(capsys, "log", "verify", log)
    assert code == 0, out + err
