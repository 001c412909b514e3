"""Policies of a user's own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from leftfold.events import Admit, SamplingParams, Tick
from leftfold.fsm import Config, State, step
from leftfold.replay.policies import PolicyError, load

SOURCE = """
from leftfold.fsm import Policy
from leftfold.fsm.policy import fcfs

def longest_first(request):
    return (-len(request.tokens),)

plain = Policy(fcfs)
number = 5
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "users_policies.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "users_policies", raising=False)
    return "users_policies"


def test_a_function_ranks_requests(module: str) -> None:
    policy = load(f"{module}:longest_first")
    state = State(Config(16, 4, 1, 16, 64, policy=policy))
    for index, length in enumerate((3, 9, 5)):
        params = SamplingParams(max_tokens=1)
        step(state, Admit(t=0, rid=f"r{index}", prompt=[1] * length, params=params))
    plan = step(state, Tick(t=1)).plan
    assert plan is not None and [row.rid for row in plan.rows] == ["r1"]


def test_a_policy_object_is_taken_as_it_is(module: str) -> None:
    assert load(f"{module}:plain") == f"{module}:plain" and load("fcfs") == "fcfs"


@pytest.mark.parametrize(
    "name", ["nobody", "no_such_module:f", "users_policies:nothing", "users_policies:number", ":f"]
)
def test_what_is_no_policy_is_named(module: str, name: str) -> None:
    with pytest.raises(PolicyError, match=name.replace(".", r"\.")):
        load(name)
