"""What an earlier process of the server had begun: kept answers come back, those that live go on."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from leftfold.events import SamplingParams
from leftfold.server.admission import Job
from leftfold.server.answer_file import NAME, AnswerFile
from leftfold.server.answers import keep
from leftfold.server.client import EngineClient
from leftfold.server.generation import Generation
from leftfold.server.group import Group
from leftfold.server.kept import Kept, Terms
from leftfold.server.state import ServerState

_log = logging.getLogger("leftfold.server")


def log_folder(log_dir: str | None, durability: str, name: str) -> Path | None:
    """Where the engine of a model by this name keeps its log; None if nowhere."""
    folder = Path("logs") / name if log_dir is None else Path(log_dir)
    return folder if durability != "off" and folder.is_dir() else None


def adopt(state: ServerState, client: EngineClient, folder: Path) -> Sequence[Kept]:
    """The answers of the file beside the log; what has not ended is the client's to catch up with, and returned."""
    options = state.options
    file = AnswerFile(folder / NAME, options.durability == "strict", options.retain_responses)
    live = []
    for terms, choices, ended_at in file.read(time.time()):
        if ended_at is None:
            live.append(Kept(terms, client.adopt(choices)))
        else:
            state.shelf.put(Kept(terms, Group(client, choices)), ended_at)
    state.shelf.file = file
    return live


def go_on(state: ServerState, live: Sequence[Kept]) -> None:
    """After the client has caught up: what the engine knows of goes on, whoever listens."""
    lost = 0
    for kept in live:
        if kept.group.gone is not None:
            lost += 1
            if state.shelf.file is not None:
                state.shelf.file.dropped(kept.terms.id)
            continue
        generation = Generation(state, _job(kept.terms), kept.terms.background)
        generation.id, generation.base = kept.terms.id, kept.terms.base
        generation.take_up(kept.group)
        keep(state, kept)
        state.begin(generation.run())
    if lost:
        _log.warning("%d answer%s never reached the log and cannot be read again", lost, "s" if lost > 1 else "")


def _job(terms: Terms) -> Job:
    """What is left of a job: its prompts' lengths, and what its text follows from."""
    params = SamplingParams(stop_token_ids=terms.stop_ids, min_tokens=terms.min_tokens)
    return Job([range(length) for length in terms.prompts], terms.n, params, 0, terms.stops, token_ids=terms.token_ids)


__all__ = ["adopt", "go_on", "log_folder"]
