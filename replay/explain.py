"""Why a request waited, was preempted or ended: a sentence for each cause, with the planner's own numbers.

The reasons are those that today's planner gives for the decisions in the log; where it decides otherwise than the log
says, the explanation says so. While a pause, sleep or a lost executor holds it nothing is decided: of that the state
between the records tells (`holding.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from leftfold.events import Record, Tick
from leftfold.fsm import Phase, Reason, State, decide
from leftfold.replay.compare import compare_plans
from leftfold.replay.fold import Fold
from leftfold.replay.holding import Hold, Holds, PutBack
from leftfold.replay.walking import opened

_WAITS = (Phase.WAITING, Phase.PREEMPTED)
_ROWS = {
    "victim": "had to give its pages back",
    "given_way": "had to give way to a higher class",
    "held_back": "was left out of a step, to give way after it",
    "no_page": "was left out of a step for want of a page",
    "put_back": "had to give its row up and go back in line",
}


@dataclass(slots=True)
class Cause:
    """One cause over a stretch of decisions: the first and the last of them, and the planner's last words.

    `hold`: of kind `gate`, which no decision has: what held it.
    """

    who: tuple[str, int, int]
    kind: str
    first_seq: int
    last_seq: int
    begin: int
    end: int
    decisions: int
    needed: int
    available: int
    text: str
    hold: Hold | None = None

    @classmethod
    def of_hold(cls, hold: Hold) -> Cause:
        """A stretch without decisions."""
        seqs, times = (hold.first_seq, hold.last_seq), (hold.begin, hold.end)
        return cls(hold.who, "gate", *seqs, *times, 0, 0, 0, hold.why, hold)

    @classmethod
    def of_put_back(cls, found: PutBack) -> Cause:
        """A row that was taken away."""
        return cls(found.who, "put_back", found.seq, found.seq, found.t, found.t, 1, 0, 0, found.text)

    def as_dict(self) -> dict[str, Any]:
        """Plain data; `seconds`: from the first of these decisions to the next one that was another."""
        rid, epoch, choice = self.who
        return {
            "rid": rid, "epoch": epoch, "choice": choice, "kind": self.kind, "first_seq": self.first_seq,
            "last_seq": self.last_seq, "seconds": (self.end - self.begin) / 1e6, "decisions": self.decisions,
            "needed": self.needed, "available": self.available, "text": self.text, "sentence": self.sentence(),
            "held": None if self.hold is None else self.hold.kind,
        }  # fmt: skip

    def sentence(self) -> str:
        """The cause in one sentence."""
        if self.hold is not None:
            return self.hold.sentence()
        if self.kind in _ROWS:
            return f"At seq {self.last_seq} ({self.end / 1e6:.3f} s) it {_ROWS[self.kind]}: {self.text}."
        if self.first_seq == self.last_seq:
            return f"At seq {self.first_seq} ({self.begin / 1e6:.3f} s) it waited: {self.text}."
        seconds = (self.end - self.begin) / 1e6
        return (
            f"From seq {self.first_seq} to {self.last_seq} ({seconds:.3f} s, {self.decisions} decisions) it waited for "
            f"{_FOR.get(self.kind, self.kind)}: {self.text}."
        )


_FOR = {
    "slots": "a slot", "budget": "room in a step", "pages": "pages",
    "order": "its turn", "deadline": "its end", "apart": "a suspect to run alone",
}  # fmt: skip


_STUCK = ("slots", "budget", "pages")
"""Why the first in line does not fit, and with it nobody behind it."""


def _together(causes: list[Cause]) -> str:
    """The sentence of causes of one kind."""
    if len(causes) == 1:
        return causes[0].sentence()
    first, last = causes[0], causes[-1]
    if first.kind in _ROWS:
        seqs = ", ".join(str(cause.last_seq) for cause in causes)
        return f"{len(causes)} times, at seq {seqs}, it {_ROWS[first.kind]}; the last time: {last.text}."
    seconds = sum(cause.end - cause.begin for cause in causes) / 1e6
    if last.hold is not None:
        where = ", ".join(str(cause.first_seq) for cause in causes)
        return (
            f"{len(causes)} times, from seq {where} on, it was held, {seconds:.3f} s in all; the last time "
            f"{(last.end - last.begin) / 1e6:.3f} s, {last.hold.phase}, while {last.text}."
        )
    return (
        f"{len(causes)} times between seq {first.first_seq} and {last.last_seq} ({seconds:.3f} s, "
        f"{sum(cause.decisions for cause in causes)} decisions) it waited for {_FOR.get(first.kind, first.kind)}; the "
        f"last time: {last.text}."
    )


@dataclass(slots=True)
class Explanation:
    """What is known of a request's waits. `phases`: of its choices where the explanation ends; `outcome`: their ends.

    `divergence`: the first decision up to there that today's planner makes otherwise.
    """

    rid: str
    seq: int = 0
    causes: list[Cause] = field(default_factory=list)
    phases: dict[str, str] = field(default_factory=dict)
    outcome: list[str] = field(default_factory=list)
    divergence: int | None = None
    known: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "rid": self.rid, "seq": self.seq, "phases": self.phases, "outcome": self.outcome,
            "causes": [cause.as_dict() for cause in self.causes], "divergence": self.divergence,
        }  # fmt: skip

    def sentences(self) -> list[str]:
        """One for each cause; stretches of one kind that come again and again are told together."""
        by_kind: dict[tuple[tuple[str, int, int], str, str], list[Cause]] = {}
        for cause in self.causes:
            held = cause.hold.text if cause.hold is not None else cause.text if cause.kind == "put_back" else ""
            by_kind.setdefault((cause.who, cause.kind, held), []).append(cause)
        return [_together(causes) for causes in by_kind.values()]

    def describe(self) -> str:
        """A sentence a line."""
        phases = ", ".join(f"{name} is {phase}" for name, phase in self.phases.items())
        lines = [f"{self.rid} at seq {self.seq}: {phases or 'not live'}."]
        lines += [f"  {text}" for text in self.sentences()] or ["  No decision left it out, and nothing held it."]
        lines += [f"  {text}" for text in self.outcome]
        if self.divergence is not None:
            lines.append(f"  Today's planner decides otherwise at seq {self.divergence}; see leftfold replay verify.")
        return "\n".join(lines)


def explain(
    records: Iterable[Record], rid: str, at: int | None = None, *, now: bool = False, until: int | None = None
) -> Explanation:
    """Why the requests called `rid` waited or gave way, up to sequence number `at`; `now`: at `at` alone.

    `until`: the µs up to which what still holds after `at` counts (None: the time of that record).
    """
    return explain_from(*opened(records), rid, at, now=now, until=until)


def explain_from(
    fold: Fold,
    rest: Iterable[Record],
    rid: str,
    at: int | None = None,
    *,
    now: bool = False,
    every: int = 1,
    until: int | None = None,
) -> Explanation:
    """The same, from where `fold` stands (and is taken on): what was before is not told.

    `every`: look at one decision in so many, and at those that preempt; the others are taken to be like it.
    """
    found, holds = Explanation(rid), Holds(rid)
    passed = 0
    open_causes: dict[tuple[str, int, int], Cause] = {}
    holds.begin(fold.state, fold.seq, fold.t)
    found.known = fold.state is not None and rid in fold.state.by_rid
    end: int | None = None  # when the record after the last one that is looked at comes
    for record in rest:
        if at is not None and record.seq > at:
            end = record.event.t
            break
        event, state = record.event, fold.state
        if state is not None and isinstance(event, Tick) and (at is None or not now or record.seq == at):
            preempts = event.plan is not None and len(event.plan.preempt) > 0
            if passed % every == 0 or preempts or record.seq == at:
                _look(found, open_causes, state, record, every)
            passed += 1
        effects = fold.take(record.seq, event)
        assert fold.state is not None
        found.seq = record.seq
        holds.take(record.seq, event, fold.state)
        for who in [who for who in open_causes if holds.holds(who)]:
            open_causes.pop(who).end = event.t
        for output in effects.outputs:
            if output.rid == rid and output.finish_reason is not None:
                text = f" ({output.error['text']})" if output.error else ""
                which = f" choice {output.choice}" if output.choice else ""
                found.outcome.append(
                    f"At seq {record.seq} ({event.t / 1e6:.3f} s){which} it ended: {output.finish_reason.value}{text}."
                )
        found.known = found.known or getattr(event, "rid", None) == rid
    state = fold.state
    if state is not None:
        for request in state.by_rid.get(rid, ()):
            assert request.phase is not None
            found.known = True
            found.phases[_name(request.epoch, request.choice)] = request.phase.name
        if found.phases and at is not None:
            _look_now(found, state, fold.t)
    holds.finish(found.seq, fold.t if until is None or end is None else min(until, end))
    _add_holds(found, holds, found.seq if now else None)
    return found


def _add_holds(found: Explanation, holds: Holds, seq: int | None) -> None:
    """What held it among the other causes, by time; `seq`: only what holds after that record, or happened at it."""
    held = [Cause.of_hold(hold) for hold in holds.all if seq is None or not hold.until]
    lost = [Cause.of_put_back(one) for one in holds.put_back if seq in (None, one.seq)]
    found.causes = sorted((*found.causes, *held, *lost), key=lambda cause: (cause.begin, cause.first_seq))


def _name(epoch: int, choice: int) -> str:
    return "it" if not epoch and not choice else f"epoch {epoch} choice {choice}"


def _look(
    found: Explanation, causes: dict[tuple[str, int, int], Cause], state: State, record: Record, weight: int
) -> None:
    """The reasons of one decision, which stands for `weight`; the state is as the decision saw it."""
    if not state.by_rid.get(found.rid):
        causes.clear()
        return
    event = record.event
    assert isinstance(event, Tick)
    reasons: list[Reason] = []
    decided = decide(state, event.t, trace=reasons)
    if found.divergence is None and event.plan is not None and compare_plans(record.seq, event.plan, decided):
        found.divergence = record.seq
    head = next((reason for reason in reasons if reason.kind in _STUCK), None)
    ours = {
        (reason.rid, reason.epoch, reason.choice): reason
        for reason in reasons
        if reason.rid == found.rid and reason.kind != "gate"  # of which the state tells how long
    }
    for who in [who for who in causes if who not in ours]:
        causes.pop(who).end = event.t
    for who, reason in ours.items():
        if reason.kind == "order" and head is not None and head.rid in reason.text:
            reason = reason._replace(text=f"{reason.text} ({head.text})")
        cause = causes.get(who)
        if cause is not None and cause.kind == reason.kind and reason.kind not in _ROWS:
            cause.last_seq, cause.end, cause.decisions = record.seq, event.t, cause.decisions + weight
            cause.needed, cause.available, cause.text = reason.needed, reason.available, reason.text
            continue
        if cause is not None:
            cause.end = event.t
        causes[who] = Cause(who, reason.kind, record.seq, record.seq, event.t, event.t, 1, *reason[4:])
        found.causes.append(causes[who])


def _look_now(found: Explanation, state: State, t: int) -> None:
    """What holds a waiting request back after the last record, where that is not known from a decision there."""
    waiting = [request for request in state.by_rid[found.rid] if request.phase in _WAITS]
    if not waiting or any(cause.last_seq == found.seq for cause in found.causes):
        return
    if len(state.in_flight) > state.config.pipeline_depth:
        steps = ", ".join(str(flight.step) for flight in state.in_flight)
        found.outcome.append(f"Nothing is decided before the result of step {steps} is in.")
        return
    reasons: list[Reason] = []
    decide(state.copy(), t, trace=reasons)
    for reason in reasons:
        if reason.rid == found.rid and reason.kind != "gate":
            who = (reason.rid, reason.epoch, reason.choice)
            found.causes.append(Cause(who, reason.kind, found.seq, found.seq, t, t, 1, *reason[4:]))


__all__ = ["Cause", "Explanation", "explain", "explain_from"]
