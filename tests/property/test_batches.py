"""Many rows in one state mean the same as many states of one row; folds do not depend on the order of hashes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from leftfold.events import Abort, Admit, ExecutionPlan, ForwardDone, SamplingParams, Tick
from leftfold.fsm import Config, Output, State, few, step
from leftfold.fsm.columns import WATCHED

ROWS = 300


def admits(rng: Random) -> list[Admit]:
    """Requests of every length in relation to a page, with and without stop ids, some of them unwatched."""
    made = []
    for number in range(ROWS):
        stops = rng.sample([1, 2, 3, WATCHED + 1], rng.choice((0, 0, 1, 2)))
        params = SamplingParams(
            max_tokens=1 + rng.randrange(24), min_tokens=rng.choice((0, 0, 3)), stop_token_ids=stops
        )
        prompt = [rng.randrange(4) for _ in range(1 + rng.randrange(9))]
        made.append(Admit(t=0, rid=f"r{number}", prompt=prompt, params=params))
    return made


def script(rid: str, position: int) -> int:
    """Some token for each request and position; now and then one that stops somebody."""
    mixed = (int(rid[1:]) * 7919 + position * 104729) % 97
    return mixed if mixed > 3 else (0, 1, 2, WATCHED + 1)[mixed]


def drive(config: Config, requests: list[Admit]) -> Iterator[Output]:
    state = State(config)
    for event in requests:
        yield from step(state, event).outputs
    while state.live:
        plan = step(state, Tick(t=1)).plan
        assert plan is not None
        tokens = [script(row.rid, row.start + row.length) for row in plan.rows if row.samples]
        yield from step(state, ForwardDone(t=1, step=plan.step, tokens=tokens, digest=plan.digest)).outputs
        state.check()


def alike(most_few: int, depth: int, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Rows that write the same and end at different places, up to `most_few` taken one by one: what is seen of them."""
    monkeypatch.setattr(few, "FEW", most_few)
    state = State(
        Config(num_pages=400, page_size=4, max_running=60, max_batch_tokens=600, max_model_len=64, pipeline_depth=depth)
    )
    state.listen()
    for number in range(60):
        params = SamplingParams(max_tokens=4 + 4 * (number % 5), stop_token_ids=(3,) if number % 3 else ())
        step(state, Admit(t=0, rid=f"r{number}", prompt=[number % 7] * (5 - number % 2), params=params))
    seen: list[Any] = []
    flying: deque[ExecutionPlan] = deque()
    while state.live:
        while len(flying) <= depth and (plan := step(state, Tick(t=1)).plan) is not None:
            flying.append(plan)
        if len(seen) == 3:
            seen.append([*step(state, Abort(t=1, rid="r7")).outputs])
        plan = flying.popleft()
        tokens = [(row.start + row.length) % 11 for row in plan.rows if row.samples]
        effects = step(state, ForwardDone(t=1, step=plan.step, tokens=tokens, digest=plan.digest))
        state.check()
        seen.append((state.digest(), [*effects.outputs], list(effects.kv_events)))
    return seen


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("most_few", [20, 1000])
def test_rows_one_by_one_and_by_column_are_the_same(most_few: int, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that fill at once are published in the order of rows: of equal ones the first is found from then on."""
    assert alike(most_few, depth, monkeypatch) == alike(0, depth, monkeypatch)


def by_rid(outputs: Iterator[Output]) -> dict[str, list[Any]]:
    heard: dict[str, list[Any]] = {}
    for output in outputs:
        assert output.usage is None or output.usage.cached_tokens >= 0
        usage = output.usage and output.usage[:2]  # what was cached is a matter of company
        heard.setdefault(output.rid, []).append((output.position, output.tokens, output.finish_reason, usage))
    return heard


@pytest.mark.parametrize(
    ("seed", "pages", "prefix_cache"), [(1, 4000, True), (2, 4000, False), (3, 400, True), (4, 160, True)]
)
def test_a_large_batch_means_the_same_as_its_rows_alone(seed: int, pages: int, prefix_cache: bool) -> None:
    requests = admits(Random(seed))
    limits: dict[str, Any] = {"page_size": 4, "max_model_len": 30, "prefix_cache": prefix_cache}
    together = by_rid(drive(Config(num_pages=pages, max_running=ROWS, max_batch_tokens=2000, **limits), requests))
    alone = Config(num_pages=8, max_running=1, max_batch_tokens=16, **limits)
    assert together == {event.rid: by_rid(drive(alone, [event]))[event.rid] for event in requests}


FOLD = """
import hashlib
from random import Random
from leftfold.events import encode
from leftfold.replay.fuzzing.drawing import draw_config
from leftfold.replay.fuzzing.rules import Rules
from leftfold.replay.fuzzing import World

rng = Random(42)
for _ in range(12):
    config = draw_config(rng)
    world, rules = World(rigour=1000, **config), Rules(rng, config)
    for _ in range(40):
        world.perform(rules.next(world))
    world.finish(replay=False)
    log = hashlib.sha256(b"".join(encode(event) for event in world.log)).hexdigest()
    print(world.state.digest(), log)
"""


def test_logs_and_digests_do_not_depend_on_the_order_of_hashes() -> None:
    said = []
    for seed in ("0", "1", "4711"):
        run = subprocess.run(
            [sys.executable, "-c", FOLD], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True
        )
        assert run.returncode == 0, run.stderr
        said.append(run.stdout)
    assert len(said[0].splitlines()) == 12
    assert said[0] == said[1] == said[2]
