"""The HTTP application without processes: an engine that answers at once, for tests of everything in front of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from leftfold.events import Abort, Event
from leftfold.executor.base import Score
from leftfold.server.app import create_app
from leftfold.server.choices import Choice
from leftfold.server.group import EngineGone, Group
from leftfold.server.metrics import Metrics
from leftfold.server.options import ServeOptions
from leftfold.server.state import ServerState, Service
from leftfold.server.wire import Answered, Output, Status
from leftfold.text import Tokenizer, load_tokenizer
from tests.tiny_folder import VOCAB_SIZE, write_tokenizer

INFO = {"max_model_len": 64, "num_pages": 8, "page_size": 4, "vocab_size": VOCAB_SIZE, "fault": ""}


def scores_of(tokens: Sequence[int], start: int, want: Mapping[str, int] | None) -> list[list[Score]]:
    """Of each generated token (those from `start` on), by a formula; the prompt's stand before the first."""
    if want is None:
        return [[] for _ in tokens[start:]]

    def score(at: int) -> Score:
        others = tuple(((tokens[at] + 1 + i) % 256, -0.5 - i) for i in range(want["logprobs"]))
        return Score(at, tokens[at], -at / 4, others)

    made = [[score(at)] for at in range(start, len(tokens))]
    made[0][:0] = [score(at) for at in range(max(1, want.get("logprobs_from", start)), start)]
    return made


class InstantEngine:
    """Answers every request with `reply` (or "abcdef…") up to its limit. Remembers what it was asked."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.reply: str | None = None
        self.error: Mapping[str, str] | None = None
        self.silent = False
        self.groups: list[Group] = []
        self.gone = ""
        self.admitted: list[Mapping[str, Any]] = []
        self.aborted: list[Abort] = []
        self.controls: list[tuple[str, dict[str, Any]]] = []
        self.answer: Answered | Exception = Answered("", True, None)
        self.status = Status("running")
        self.version = ""
        self.values: dict[str, Any] = {"running": 0, "waiting": 0, "num_pages": 8, "pages_free": 8, "pages_cached": 0}

    def admit(self, requests: Sequence[Mapping[str, Any]], base: str | None = None) -> Group:
        if self.gone:
            raise EngineGone(self.gone)
        rids = [f"r{len(self.admitted) + i}" for i in range(len(requests))]
        self.admitted += requests
        choices = [Choice(rid, len(request["prompt"])) for rid, request in zip(rids, requests, strict=True)]
        group = Group(self, choices)  # type: ignore[arg-type]
        self.groups.append(group)
        if not self.silent:
            for rid, request in zip(rids, requests, strict=True):
                for output in self._outputs(rid, request):
                    group.put(output)
        return group

    def _outputs(self, rid: str, request: Mapping[str, Any]) -> list[Output]:
        start, params = len(request["prompt"]), request["params"]
        if self.error is not None:
            return [Output(rid, 0, start, [], "error", self.error, None)]
        room = min(params.max_tokens, INFO["max_model_len"] - start)
        tokens = self.tokenizer.encode(self.reply or "abcdefghijklmnopqrstuvwxyz" * 4)
        stop = next((i + 1 for i, t in enumerate(tokens) if t in params.stop_token_ids), None)
        kept = tokens[: min(room, stop or len(tokens))]
        reason = "stop" if stop is not None and len(kept) == stop else "length"
        scores = scores_of([*request["prompt"], *kept], start, request.get("want"))
        rows = [
            Output(rid, 0, start + i, [token], None, None, None, scores=scores[i]) for i, token in enumerate(kept[:-1])
        ]
        usage = {"prompt_tokens": start, "completion_tokens": len(kept), "cached_tokens": 4}
        last = Output(rid, 0, start + len(kept) - 1, kept[-1:], reason, None, usage, self.version, scores[-1])
        return [*rows, last]

    def output(self, text: str, rid: str = "r0", position: int = 2) -> Output:
        """What a silent engine says when a test wants it to."""
        return Output(rid, 0, position, self.tokenizer.encode(text), None, None, None)

    def submit(self, event: Event) -> None:
        assert isinstance(event, Abort)
        self.aborted.append(event)

    end = submit

    def ask_again(self, choice: Choice) -> None:
        raise AssertionError(f"something before the next output of {choice.rid} is missing")

    async def control(self, kind: type[Event], patience: float | None = None, **fields: Any) -> Answered:
        kind(t=0, call="c", **fields)  # such an event can be made
        self.controls.append((kind.__name__, {"patience": patience, **fields}))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def forget(self, rid: str) -> None:
        pass

    async def stats(self) -> Mapping[str, Any]:
        if self.gone:
            raise EngineGone(self.gone)
        return self.values


class App:
    """A ready application over an instant engine, and a client for it."""

    def __init__(self, folder: Path, **options: Any) -> None:
        tokenizer = load_tokenizer(write_tokenizer(folder, {}))
        self.engine = InstantEngine(tokenizer)
        self.state = ServerState(ServeOptions(model="toy", **options), "toy", Metrics("toy"), phase="ready")
        self.state.service = Service(self.engine, tokenizer, INFO)  # type: ignore[arg-type]
        self.app = create_app(self.state)

    async def send(self, method: str, path: str, **request: Any) -> httpx.Response:
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://toy") as client:
            return await client.request(method, path, **request)

    def request(self, method: str, path: str, **request: Any) -> httpx.Response:
        import asyncio

        return asyncio.run(self.send(method, path, **request))

    def post(self, path: str, body: Any, **request: Any) -> httpx.Response:
        return self.request("POST", path, json=body, **request)

    def complete(self, **body: Any) -> httpx.Response:
        return self.post("/v1/completions", {"model": "toy", "prompt": "hello", **body})

    def chat(self, **body: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], **body})
