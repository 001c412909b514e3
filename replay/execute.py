"""Execute a log's requests again on a real executor, with the recorded seeds, and compare token by token.

The requests go through the real reducer under the log's limits, as many at once as fit, in the order they came; when
they came is left out, and so are control calls. Results do not depend on the batch, so every token must be the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from leftfold.events import Admit, ForwardDone, Record, Tick
from leftfold.executor.base import Executor
from leftfold.fsm import Config, State, apply, decide, step
from leftfold.replay.errors import NotStarted, ReplayError
from leftfold.replay.walking import walk

Key = tuple[str, int, int]


class ExecutionFailed(ReplayError):
    """The executor failed, so there is nothing to compare."""


@dataclass(slots=True)
class Recorded:
    """A request of the log and what each of its choices was answered."""

    event: Admit
    said: dict[int, list[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first position at which a choice differs; `logits`: of the recorded token and of the one drawn now.

    `position` is absolute, `output` counts from the first token of the answer; a token is None where an answer ended.
    """

    rid: str
    epoch: int
    choice: int
    position: int
    output: int
    recorded: int | None
    got: int | None
    logits: tuple[float | None, float | None] = (None, None)

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        told = {"recorded": self.logits[0], "got": self.logits[1]}
        return {
            "rid": self.rid, "epoch": self.epoch, "choice": self.choice, "position": self.position,
            "output": self.output, "recorded": self.recorded, "got": self.got, "logits": told,
        }  # fmt: skip


Logits = Callable[[Sequence[int]], Sequence[float]]
"""The scores of all tokens after a context."""


def recorded(records: Iterable[Record], rids: Sequence[str] | None = None) -> tuple[Config, str, list[Recorded]]:
    """The limits and the model of a log, and its requests (those called `rids`) that were answered with any token."""
    requests: list[Recorded] = []
    newest: dict[tuple[str, int], Recorded] = {}
    living: set[tuple[str, int]] = set()
    config, model = None, ""
    for (_, event), effects, state in walk(records):
        config = state.config
        if isinstance(event, Admit) and (rids is None or event.rid in rids):
            if (event.rid, event.epoch) in living:
                continue  # it lives already: a no-op
            living.add((event.rid, event.epoch))
            newest[event.rid, event.epoch] = made = Recorded(event)
            requests.append(made)
        model = getattr(event, "model", model)
        for output in effects.outputs:
            request = newest.get((output.rid, output.epoch))
            if output.finish_reason is not None and not state.by_rid.get(output.rid):
                living.discard((output.rid, output.epoch))
            if request is not None and len(output.tokens):
                request.said.setdefault(output.choice, []).extend(int(token) for token in output.tokens)
    if config is None:
        raise NotStarted("the log holds no Started")
    return config, model, [request for request in requests if request.said]


def execute(
    requests: Sequence[Recorded], config: Config, executor: Executor, logits: Logits | None = None
) -> list[Difference]:
    """Run `requests` on `executor`; the first difference of each choice that has one. Raises `ExecutionFailed`.

    A choice that was cut short is compared as far as it came. `logits` is asked after all has run.
    """
    said = run([_again(request, number) for number, request in enumerate(requests)], config, executor)
    found = []
    for number, request in enumerate(requests):
        event = request.event
        for choice, tokens in sorted(request.said.items()):
            got = said.get((_rid(number), event.epoch, choice), [])
            at = _first_difference(tokens, got)
            if at is not None:
                found.append(_difference(event, choice, at, tokens, got, logits))
    return found


def _rid(number: int) -> str:
    return f"r{number}"


def _again(request: Recorded, number: int) -> Admit:
    longest = max(len(tokens) for tokens in request.said.values())
    params = replace(request.event.params, max_tokens=longest)
    return replace(request.event, t=0, rid=_rid(number), params=params, deadline=0, queue_deadline=0, want=None)


def _first_difference(tokens: Sequence[int], got: Sequence[int]) -> int | None:
    """An answer that goes on past the recorded one (which was cut short) is no difference."""
    for at, token in enumerate(tokens):
        if at >= len(got) or got[at] != token:
            return at
    return None


def _difference(
    event: Admit, choice: int, at: int, tokens: Sequence[int], got: Sequence[int], logits: Logits | None
) -> Difference:
    new = got[at] if at < len(got) else None
    told: tuple[float | None, float | None] = (None, None)
    if logits is not None:
        scores = logits([*(int(token) for token in event.prompt), *tokens[:at]])
        told = (float(scores[tokens[at]]), None if new is None else float(scores[new]))
    return Difference(event.rid, event.epoch, choice, len(event.prompt) + at, at, tokens[at], new, told)


def run(events: Sequence[Admit], config: Config, executor: Executor) -> dict[Key, list[int]]:
    """Every token that each choice gets, with nothing but the executor to wait for. Raises `ExecutionFailed`."""
    state = State(replace(config, pipeline_depth=0, max_queued_requests=None, max_queued_tokens=None))
    executor.reset()
    said: dict[Key, list[int]] = {}
    for event in events:
        _hear(said, step(state, event))
    t = 0
    while (plan := decide(state, t)) is not None:
        t += 1
        effects = apply(state, Tick(t=t, plan=plan), plan)
        _hear(said, effects)
        assert effects.plan is not None  # nothing has a deadline, and nobody calls for anything
        result = executor.execute(effects.plan)
        if result.error is not None:
            raise ExecutionFailed(f"step {result.step} failed: {result.error['text']}")
        done = ForwardDone(t=t, step=result.step, tokens=result.tokens, digest=result.digest)
        _hear(said, step(state, done))
    return said


def _hear(said: dict[Key, list[int]], effects: Any) -> None:
    for output in effects.outputs:
        key = (output.rid, output.epoch, output.choice)
        said.setdefault(key, []).extend(int(token) for token in output.tokens)


__all__ = ["Difference", "ExecutionFailed", "Recorded", "execute", "recorded", "run"]
