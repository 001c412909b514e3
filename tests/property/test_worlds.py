"""Lives of random runs, with everything that a fuzzer does to an engine, are what states say at every record."""

from __future__ import annotations

from leftfold.replay.worlds import World
from tests.property.test_sanitize import logs_of_runs
from tests.unit.test_worlds import check_seen


def test_lives_of_random_runs_are_what_states_say() -> None:
    ended = preempted = 0
    for events in logs_of_runs(5, 60):
        world, _ = World.of([])
        for seq, event in enumerate(events, 1):
            world.take(event)
            assert world.end.state is not None
            check_seen(world.overview, seq, world.end.state)
        lives = world.overview.lives.all
        ended += sum(bool(life.reason) for life in lives)
        preempted += sum(len(life.preempted) for life in lives)
    assert ended > 100 and preempted > 20
