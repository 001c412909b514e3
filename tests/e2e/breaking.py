"""The toy server with a reducer that fails on every request whose prompt holds a "^", and, once the file `TOY_BREAK`
is there, with engines that come up refusing all work.

`python -m tests.e2e.breaking OPTIONS_JSON` serves.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import leftfold.replay.fold
from leftfold.engine import Engine
from leftfold.events import Admit, Event
from leftfold.fsm import State
from leftfold.server.launch import serve
from leftfold.server.options import ServeOptions
from tests.e2e import toy
from tests.tiny_folder import byte_tokenizer


def build(options: ServeOptions, on_effects: Callable[[Any], None]) -> Engine:
    """What the engine process calls."""
    real, poison = leftfold.replay.fold.step, byte_tokenizer().encode("^").ids[0]

    def step(state: State, event: Event) -> Any:
        if isinstance(event, Admit) and poison in event.prompt:
            raise ZeroDivisionError("planted")
        return real(state, event)

    leftfold.replay.fold.step = step
    if Path(os.environ["TOY_BREAK"]).exists():
        os.environ["TOY_FAULT"] = "1"
    return toy.build(options, on_effects)


if __name__ == "__main__":
    sys.exit(serve(ServeOptions.from_dict(json.loads(sys.argv[1])), "tests.e2e.breaking:build"))
