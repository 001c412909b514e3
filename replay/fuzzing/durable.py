"""A world whose events go through the real log on a simulated disk, and that dies and comes back from there."""

from __future__ import annotations

from typing import Any

from leftfold.events import Admit, Event, LogError, Plan, Started
from leftfold.fsm import Effects
from leftfold.replay.errors import ReplayError
from leftfold.replay.fuzzing.device import Device
from leftfold.replay.fuzzing.disk import SimDisk
from leftfold.replay.fuzzing.errors import Violation
from leftfold.replay.fuzzing.journal import Journal, opening
from leftfold.replay.fuzzing.world import World


class DurableWorld(World):
    """`segment_bytes`: where the log begins a new segment; `sync_every`: records after which it syncs (0: when told).

    What everybody knew after each event is kept, since a crash may take the log back to any of them.
    """

    def __init__(
        self, *, segment_bytes: int = 1 << 20, sync_every: int = 1, vocab: int = 50, rigour: int = 1, checks: int = 1,
        routers: bool = True, **config: Any,
    ) -> None:  # fmt: skip
        super().__init__(vocab=vocab, rigour=rigour, checks=checks, routers=routers, **config)
        self.disk = SimDisk()
        self.journal = Journal(self.disk, segment_bytes, sync_every)
        self._opening = opening(self.first_config)
        self.journal.append(self._opening)
        self._known: list[Any] = [self._knowledge()]

    def take(self, event: Event, plan: Plan | None = None) -> Effects:
        self.journal.append(event)
        return super().take(event, plan)

    def _fold(self, event: Event, plan: Plan | None = None) -> Effects:
        effects = super()._fold(event, plan)
        self._known.append(self._knowledge())
        return effects

    def _refused(self, event: Admit, code: str) -> None:
        super()._refused(event, code)
        self._known.append(self._knowledge())

    def _knowledge(self) -> tuple[Any, ...]:
        router = None if self.router is None else self.router.save()
        return self.audience.save(), self.desk.save(), router, len(self.verbs)

    # Commands

    def snapshot(self) -> None:
        """The state is saved beside the log."""
        started = [event for event in self.log if isinstance(event, Started)]
        self.journal.save(self.state, self._opening, started[-1] if started else self._opening)

    def flush(self) -> None:
        """The log hands over what waits."""
        self.journal.flush()

    def sync(self) -> None:
        """The log makes safe what waits."""
        self.journal.sync()

    def lying_disk(self) -> None:
        """From now on the disk confirms what it does not carry out; a crash ends that."""
        self.disk.lies = True

    def full_disk(self, room: int = 0) -> None:
        """So many bytes still fit."""
        self.disk.room = room

    def space(self) -> None:
        """Somebody made room on the disk; what waited is written."""
        self.disk.room = None
        self.journal.sync()

    def clock_back(self, us: int = 1) -> None:
        """A clock that jumps back cannot bring an older event into the log."""
        if us and self.journal.log.last_t >= us:
            self.journal.go_back(Started(t=self.journal.log.last_t - us))

    def crash(
        self,
        *,
        power: bool = False,
        keep: int = 0,
        torn: int = 0,
        hole: int | None = None,
        earlier: int | None = None,
        damage: str | None = None,
        at: int = 0,
        other: int = 0,
        read_error: int | None = None,
        failed_sync: bool = False,
        back: int = 0,
        old: bool = False,
        **changes: Any,
    ) -> None:
        """The process dies and starts again from its log, perhaps with other limits.

        `power`: the machine dies, too (`keep`, `hole`, `earlier`: see `SimDisk.power_cut`); else its last write may be
        `torn`. `damage`: one of `DAMAGES`, at byte `at`, with `other`. `read_error`: a byte that cannot be read at the
        first try. `failed_sync`: this is why it died. `back`: µs by which the clock is behind afterwards. `old`: it was
        another version that wrote the log.
        """
        lied = self.disk.lies or self.disk.deceives
        if failed_sync:
            self.journal.fail_sync()
        holed = False
        if power:
            holed = self.disk.power_cut(keep, hole, earlier)
        else:
            self.disk.kill(torn)
        harmed = damage is not None and self.disk.damage(damage, at, other)
        # A disk that lies may lose the end of a segment that another follows: that is harm, and is named.
        gone = damage == "lost" and not (holed or lied)
        kept = self.journal.reopen(harmed=harmed or holed or lied, cut=lied, read_error=read_error, gone=gone)
        if old and kept:
            self.journal.age()
            self.journal.reopen(harmed=False, cut=False)
        self._recover(kept, back)
        self.start(**changes)

    def _recover(self, kept: int, back: int) -> None:
        """Be what the log says, and know what was known then."""
        if not kept:
            self.journal.append(self._opening)
        events = max(0, kept - 1)
        del self.log[events:]
        del self._known[events + 1 :]
        self._believe(self._known[events])
        try:
            folded = self.journal.recover()
        except (ReplayError, LogError) as error:
            raise Violation("recovery", f"the log does not fold: {error}") from error
        assert folded.state is not None
        self.state = folded.state
        if self.router is not None:
            self.state.listen()
        self.state.check()
        self.t = max(folded.t, self.t - back)
        self.flights.clear()
        self._voided.clear()
        self._late.clear()
        self.apart.clear()
        if self.shares is not None:
            self.shares.forget()
        config = self.config
        self.device = Device(config.num_pages, config.page_size, self.vocab)
        self.check_effects()
        self._compare_with_state()

    def _believe(self, known: tuple[Any, ...]) -> None:
        audience, desk, router, verbs = known
        self.audience.restore(audience)
        self.desk.restore(desk)
        if self.router is not None:
            self.router.restore(router)
        del self.verbs[verbs:]

    def _compare_with_state(self) -> None:
        """Who lives by the log is who lived, with what each was told."""
        state = self.state
        if state.live.keys() != self.clients.keys():
            raise Violation("recovery", f"{[*state.live]} live by the log, {[*self.clients]} by their own accounts")
        for key, request in state.live.items():
            client = self.clients[key]
            tokens = [*client.prompt, *client.tokens[: client.heard]]
            known = state.known(request)
            if known != len(tokens) or request.tokens.tolist() != tokens[: len(request.tokens)]:
                raise Violation("recovery", f"{key} has {known} tokens by the log, it heard {client.heard}")

    def finish(self, replay: bool = True) -> None:
        self.disk.lies = False
        self.space()
        super().finish(replay)
        self.journal.sync()
        kept = self.journal.reopen(harmed=False, cut=False)
        if kept != len(self.log) + 1:
            raise Violation("log-lost", f"{len(self.log) + 1} records were logged, {kept} are left at the end")
        folded = self.journal.recover()
        if folded.state is None or folded.state.digest() != self.state.digest():
            raise Violation("replay", "the log on the disk folds to another state")
