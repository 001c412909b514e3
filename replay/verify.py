"""Re-decide a log at every `Tick` and compare: the first difference is a divergence, named by number and field."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from leftfold.events import CodecError, Event, ForwardDone, LogDamaged, LogError, Record, SnapshotBad, Started, Tick
from leftfold.fsm import Effects, Outputs, State, decide
from leftfold.replay.checkout import Checkout, CheckoutError
from leftfold.replay.compare import Divergence, compare_plans, compare_records, plan_dict
from leftfold.replay.errors import NotStarted, ReducerFault, ReplayError, SettingsError
from leftfold.replay.fold import Fold
from leftfold.replay.snapshots import Log, is_log, whole


@dataclass(slots=True)
class Verdict:
    """What a verification found.

    `events`: records read; `steps`: plans that went to an executor; `tokens`: tokens that clients were given.
    `damage`: where and why the log cannot be read to its end (`reason`, and the place where it is known). `torn`: the
    place of a torn last line, which is no finding. `first_seq`: of the first record that is there; `folded_from`: of
    the first that was folded, later where a snapshot stands in for what is not there any more. `snapshots`: how many of
    them had the digest that the fold had there.
    """

    events: int = 0
    steps: int = 0
    tokens: int = 0
    divergence: Divergence | None = None
    damage: dict[str, Any] | None = None
    torn: dict[str, Any] | None = None
    first_seq: int = 1
    folded_from: int = 1
    snapshots: int = 0

    @property
    def clean(self) -> bool:
        return self.divergence is None and self.damage is None

    def as_dict(self) -> dict[str, Any]:
        """The verdict as one JSON-able object."""
        divergence = None if self.divergence is None else self.divergence.as_dict()
        found = {"events": self.events, "steps": self.steps, "tokens": self.tokens, "divergence": divergence}
        read = {"first_seq": self.first_seq, "folded_from": self.folded_from, "snapshots": self.snapshots}
        return {**found, "damage": self.damage, "torn": self.torn, **read}

    def describe(self) -> str:
        """Some lines for a reader."""
        lines = [f"{self.events} events, {self.steps} steps, {self.tokens} tokens"]
        if self.first_seq > 1:
            text = f"the log begins at record {self.first_seq}"
            lines.append(f"{text}, folded from the snapshot before {self.folded_from}")
        if self.snapshots:
            lines.append(f"{self.snapshots} snapshot{'s' if self.snapshots > 1 else ''} as folded")
        if self.torn:
            lines.append(f"torn tail: {_place(self.torn)}: {self.torn['size']} bytes of a record never finished")
        if self.damage:
            place = f"{_place(self.damage)}: " if "line" in self.damage else ""
            lines.append(f"damaged log: {place}{self.damage['reason']}")
        if self.divergence:
            lines.append(self.divergence.describe())
        return "\n".join([*lines, "no divergence"] if self.clean else lines)


def _place(found: Mapping[str, Any]) -> str:
    return f"{found['segment']}, line {found['line']}, byte {found['byte']}"


@dataclass(slots=True)
class _Verifier:
    """Folds the recorded plans; beside that, decides anew until the first difference.

    With other settings the new decisions come from a second state, which is right up to the first difference; the
    first state goes on with the recorded plans, so that the whole log is folded and counted.
    """

    recorded: Fold
    decided: Fold | None
    verdict: Verdict
    other: Checkout | None = None
    digests: Mapping[int, str] = field(default_factory=dict)
    chain: dict[int, str] = field(default_factory=dict)
    broken: bool = False

    def take(self, seq: int, event: Event) -> None:
        self.verdict.events += 1
        if self.broken or seq <= self.recorded.seq:
            return self._count(event)
        try:
            self._compare(seq, event)
            effects = self.recorded.take(seq, event)
            self._attest(seq, event, effects)
            self._count(event)
            if seq in self.digests:
                self._compare_snapshot(seq)
            assert isinstance(effects.outputs, Outputs)
            self.verdict.tokens += effects.outputs.count
        except (SettingsError, CheckoutError):
            raise
        except ReplayError as error:
            self.broken = True
            self._diverge(Divergence(seq, "fold", "a record that folds", str(error)))
            self._count(event)

    def _compare(self, seq: int, event: Event) -> None:
        if self.verdict.divergence is not None:
            return
        if self.other is not None:
            return self._ask(self.other, seq, event)
        fold = self.decided or self.recorded
        if isinstance(event, Tick) and fold.state is not None:
            if event.plan is None:
                return self._diverge(Divergence(seq, "plan", None, "a decision that failed when it was logged"))
            self._diverge(compare_plans(seq, event.plan, _decide(seq, fold.state, event.t)))
        if self.decided is not None and self.verdict.divergence is None:
            self.decided.take(seq, event)

    def _ask(self, other: Checkout, seq: int, event: Event) -> None:
        """Compare with what another checkout's planner decides, which folds the recorded plans as well."""
        if isinstance(event, Started) and self.recorded.state is None and event.config is not None:
            other.begin(dict(event.config))
        elif isinstance(event, Tick) and event.plan is not None:
            said = other.decide(event.t)
            if "error" in said:
                self._diverge(Divergence(seq, "plan", plan_dict(event.plan), said["error"]))
            else:
                self._diverge(compare_records(seq, plan_dict(event.plan), said["plan"]))
        other.take(event)

    def _attest(self, seq: int, event: Event, effects: Effects) -> None:
        """A result must name the digest of the plan it executed, as the fold chains it."""
        if isinstance(event, Started):
            self.chain.clear()
        elif effects.plan is not None:
            self.chain[effects.plan.step] = effects.plan.digest
        elif isinstance(event, ForwardDone):
            expected = self.chain.pop(event.step, None)
            if event.digest is not None and expected is not None and event.digest != expected:
                self._diverge(Divergence(seq, "digest", event.digest, expected))

    def _compare_snapshot(self, seq: int) -> None:
        assert self.recorded.state is not None
        digest = self.recorded.state.digest()
        if digest == self.digests[seq]:
            self.verdict.snapshots += 1
        else:
            self._diverge(Divergence(seq, "snapshot", self.digests[seq], digest))

    def _count(self, event: Event) -> None:
        self.verdict.steps += isinstance(event, Tick) and event.plan is not None and event.plan.step is not None

    def _diverge(self, divergence: Divergence | None) -> None:
        if self.verdict.divergence is None:
            self.verdict.divergence = divergence


def _decide(seq: int, state: State, t: int) -> Any:
    try:
        return decide(state, t)
    except Exception as error:  # nothing raises out of `decide` but a programmer's error
        raise ReducerFault(seq, None, error) from error


def verify(
    records: Iterable[Record], settings: Mapping[str, Any] | None = None, other: Checkout | None = None
) -> Verdict:
    """Fold and re-decide `records`; `settings` replace those of the log when deciding anew.

    With `other` its planner decides instead of this one. Raises `CheckoutError` where it cannot be asked.
    Each snapshot of a log must have the digest that the fold has there. A log whose beginning was removed is read as
    far as it is there, and folded from its oldest snapshot. Nothing that a log holds raises: what cannot be read is
    `damage`, what cannot be folded a divergence. Raises `SettingsError` when the settings make no usable config, or the
    log's beginning is not there.
    """
    verdict = Verdict()
    try:
        start, digests = _prepare(records, settings or other, verdict)
        verifier = _Verifier(start, Fold(override=settings) if settings else None, verdict, other, digests)
        for record in records:
            verifier.take(record.seq, record.event)
    except NotStarted as error:  # from the preparation: those of records are divergences
        verdict.damage = {"reason": str(error)}
    except (LogError, CodecError) as error:
        verdict.damage = error.as_dict() if isinstance(error, LogDamaged) else {"reason": str(error)}
    if dropped := getattr(records, "dropped", None):
        verdict.torn = dropped.as_dict()
    if verdict.events == 0 and verdict.damage is None:
        verdict.damage = {"reason": "the log is empty"}
    return verdict


def _prepare(
    records: Iterable[Record] | Log, otherwise: object, verdict: Verdict
) -> tuple[Fold, Mapping[int, str]]:
    """Where the fold begins, and the digests of the snapshots that it will come by. Raises `NotStarted`.

    `otherwise`: other settings or another planner, which need the beginning of the log.
    """
    if not is_log(records):
        return Fold(), {}
    start, _ = whole(records)
    verdict.first_seq, verdict.folded_from = records.first_seq, start.seq + 1
    if start.seq and otherwise:
        text = f"the log begins at record {records.first_seq}: other settings and planners need a log that is whole"
        raise SettingsError(text)
    digests = {}
    for seq in records.snapshots():
        if seq > start.seq:
            with suppress(SnapshotBad):  # `log verify` names those
                digests[seq] = records.snapshot(seq).digest
    return start, digests


__all__ = ["Verdict", "verify"]
