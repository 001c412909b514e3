"""The request machine beside a model from the same table, drafts beside the pool, copies beside originals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from transitions import Machine

from leftfold.events import Event, Plan, Tick
from leftfold.fsm import (
    GATES,
    TRANSITIONS,
    Effects,
    Gate,
    GateTrigger,
    Phase,
    State,
    Trigger,
    admission,
    commit,
    controls,
    ending,
    laws,
    pausing,
    recovery,
    step,
)
from leftfold.fsm.request import Request
from leftfold.fsm.sketch import Sketch
from leftfold.replay.fuzzing import World, core, rules
from tests.watching import runs, watch

UNBORN = "unborn"


def model() -> Machine:
    """A state machine built from the table and nothing else."""
    states = [UNBORN, *(phase.name for phase in Phase)]
    edges = [
        {"trigger": trigger.name, "source": UNBORN if phase is None else phase.name, "dest": target.name}
        for (phase, trigger), target in TRANSITIONS.items()
    ]
    return Machine(states=states, transitions=edges, initial=UNBORN, auto_transitions=False)


class Models:
    """The model's state per request, moved by the triggers that the reducer uses."""

    def __init__(self) -> None:
        self.machine = model()
        self.of: dict[Request, str] = {}
        self.used: Counter[tuple[str, Trigger]] = Counter()

    def spy(self, advance: Callable[[Request, Trigger], None]) -> Callable[[Request, Trigger], None]:
        def watched(request: Request, trigger: Trigger) -> None:
            before = self.of.get(request, UNBORN)
            self.machine.set_state(before)
            self.machine.trigger(trigger.name)
            self.of[request] = self.machine.state
            self.used[before, trigger] += 1
            advance(request, trigger)
            assert request.phase is not None and request.phase.name == self.machine.state

        return watched

    def compare(self, world: World) -> None:
        """No request is in another phase than its model: nothing moves but along the table."""
        for request in world.state.live.values():
            assert request.phase is not None and self.of[request] == request.phase.name


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_requests_move_in_lockstep_with_a_model_of_the_table(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    models = Models()
    for module in (admission, commit, controls, ending, laws, recovery):
        if hasattr(module, "advance"):
            monkeypatch.setattr(module, "advance", models.spy(module.advance))

    def look(world: World, event: Event, plan: Plan | None, take: Callable[[], Effects]) -> Effects:
        effects = take()
        models.compare(world)
        return effects

    watch(monkeypatch, look)
    monkeypatch.setattr(World, "copy", lambda world: None)  # a copy's requests have no model
    monkeypatch.setattr(core, "drop_more", lambda state, t, plan: None)  # nor have those of a state that is tried out
    runs(seed, 60)
    phases = {state for state, _ in models.used}
    assert phases == {UNBORN, "WAITING", "PREFILLING", "DECODING", "PREEMPTED", "STOPPING"}


@pytest.mark.parametrize("seed", [4, 5])
def test_the_pool_is_left_as_the_draft_said(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[int, list[int], list[int]] | None] = []
    compared: Counter[str] = Counter()
    made = Sketch.plan

    def plan(self: Sketch) -> Plan | None:
        planned = made(self)
        draft = self.draft
        if planned is None or planned.step is None:
            said.append(None)
            return planned
        kept = draft._revived
        free = [*draft._free, *draft._freed]
        cached = [page for page in (*draft._cached, *draft._uncached) if page not in kept]
        said.append((draft.usable, free, cached))
        return planned

    def look(world: World, event: Event, plan: Plan | None, take: Callable[[], Effects]) -> Effects:
        effects = take()
        if isinstance(event, Tick) and said and (last := said.pop()) is not None:
            pool = world.state.pool
            usable, free, cached = last
            assert usable == pool.usable
            assert free == list(pool.free)
            assert cached == list(pool.cached)
            assert plan is not None
            compared.update(name for name in ("join", "preempt", "grow", "evict", "ends") if getattr(plan, name))
        said.clear()
        return effects

    monkeypatch.setattr(Sketch, "plan", plan)
    watch(monkeypatch, look)
    runs(seed, 60)
    assert all(compared[name] > 10 for name in ("join", "preempt", "grow", "evict")), compared


@pytest.mark.parametrize("seed", [6, 7])
def test_stepping_a_copy_is_stepping_the_original(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(world: World, event: Event, plan: Plan | None, take: Callable[[], Effects]) -> Effects:
        if len(world.log) % 4:
            return take()
        before = world.state.digest()
        twin = world.state.copy()
        theirs = step(twin, event)
        assert world.state.digest() == before
        ours = take()
        twin.check()
        assert twin.digest() == world.state.digest()
        assert list(theirs.outputs) == list(ours.outputs) and theirs.wake_at == ours.wake_at
        assert (theirs.plan is None) == (ours.plan is None)
        if ours.plan is not None and theirs.plan is not None:
            assert theirs.plan.digest == ours.plan.digest and list(theirs.plan.rows) == list(ours.plan.rows)
        return ours

    watch(monkeypatch, look)
    runs(seed, 40)


def gates() -> Machine:
    """The engine machine from its table and nothing else."""
    edges = [
        {"trigger": trigger.name, "source": gate.name, "dest": target.name} for (gate, trigger), target in GATES.items()
    ]
    return Machine(states=[gate.name for gate in Gate], transitions=edges, initial="RUNNING", auto_transitions=False)


@pytest.mark.parametrize("seed", [8, 9, 10])
def test_the_gate_moves_in_lockstep_with_a_model_of_its_table(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is moved by the triggers that the reducer names, and by those that the events themselves are."""
    machine, used = gates(), Counter[tuple[str, str]]()
    named: list[GateTrigger] = []

    def spy(move: Callable[[State, GateTrigger], None]) -> Callable[[State, GateTrigger], None]:
        def watched(state: State, trigger: GateTrigger) -> None:
            named.append(trigger)
            move(state, trigger)

        return watched

    def look(world: World, event: Event, plan: Plan | None, take: Callable[[], Effects]) -> Effects:
        machine.set_state(world.state.gate.name)
        named.clear()
        effects = take()
        for trigger in named:
            used[machine.state, trigger.name] += 1
            machine.trigger(trigger.name)
        assert machine.state == world.state.gate.name
        moved_by = [trigger for trigger in named if trigger.name not in ("DRAINED", "CLOSED")]
        assert all(type(event).__name__ == trigger.value for trigger in moved_by)
        return effects

    for module in (pausing, recovery):
        monkeypatch.setattr(module, "move_gate", spy(module.move_gate))
    monkeypatch.setattr(rules, "_FAULTS", {**rules._FAULTS, rules.Rules.shutdown: 1, rules.Rules.control: 4})
    watch(monkeypatch, look)
    runs(seed, 120)
    assert {before for before, _ in used} == {gate.name for gate in Gate}
    assert {trigger for _, trigger in used} == {trigger.name for trigger in GateTrigger}
