"""Whatever executor and process do, each request gets the tokens it gets alone, once, and the log replays."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from leftfold.events import Abort, EventLog
from leftfold.replay.verify import verify
from tests.engines import CONFIG, Gated, Listener, admit, alone, gated


class Wish(NamedTuple):
    """A request: its prompt, how many tokens it wants, and after how many outputs it is aborted (0: never)."""

    prompt: list[int]
    max_tokens: int
    abort_after: int


WISHES = st.lists(
    st.builds(
        Wish,
        st.lists(st.integers(0, 5), min_size=1, max_size=24),
        st.integers(1, 20),
        st.one_of(st.just(0), st.integers(1, 6)),
    ),
    min_size=1,
    max_size=6,
)


class Life(Listener):
    """Aborts requests after so many outputs, and stops the process after so many of all."""

    def __init__(self, aborts: dict[str, int], heard: dict[str, list[int]], ends: dict[str, str], stop: int) -> None:
        super().__init__(count=10**9)
        self.aborts, self.heard, self.ends, self.stop = aborts, heard, ends, stop

    def __call__(self, effects: Any) -> None:
        assert self.engine is not None
        for output in effects.outputs:
            assert output.rid not in self.ends, "nothing follows the terminal output"
            self.heard[output.rid] += [int(token) for token in output.tokens]
            if output.finish_reason is not None:
                self.ends[output.rid] = output.finish_reason.value
            elif len(self.heard[output.rid]) == self.aborts[output.rid]:
                self.engine.submit(Abort, rid=output.rid)
            self.stop -= 1
        if self.stop == 0 or len(self.ends) == len(self.heard):
            self.engine.stop()


@settings(max_examples=60)
@given(
    wishes=WISHES,
    crashes=st.sets(st.integers(2, 60), max_size=2),  # a third in a row ends the rows it names
    failures=st.sets(st.integers(2, 60), max_size=2),  # so does a third of a lone row
    stops=st.lists(st.integers(1, 30), max_size=2),
    depth=st.integers(0, 2),
)
def test_tokens_survive_crashes_failed_steps_restarts_and_aborts_of_others(
    wishes: list[Wish], crashes: set[int], failures: set[int], stops: list[int], depth: int
) -> None:
    heard: dict[str, list[int]] = {f"r{index}": [] for index in range(len(wishes))}
    ends: dict[str, str] = {}
    aborts = {f"r{index}": wish.abort_after for index, wish in enumerate(wishes)}
    executed = 0

    def disturb(plan: Any) -> None:
        nonlocal executed
        executed += 1
        if executed in crashes:
            raise RuntimeError("planted")
        if executed in failures and plan.voids == executor.inner._failures:  # else it is void already
            executor.inner.fail_next("planted")

    with TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        for start, stop in enumerate([*stops, 10**9]):
            executor = Gated(before=disturb)
            made = gated(Life(aborts, heard, ends, stop), depth, executor, log=EventLog.open(path))
            if start == 0:
                for index, wish in enumerate(wishes):
                    admit(made, f"r{index}", wish.prompt, max_tokens=wish.max_tokens)
            if len(ends) == len(heard):
                made.stop()
            made.run()
        after = gated(Listener(), depth, Gated(), log=EventLog.open(path))
        after.close()
        verdict = verify(EventLog.read(path))
    assert verdict.clean, verdict.describe()
    for index, wish in enumerate(wishes):
        expected = alone(wish.prompt, wish.max_tokens)
        got, why = heard[f"r{index}"], ends[f"r{index}"]
        assert got == expected[: len(got)]
        assert why == "length" if not wish.abort_after or len(got) == wish.max_tokens else why in ("abort", "length")
        assert why != "length" or len(got) == len(expected)
    stats = after.stats()
    assert (stats["running"], stats["waiting"], stats["live"], stats["stopping"]) == (0, 0, 0, 0)
    assert stats["pages_free"] == CONFIG.num_pages
    after.state.check()
