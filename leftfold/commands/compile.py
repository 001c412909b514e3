"""Compile the scheduler to machine code: the same states and plans, in three quarters of the time.

What is compiled is kept in the cache (`$LEFTFOLD_CACHE`, or `~/.cache/leftfold`) and taken from there by every command,
as long as the source stays as it was. It takes a minute, and needs mypy (`pip install 'leftfold[compile]'`), Python's
headers, and the C compiler that Python was made with, or `$CC`. `LEFTFOLD_COMPILED=off` runs what is interpreted.
"""

from __future__ import annotations

import argparse
from time import perf_counter

from leftfold.commands.common import OK, UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(args: argparse.Namespace) -> int:
    from leftfold.compiling import CompileError, compile_scheduler

    begun = perf_counter()
    try:
        place, new = compile_scheduler(lambda: print("compiling the scheduler, which takes a minute", flush=True))
    except CompileError as error:
        raise UsageError(str(error)) from error
    print(f"compiled in {perf_counter() - begun:.0f} s: {place}" if new else f"compiled already: {place}")
    return OK
