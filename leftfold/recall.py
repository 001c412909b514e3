"""What a listener that lost its place asks of an engine: everything about its requests from the positions it has on."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from leftfold.fsm import Ack, Effects, Output
from leftfold.fsm.effects import Outputs, TokenBatch
from leftfold.fsm.request import Request
from leftfold.fsm.seating import gather
from leftfold.fsm.state import State

Key = tuple[str, int, int]
"""A choice: rid, epoch, choice."""

MOST_ACKS = 1024
MOST_TOKENS = 2**22
"""So many tokens of the log's end are remembered for whoever asks after the start (16 bytes each)."""


@dataclass(frozen=True, slots=True)
class Recall:
    """A question; the engine answers with outputs, then with an `Ack` for `call`.

    `wanted`: a choice and the first absolute position that is not known yet. `calls`: control calls that wait. The
    answer's `info` names what the engine knows nothing of: {"unknown": [[rid, epoch, choice], …], "calls": [call, …]}.
    """

    call: str
    wanted: Sequence[tuple[Key, int]] = ()
    calls: Sequence[str] = ()


class Memory:
    """What folding the log has said, for the listener of a new process; dropped once it was asked for.

    Batches are kept as they came and looked into only when somebody asks, so that a start pays next to nothing.
    """

    def __init__(self) -> None:
        self._parts: deque[Output | TokenBatch] = deque()
        self._before: dict[Key, tuple[int, Sequence[int]]] = {}
        self._tokens = 0
        self.acks: dict[str, Ack] = {}

    def begin(self, state: State) -> None:
        """The fold begins with a state that has live requests: what they have by now."""
        for key, request in state.live.items():
            self._before[key] = (request.prompt_len, _generated(state, request))

    def take(self, effects: Effects) -> None:
        """What a record has led to."""
        for ack in effects.acks:
            self.acks[ack.call] = ack
            if len(self.acks) > MOST_ACKS:
                del self.acks[next(iter(self.acks))]
        outputs = effects.outputs
        parts = outputs.parts if isinstance(outputs, Outputs) else outputs
        for part in parts:
            self._parts.append(part)
            self._tokens += len(part)
        while self._tokens > MOST_TOKENS:
            self._tokens -= len(self._parts.popleft())

    def ended(self, wanted: Mapping[Key, int]) -> dict[Key, list[Output]]:
        """The last outputs of those of `wanted` that have ended, whole ones alone: none where the beginning is lost."""
        over = {key for part in self._parts for key in _ends(part) if key in wanted}
        found: dict[Key, list[Output]] = {key: [] for key in over}
        for key in over & self._before.keys():
            position, tokens = self._before[key]
            found[key].append(Output(*key, position, tokens, None, None, None, ""))
        for part in self._parts if over else ():
            for output in [part] if isinstance(part, Output) else part:
                key = (output.rid, output.epoch, output.choice)
                if key in over:
                    found[key].append(output)
        return {key: rows for key, rows in found.items() if rows[0].position <= wanted[key]}


def answer(recall: Recall, state: State, memory: Memory | None) -> Effects:
    """The answer to `recall`: outputs of what lives and of what `memory` saw end, and what is unknown."""
    wanted = dict(recall.wanted)
    gone = {key: position for key, position in wanted.items() if key not in state.live}
    ended = {} if memory is None or not gone else memory.ended(gone)
    outputs: list[Output] = []
    for key, position in wanted.items():
        request = state.live.get(key)
        if request is not None:
            generated, known = _generated(state, request), max(0, position - request.prompt_len)
            if generated[known:]:
                at = request.prompt_len + known
                outputs.append(Output(*key, at, generated[known:], None, None, None, state.version))
        for row in ended.get(key, ()):
            if row.finish_reason is not None or row.position + len(row.tokens) > position:
                outputs.append(row)
    said = {} if memory is None else memory.acks
    acks = [said[call] for call in recall.calls if call in said]
    pending = {*said, *state.pause_calls, *state.closing_calls, *(control.event.call for control in state.controls)}
    info = {
        "unknown": [list(key) for key in gone if key not in ended],
        "calls": [call for call in recall.calls if call not in pending],
    }
    acks.append(Ack(recall.call, True, info))
    return Effects(plan=None, outputs=outputs, acks=acks, kv_events=(), wake_at=None)


def _generated(state: State, request: Request) -> Sequence[int]:
    tokens = request.tokens if request.seat is None else gather(state, request.seat)
    generated: list[int] = tokens[request.prompt_len :].tolist()
    return generated


def _ends(part: Output | TokenBatch) -> list[Key]:
    """The choices that end in a part."""
    if isinstance(part, Output):
        return [(part.rid, part.epoch, part.choice)] if part.finish_reason is not None else []
    return [part.seats[index].request.key for index in part.ended]


__all__ = ["Key", "Memory", "Recall", "answer"]
