"""Several processes share one sequence of runs: each takes every so many-th, and the first finding is the finding.

Which one that is does not depend on how many share: each goes on as long as one of its runs comes before the first
finding there is.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import closing
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from leftfold.replay.fuzzing.loop import Tally, fuzz, made_again
from leftfold.replay.fuzzing.profiles import LITE, Profile

_NONE = (1 << 63) - 1


class CrewError(RuntimeError):
    """A process of the crew died, or what it found is not there when its run is made again."""


def fuzz_together(
    jobs: int, seed: int, go_on: Callable[[Tally], bool], profile: Profile = LITE, skip: int = 0
) -> Tally:
    """As `fuzz`, in `jobs` processes; `tally.runs` of what `go_on` is asked are the runs up to the one in question.

    Raises `CrewError`.
    """
    context = get_context("fork")  # there are no threads here, and what is planted in this process is in all
    first = context.Value("q", _NONE)

    def work(index: int, told: Connection) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that began this one ends it

        def more(mine: Tally) -> bool:
            before = index + mine.runs * jobs
            return skip + before < first.value and go_on(Tally(seed, before, mine.steps))

        mine = fuzz(seed, more, profile, skip + index, jobs)
        if mine.found is not None:
            with first.get_lock():
                first.value = min(first.value, mine.number)
        told.send((mine.runs, mine.steps))

    tally = Tally(seed)
    crew: list[tuple[Any, Connection]] = []
    try:
        for index in range(jobs):
            hears, tells = context.Pipe(duplex=False)
            crew.append((context.Process(target=work, args=(index, tells), daemon=True), hears))
            with closing(tells):
                crew[-1][0].start()
        for process, hears in crew:
            runs, steps = _result(process, hears)
            tally.runs += runs
            tally.steps += steps
    finally:
        for process, hears in crew:
            hears.close()
            if process.pid is not None:
                process.terminate()
                process.join()
    if first.value != _NONE:
        tally.number = first.value
        tally.found = made_again(seed, tally.number, profile)
        if tally.found.fault is None:
            raise CrewError(f"run {tally.number} of seed {seed} found something, and nothing when it was made again")
    return tally


def _result(process: Any, hears: Connection) -> tuple[int, int]:
    try:
        runs, steps = hears.recv()
    except EOFError:
        process.join()
        raise CrewError(f"one of the processes died with exit code {process.exitcode}") from None
    return int(runs), int(steps)
