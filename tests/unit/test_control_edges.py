"""What control calls, restarts and classes may not do: settings without end, lost settings, false names, starvation."""

from __future__ import annotations

import pytest

from leftfold.events import (
    Abort,
    Admit,
    ControlDone,
    ExecutorLost,
    ForwardDone,
    Reconfigure,
    SamplingParams,
    Shutdown,
    Sleep,
    Started,
    Tick,
    UpdateWeights,
)  # fmt: skip
from leftfold.fsm import Config, Gate, Phase, State, step
from leftfold.fsm.policy import MAX_OVERTAKEN
from tests.engines import Listener, Spied, engine
from tests.engines import admit as submit


def state_of(**changes: object) -> State:
    return State(Config(**{**SMALL, **changes}))  # type: ignore[arg-type]  # plain numbers and words


SMALL = {"num_pages": 16, "page_size": 4, "max_running": 4, "max_batch_tokens": 16, "max_model_len": 64}


def admit(state: State, rid: str, prompt: int = 3, max_tokens: int = 8, **fields: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, n=fields.pop("n", 1))
    step(state, Admit(t=0, rid=rid, prompt=[1] * prompt, params=params, **fields))


def run(state: State, token: int = 5) -> bool:
    """One step and its result; whether there was one."""
    plan = step(state, Tick(t=0)).plan
    if plan is None:
        return False
    flight = state.in_flight[-1]
    for op in flight.ops:
        step(state, ControlDone(t=0, op=op))
    step(state, ForwardDone(t=0, step=plan.step, tokens=[token] * flight.expected, digest=plan.digest))
    state.check()
    return True


@pytest.mark.parametrize("value", [-1, 0, 1.5, True, "x", None, 1 << 47, 1 << 63, 1 << 70])
@pytest.mark.parametrize("name", [
    *SMALL, "max_chunk_tokens", "growth_horizon", "pipeline_depth", "policy", "op_deadline", "max_queued_requests",
    "max_queued_tokens", "prefix_cache", "nobody",
])  # fmt: skip
def test_a_reconfigure_is_taken_whole_or_refused_and_never_raises(name: str, value: object) -> None:
    state = state_of()
    admit(state, "a")
    run(state)
    admit(state, "b")
    before = state.config
    [ack] = step(state, Reconfigure(t=0, call="c", set={name: value})).acks
    assert ack.ok or state.config == before
    state.check()
    while run(state):
        pass
    assert not state.live or (name, value) == ("max_queued_requests", 0)


def test_who_gives_way_to_higher_classes_does_so_a_bounded_number_of_times() -> None:
    state = state_of(num_pages=8, max_batch_tokens=8, max_running=2, policy="priority", prefix_cache=False)
    admit(state, "low", prompt=20, max_tokens=4)
    for index in range(5 * MAX_OVERTAKEN):
        for _ in range(50):
            if "low" not in state.by_rid or state.requests["low"].phase is Phase.PREFILLING:
                break
            run(state)
        if "low" not in state.by_rid:
            break
        admit(state, f"h{index}", prompt=20, max_tokens=1, priority=9)
        run(state)
    assert state.requests["low"].phase is Phase.FINISHED
    assert state.requests["low"].preemptions <= MAX_OVERTAKEN


def test_a_higher_class_joins_at_once_whatever_is_kept_for_the_growth_of_a_lower_one() -> None:
    steps = {}
    for horizon in (0, 60):
        state = state_of(policy="priority", growth_horizon=horizon)
        admit(state, "low", prompt=5, max_tokens=58)
        run(state)
        admit(state, "hi", prompt=30, priority=9)
        steps[horizon] = 0
        while state.requests["hi"].phase is Phase.WAITING:
            run(state)
            steps[horizon] += 1
    assert steps[60] <= steps[0] + 1


def test_asleep_an_engine_that_closes_does_not_wait_for_what_cannot_run() -> None:
    state = state_of()
    step(state, Sleep(t=0, call="sleep"))
    assert run(state)
    admit(state, "a")
    acks = step(state, Shutdown(t=0, call="end")).acks
    assert state.gate is Gate.STOPPED and [ack.call for ack in acks] == ["end"] and "a" in state.by_rid


def test_a_start_in_a_new_process_does_not_name_weights_that_it_has_not_loaded() -> None:
    for kept, version in (((), ""), (("weights",), "v2")):
        state = state_of()
        step(state, UpdateWeights(t=0, source="somewhere", version="v2"))
        assert run(state) and state.version == "v2"
        step(state, Started(t=0, incarnation=2, kept=kept))
        assert state.version == version


@pytest.mark.parametrize(
    ("kept", "found"),
    [(("device", "weights"), True), (("device",), False), (("weights",), False), ((), False)],
)
def test_a_start_finds_no_pages_of_weights_that_are_gone(kept: tuple[str, ...], found: bool) -> None:
    state = state_of()
    step(state, UpdateWeights(t=0, source="somewhere", version="v2"))
    admit(state, "a", prompt=40)
    while run(state):
        pass
    assert state.pool.published
    step(state, Started(t=0, incarnation=2, kept=kept))
    assert bool(state.pool.published) is found


def test_weights_without_a_name_are_refused() -> None:
    (ack,) = step(state_of(), UpdateWeights(t=0, call="u", source="somewhere", version="")).acks
    assert not ack.ok and "must name the weights" in ack.info


def test_an_executor_that_begins_anew_does_not_undo_a_shutdown() -> None:
    state = state_of()
    admit(state, "a")
    step(state, Shutdown(t=0, call="end"))
    step(state, ExecutorLost(t=0))
    assert not step(state, Started(t=0, incarnation=2, kept=("weights",))).acks
    assert state.gate is Gate.CLOSING
    while run(state):
        pass
    assert state.gate is Gate.STOPPED


def test_choices_whose_first_one_is_gone_follow_another() -> None:
    state = state_of(max_batch_tokens=8)
    admit(state, "a", prompt=24, n=3)
    run(state)
    step(state, Abort(t=0, rid="a", choice=0))
    run(state)
    assert [seat.request.choice for seat in state.running()] == [1]
    while run(state):
        pass
    assert state.counts["prompt_tokens"] <= 8 + 24 + 24 + 8


def test_settings_that_were_changed_outlive_the_loss_of_an_executor() -> None:
    executor = Spied(before=lambda plan: crash(len(executor.plans)))
    listener = Listener(count=1)
    made = engine(listener, executor=executor)
    made.submit(Reconfigure, call="c", set={"max_running": 2, "growth_horizon": 7})
    submit(made, "a", [1, 2, 3], max_tokens=6)
    made.run()
    assert executor.resets == 2
    assert (made.state.config.max_running, made.state.config.growth_horizon) == (2, 7)


def crash(plans: int) -> None:
    if plans == 3:
        raise RuntimeError("planted")
