"""Fields of other types than an event declares: taken, or refused before anything is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from leftfold.events import Abort, Admit, Event, ForwardDone, SamplingParams, Shutdown, Started, Tick
from leftfold.fsm import Gate, State, step
from leftfold.fsm.snapshot import encode
from tests.unit.test_check import busy, dumps

ODD = [np.int64(1), np.float64(1), 2.5, "1", np.str_("a"), b"a", None, True, 1 << 70]

SHORT = SamplingParams(max_tokens=2)
CASES: dict[str, Any] = {
    "Admit.rid": lambda odd: Admit(t=3, rid=odd, prompt=[1, 2], params=SHORT),
    "Admit.epoch": lambda odd: Admit(t=3, rid="n", epoch=odd, prompt=[1, 2], params=SHORT),
    "Admit.tenant": lambda odd: Admit(t=3, rid="n", tenant=odd, prompt=[1, 2], params=SHORT),
    "Admit.cache_salt": lambda odd: Admit(t=3, rid="n", cache_salt=odd, prompt=[1, 2], params=SHORT),
    "Admit.t": lambda odd: Admit(t=odd, rid="n", prompt=[1, 2], params=SHORT, deadline=5),
    "Abort.keep": lambda odd: Abort(t=3, rid="b", keep=odd),
    "Abort.rid": lambda odd: Abort(t=3, rid=odd),
    "Shutdown.t": lambda odd: Shutdown(t=odd, call="s", deadline=5),
    "Shutdown.deadline": lambda odd: Shutdown(t=3, call="s", deadline=odd),
    "Started.incarnation": lambda odd: Started(t=3, incarnation=odd),
    "Tick.t": lambda odd: Tick(t=odd),
}


@pytest.mark.parametrize("odd", ODD, ids=repr)
@pytest.mark.parametrize("case", CASES)
def test_an_odd_field_is_taken_or_nothing_has_changed(case: str, odd: Any) -> None:
    state = busy()
    before = dumps(encode(state))
    event: Event = CASES[case](odd)
    try:
        step(state, event)
    except TypeError:
        assert dumps(encode(state)) == before
    state.check()


@pytest.mark.parametrize("odd", ODD, ids=repr)
@pytest.mark.parametrize("name", ["step", "digest"])
def test_a_result_with_an_odd_field_is_taken_or_loses_the_executor_or_is_of_no_step(name: str, odd: Any) -> None:
    state = busy()
    flight = state.in_flight[0]
    fields: dict[str, Any] = {"step": flight.step, "digest": flight.digest, "tokens": [5] * flight.expected}
    event = ForwardDone(t=3, **{**fields, name: odd})
    if name == "step" and not isinstance(odd, int | float | np.number):
        with pytest.raises(TypeError):
            step(state, event)
    else:
        step(state, event)
    state.check()


def test_a_shutdown_with_an_odd_deadline_is_one_or_none() -> None:
    state: State = busy()
    try:
        step(state, Shutdown(t=3, call="s", deadline=np.int64(9)))  # type: ignore[arg-type]
    except TypeError:
        assert state.gate is Gate.RUNNING and not state.closing_calls and not state.closing_at
    else:
        assert state.gate is Gate.CLOSING and state.closing_calls == ["s"] and state.closing_at == 12
