"""What one server process knows: its phase, and, once ready, the tokenizer, the engine and the model's limits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from leftfold.server.client import EngineClient
from leftfold.server.errors import ApiError, unavailable
from leftfold.server.group import Group
from leftfold.server.idempotency import Turns
from leftfold.server.kept import Shelf
from leftfold.server.metrics import Metrics
from leftfold.server.options import ServeOptions
from leftfold.server.texts import Texts
from leftfold.text import Tokenizer


@dataclass
class Service:
    """What a ready server answers with. `info`: the engine's resolved configuration."""

    engine: EngineClient
    tokenizer: Tokenizer
    info: Mapping[str, Any]
    texts: Texts = field(init=False)

    def __post_init__(self) -> None:
        self.texts = Texts(self.tokenizer)

    @property
    def max_model_len(self) -> int:
        """Prompt and answer together, in tokens."""
        return int(self.info["max_model_len"])

    @property
    def max_prompt_len(self) -> int:
        """The longest prompt that can run: one token must remain, and its KV must fit into the pool."""
        pool = int(self.info["num_pages"]) * int(self.info["page_size"])
        return min(self.max_model_len - 1, pool)

    @property
    def vocab_size(self) -> int:
        return int(self.info.get("vocab_size") or self.tokenizer.vocab_size)


@dataclass
class ServerState:
    """`phase`: starting · fetching · loading · ready · restarting · refusing · draining · failed; `reason`: for it.

    `open`: the answers under way, by the id that the client sees; `patient`: those that go on at the next start.
    `shelf`: those that can be read again; `turns`: of those who ask under keys of theirs.
    """

    options: ServeOptions
    model_name: str
    metrics: Metrics
    phase: str = "starting"
    reason: str = ""
    service: Service | None = None
    log_folder: Path | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.open: dict[str, Group] = {}
        self.patient: set[str] = set()
        self.shelf = Shelf(self.options.retain_responses)
        self.turns = Turns(self.shelf)
        self.tasks: set[asyncio.Task[None]] = set()
        self.held_bytes = 0  # of bodies
        self.idle = asyncio.Event()
        self.idle.set()

    def enter(self, answer: str, group: Group, patient: bool = False) -> None:
        """A generation begins; `idle` is set while there is none, but for `patient` ones."""
        self.open[answer] = group
        if patient:
            self.patient.add(answer)
        else:
            self.idle.clear()

    def leave(self, answer: str) -> None:
        """A generation has ended."""
        del self.open[answer]
        self.patient.discard(answer)
        if len(self.open) == len(self.patient):
            self.idle.set()

    def cut_off(self) -> list[Group]:
        """Those that a stop ends, once it has waited long enough."""
        return [group for answer, group in self.open.items() if answer not in self.patient]

    @property
    def resting(self) -> str:
        """Why the engine runs no new request now: "paused", "asleep", or "" while it does."""
        status = self.serving().engine.status
        if status.asleep:
            return "asleep"
        return "" if status.gate == "running" else "paused"

    def check_awake(self) -> None:
        """Raises a 503 ApiError while the engine refuses work, or rests and the server was told to refuse it then."""
        if refusing := self.serving().engine.status.refusing:
            raise unavailable(refusing, "refusing")
        if self.options.sleep_policy == "refuse" and (resting := self.resting):
            raise unavailable(f"the engine is {resting}, and requests are refused meanwhile", resting)

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Does `work` beside everything else."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def unready(self) -> ApiError:
        """The 503 for whoever comes while no work is taken."""
        reason = f": {self.reason}" if self.reason else ""
        return unavailable(f"not ready: {self.phase}{reason}", self.phase)

    @property
    def alive(self) -> bool:
        return self.phase != "failed"

    @property
    def ready(self) -> bool:
        return self.phase == "ready"

    def serving(self) -> Service:
        """The service; the gate in front of the routes lets nobody through before it exists."""
        assert self.service is not None
        return self.service

    def check_model(self, name: str | None) -> None:
        """Raises a 404 ApiError if a client asks for a model that is not served here."""
        if name is not None and name not in (self.model_name, self.options.model):
            message = f"model: {name[:200]!r} is not served here; this server has {self.model_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
