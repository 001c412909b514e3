"""Small worlds for faults that users of serving engines have met; the world checks every event and every token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from leftfold.fsm import FinishReason
from leftfold.replay.fuzzing import World

AT_EACH_DEPTH = pytest.mark.parametrize("depth", [0, 1, 2], ids="depth{}".format)
"""For `pytestmark`: every test of a module gets `depth`."""


def small(depth: int, **limits: object) -> World:
    """Pages of 4, a pool of 8."""
    fields = {"num_pages": 8, "page_size": 4, "max_running": 4, "max_batch_tokens": 64, "max_model_len": 64}
    return World(**{**fields, "pipeline_depth": depth, **limits})  # type: ignore[arg-type]


def completion(world: World, rid: str, epoch: int = 0, choice: int = 0) -> tuple[FinishReason | None, int]:
    """Why a request ended, and how many tokens it got."""
    output = world.ended[rid, epoch, choice]
    assert output.usage is not None
    return output.finish_reason, output.usage.completion_tokens


def cached(world: World, rid: str) -> int:
    """How many tokens of its prompt an ended request found in the prefix cache."""
    usage = world.ended[rid, 0, 0].usage
    assert usage is not None
    return usage.cached_tokens


def one_by_one(world: World, count: int) -> None:
    """So many steps, each planned when the one before it is done, whatever the depth."""
    for _ in range(count):
        world.tick()
        world.done()


def fill(world: World) -> int:
    """Launch as many steps as may be in flight; how many are."""
    while len(world.flights) <= world.config.pipeline_depth:
        before = len(world.flights)
        world.tick()
        if len(world.flights) == before:
            break
    return len(world.flights)


def rids(world: World) -> Sequence[str]:
    """Whose rows the newest step in flight computes."""
    return [row.rid for row in world.flights[-1].rows]


def answers(world: World, *calls: str) -> list[bool | None]:
    """What calls were answered, None where they still wait."""
    return [world.desk.answered[call].ok if call in world.desk.answered else None for call in calls]
