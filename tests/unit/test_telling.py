"""Who hears what when a strict log ends: everybody once, and as of the place that they have reached."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from leftfold.attaching import Delivery
from leftfold.events import Pause
from leftfold.events.writer import Failure
from leftfold.fsm import Ack, FinishReason, Output, State
from leftfold.keeping import Keeper
from leftfold.telling import Telling


class Log:
    """A strict log that is safe up to record 1."""

    strict, safe = True, 1
    failure: Failure | None = None


def output(rid: str, position: int, end: FinishReason | None = None) -> Output:
    return Output(rid, 0, 0, position, (7,), end, None, None, "")


def delivery(*outputs: Output, acks: tuple[Ack, ...] = ()) -> Delivery:
    return Delivery(None, outputs, acks, (), None)


def state(**live: int) -> State:
    """Requests by how many tokens they have, and a call in each place where one may wait."""
    control = SimpleNamespace(event=Pause(t=0, call="queued", mode="wait"))
    told: dict[str, Any] = {
        "live": {(rid, 0, 0): count for rid, count in live.items()}, "known": lambda request: request,
        "controls": [control], "pause_calls": ["pausing", ""], "closing_calls": ["closing"],
    }  # fmt: skip
    return cast(State, SimpleNamespace(**told))


def test_when_a_strict_log_ends_everybody_hears_an_error_once_at_the_place_they_have_reached() -> None:
    log = Log()
    telling = Telling(cast(Keeper, log))
    telling.hold(1, delivery(output("a", 4)))
    assert [told.outputs[0].position for told in telling.leaving()] == [4]
    for at in range(5, 9):
        telling.hold(at, delivery(output("a", at)))
    telling.hold(9, delivery(output("over", 3, FinishReason.STOP), acks=(Ack("done", True, None),)))
    log.failure = Failure("Input/output error", lasting=True)
    assert telling.stranded
    telling.strand(state(a=9, silent=2))
    told, _ = telling.leaving()
    assert {one.rid: one.position for one in told.outputs} == {"a": 5, "over": 3, "silent": 2}
    assert {one.finish_reason for one in told.outputs} == {FinishReason.ERROR}
    assert {ack.call for ack in told.acks} == {"done", "queued", "pausing", "closing"}
    assert not any(ack.ok for ack in told.acks)
    telling.hold(10, delivery(output("a", 9, FinishReason.STOP)))
    telling.strand(state(a=10, silent=2))
    assert telling.leaving() == [] and not telling._held


@pytest.mark.parametrize("words", ["", "go on"])
def test_other_words_than_stop_and_serve_are_refused(words: str) -> None:
    with pytest.raises(ValueError, match="on_failure is"):
        Telling(cast(Keeper, Log()), words)
