"""The actor that joins log, reducer and executor: one inbox, one order, one loop."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any

from leftfold.attaching import Attaching, Delivery, delivery
from leftfold.beginning import folded
from leftfold.errors import EngineError, EngineFault
from leftfold.events import Abort, Admit, Event, EventLog, ForwardDone, LogError, Started, Tick
from leftfold.executor.base import Attachment, Executor
from leftfold.fsm import LAWS, Ack, Config, Effects, Gate, decide
from leftfold.keeping import Keeper, await_safe, keeper
from leftfold.recall import Memory, Recall, answer
from leftfold.refuse import refusal
from leftfold.replay.errors import ReducerFault
from leftfold.replay.fold import Fold
from leftfold.results import Results
from leftfold.telling import STOP, Telling
from leftfold.worker import Done, GivenUp, Lost, Ready, Worker

logger = logging.getLogger("leftfold.engine")

CLOSE_SECONDS = 1.0
"""How long a stop waits for the step that runs; its rows go on from the log at the next start."""

SAVE_SECONDS = 10.0
"""How long a stop waits for the disk to take what it has not taken yet."""

_STOP = object()
_NEWS = object()
"""The log is further than it was, or fails, or does not fail any more."""


class Engine:
    """Takes messages from its inbox, logs and folds them, and keeps the executor busy.

    `start` folds what the log holds and logs a `Started`; `run` loops in the calling thread until `stop` (or until
    a `Shutdown` is through); `submit`, `stop` and `stats` may be called from any thread. `on_effects(delivery)` is
    called in the engine's thread for each event, in order, once the log says that the event is safe; the engine goes on
    computing meanwhile. `on_log_failure`: "stop" admitting, or "serve" on, while the log cannot be written. `clock`:
    wall nanoseconds. `resume`: whether requests that the log holds go on; else they are aborted at the start.
    `memory`: what the fold of the log said, kept until somebody asks for it; set before `start` where somebody will.
    `died`: how the process before this one died, if it did so of itself; its requests are under suspicion then.
    """

    def __init__(
        self,
        *,
        log: EventLog | Keeper,
        executor: Executor,
        config: Config,
        model: str,
        on_effects: Callable[[Delivery], None] | None = None,
        code: str = "",
        clock: Callable[[], int] = time.time_ns,
        backoff: float = 0.2,
        resume: bool = True,
        log_logprobs: bool = False,
        on_log_failure: str = STOP,
    ) -> None:
        self.log = keeper(log)
        self.config = config
        self.model = model
        self.fault = ""
        self.memory: Memory | None = None
        self.died = ""
        self._executor = executor
        self.on_effects = on_effects
        self._code = code
        self._resume = resume
        self._clock = clock
        self._fold = Fold()
        self._inbox: SimpleQueue[Any] = SimpleQueue()
        self._worker = Worker(executor, self._inbox.put, backoff)
        self._backoff = backoff
        self._lock = threading.Lock()
        self._telling = Telling(self.log, on_log_failure)
        self._deferred: deque[Event] = deque()
        self._news = False
        self._attaching = Attaching()
        self._launched = 0
        self._wall = 0
        self._wake_at: int | None = None
        self._results = Results(self._record, self._now, log_logprobs)
        self._incarnation = 0
        self._lost = False
        self._again = False
        self._stopping = False
        self._closed = False
        self.log.listen(self._log_news)

    @property
    def state(self) -> Any:
        """The folded state; read it in the engine's thread, or while the engine stands still."""
        return self._fold.state

    # Called from any thread

    def submit(self, event_type: type[Event], /, **fields: Any) -> bool:
        """Put an event without its time into the inbox; False once the engine has stopped. TypeError: a wrong field."""
        event = event_type(t=0, **fields)
        if not self._closed:
            self._inbox.put(event)
        return not self._closed

    def recall(self, recall: Recall) -> None:
        """Say again what a listener lacks; the answer comes among the effects, in its place."""
        if not self._closed:
            self._inbox.put(recall)

    def stop(self) -> None:
        """Leave `run` after what is in the inbox now; live requests stay in the log for the next start."""
        self._inbox.put(_STOP)

    def stats(self) -> dict[str, Any]:
        """What the state says right now, and why nothing is taken if so (`fault`)."""
        with self._lock:
            figures = dict(self.state.stats()) if self.state is not None else {}
        return {**figures, **self.log.figures(), "incarnation": self._incarnation, "fault": self.fault}

    @property
    def refusing(self) -> str:
        """Why nothing is admitted, "" while it is."""
        return self.fault or self._telling.refusing

    def _log_news(self) -> None:
        """In the log's thread. One message is enough for all that has happened until it is taken."""
        if not self._news:
            self._news = True
            self._inbox.put(_NEWS)

    # The life of an engine

    def start(self) -> None:
        """Fold the log, then log a `Started`. Raises ConfigurationError for a log of another model or other laws.

        A record on which the reducer fails is not tried again: the engine then comes up refusing all work, and
        `fault` says why.
        """
        try:
            self._fold, self.fault = folded(self.log, self.model, self.memory, self._results)
            if self._fold.first is not None and self._fold.last is not None:
                self._wall = self._fold.first.wall_ns
                self._incarnation = self._fold.last.incarnation
            if not self.fault:
                self._executor.reset()
                self._worker.start()
                if self.died and self.state is not None:
                    self._results.died(self.state, self.died)
                self._started()
                self._attaching.resume(self.state.live)
                self._take_up()
                self._commit()
        except BaseException:
            self.close()
            raise

    def _take_up(self) -> None:
        """Go on with what was live when the log ended, and say so; or end it, if it was not to be resumed."""
        count = len(self.state.live)
        if not count:
            return
        requests = f"{count} live request{'s' if count > 1 else ''} of the log"
        if self._resume:
            logger.warning("goes on with %s; --resume=no drops them", requests)
        else:
            self._record(Abort(t=self._now(), reason="not_resumed"))
            logger.warning("dropped %s", requests)

    def run(self) -> None:
        """The loop. Raises EngineFault when the reducer fails, EngineError when log or executor are beyond use."""
        try:
            while not self._stopping:
                self._turn(self._take())
        except ReducerFault as fault:
            self.fault = str(fault)
            raise EngineFault(self.fault, fault.seq) from fault
        finally:
            self.close()

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Flush and close the log; a forward that still runs gets `timeout` seconds and is left alone then."""
        if self._closed:
            return
        self._closed = True
        self._worker.close(timeout)
        if self.state is not None and not self.fault:
            self.log.snapshot(self._fold)
        try:
            self.log.close(SAVE_SECONDS)
        except (OSError, LogError) as error:
            logger.error("the log could not be closed: %s", error)
        self._emit()

    # The loop

    def _turn(self, messages: Iterable[Any]) -> None:
        """Everything that waited, in its order; then at most one decision; then what may leave by now does."""
        try:
            with self._lock:
                for message in messages:
                    self._handle(message)
                self._admit_deferred()
                if self.state is not None and self.state.gate is Gate.STOPPED:
                    self._stopping = True
                self._again = self._may_plan() and self._tick()
                if not self.fault and self.log.snapshot_due(self._fold.seq):
                    self.log.snapshot(self._fold)
        finally:
            self._commit()
            self._emit()

    def _may_plan(self) -> bool:
        """Not while more waits for the disk than memory should hold; a log that fails for so long is given up."""
        if self.fault or self._stopping or self._telling.stranded:
            return False
        if self.log.full and self.log.failure is not None and not (self.log.strict and self.refusing):
            self.log.abandon(f"{self.log.failure.reason}, and too much waits for it")
        return not self.log.full

    def _take(self) -> list[Any]:
        """All messages that are there; waits for one when there is nothing to do."""
        messages: list[Any] = []
        try:
            messages.append(self._inbox.get(timeout=self._patience()))
            while not self._inbox.empty():
                messages.append(self._inbox.get_nowait())
        except Empty:
            pass
        return messages

    def _patience(self) -> float | None:
        """Seconds to wait for a message: none after a decision, until `wake_at` at the latest."""
        if self._again:
            return 0.0
        if self._wake_at is None:
            return None
        return max(0.001, (self._wake_at - self._now()) / 1e6)

    def _handle(self, message: Any) -> None:
        match message:
            case Done(incarnation, result):
                if incarnation == self._incarnation and not self._lost and not self._results.done(self.state, result):
                    self._reset()
            case Lost(incarnation, plan, error):
                if incarnation == self._incarnation and not self._lost:
                    self._results.lost(self.state, plan.step, error)
                    self._reset()
            case Ready(incarnation):
                if incarnation == self._incarnation:
                    self._started(again=True)
            case GivenUp(error):
                raise EngineError(f"the executor was lost and cannot be reset: {error}")
            case _ if message is _NEWS:
                self._news = False
                if self._telling.stranded:
                    self._telling.strand(self.state)
            case _ if message is _STOP:
                self._admit_deferred(all_of_them=True)
                self._stopping = True
            case Recall() if not self._deferred:
                self._submitted(message)
            case _ if self._deferred or self._waiting_for_disk:
                self._deferred.append(message)
            case _:
                self._submitted(message)

    def _admit_deferred(self, all_of_them: bool = False) -> None:
        """What clients sent while the disk was behind, in its order, as far as it has caught up."""
        while self._deferred and (all_of_them or not self._waiting_for_disk):
            self._submitted(self._deferred.popleft())

    @property
    def _waiting_for_disk(self) -> bool:
        """Whether what clients send has to wait; where the log fails they are refused, or served all the same."""
        return self.log.behind and self.log.failure is None

    def _submitted(self, event: Event | Recall) -> None:
        if isinstance(event, Recall):
            self._recalled(event)
            return
        if self.fault or self._telling.stranded:
            self._telling.tell(refusal(event, "failed", self.refusing))
            return
        if self.refusing and (isinstance(event, Admit) or getattr(event, "call", "")):
            self._telling.tell(refusal(event, "closing", self.refusing))
            return
        try:
            self._record(replace(event, t=self._now()))
        except (TypeError, ValueError) as error:  # a value that no record can hold; nothing was written
            logger.warning("%s refused: %s", type(event).__name__, error)
            self._telling.tell(refusal(event, "invalid", f"cannot be logged: {error}"))
            return
        if isinstance(event, Admit) and event.want and self.state is not None:
            self._attaching.open(event, self.state.live, self._launched)

    def _recalled(self, recall: Recall) -> None:
        """Answered behind all that was sent before it: what the answer says is known is in the log by then."""
        if self.state is None or self._telling.stranded:
            self._telling.tell(Effects(None, (), [Ack(recall.call, False, self.refusing)], (), None))
            return
        self._telling.hold(self._fold.seq, delivery(answer(recall, self.state, self.memory)))
        self.memory = None

    def _reset(self) -> None:
        """Whatever still comes of this incarnation is void; one reset ends it."""
        self._lost = True
        self._worker.reset(self._incarnation, self._results.losses.delay(self._backoff))

    def _started(self, again: bool = False) -> None:
        """Log a `Started`; `again`: the executor was reset inside this process, so settings and weights stay."""
        wall = self._clock()
        self._wall = self._wall or wall
        self._incarnation += 1
        self._lost = False
        self._record(
            Started(
                t=max(self._fold.t, (wall - self._wall) // 1000),
                incarnation=self._incarnation,
                wall_ns=wall,
                config=(self.state.config if again else self.config).as_dict(),
                model=self.model,
                code=self._code,
                laws=LAWS,
                kept=("weights",) if again else (),
            )
        )
        self._again = True

    def _tick(self) -> bool:
        """Decide once; whether something was decided. A decision that fails is logged as a `Tick` without a plan."""
        now = self._now()
        try:
            plan = decide(self.state, now)
        except Exception as error:  # a programmer's error: the log shows where, so that no restart walks into it
            seq = self.log.append(Tick(t=now))
            raise ReducerFault(seq, None, error) from error
        if plan is None:
            return False
        effects = self._record(Tick(t=now, plan=plan))
        if effects.plan is not None:
            self._launched = effects.plan.step
            if now < self._results.careful_until:
                self._commit()
                await_safe(self.log, self._fold.seq)
            self._worker.execute(self._incarnation, effects.plan)
        return True

    def _record(self, event: Event, attachments: Sequence[Attachment] = ()) -> Delivery:
        """Log, then fold. TypeError or ValueError: the event cannot be written, and nothing happened.

        `attachments`: beside the result that a `ForwardDone` tells of.
        """
        try:
            seq = self.log.append(event)
        except (OSError, LogError) as error:
            raise EngineError(f"the log cannot be written: {error}") from error
        effects = self._fold.take(seq, event)
        if self.memory is not None:
            self.memory.take(effects)
        self._wake_at = effects.wake_at
        joined: Sequence[Attachment] = ()
        if self._attaching:
            if attachments and isinstance(event, ForwardDone) and self.state.executor_present:
                self._attaching.take(event.step, attachments)
            joined = self._attaching.join(effects.outputs)
        told = delivery(effects, joined)
        self._telling.hold(seq, told)
        return told

    def _emit(self) -> None:
        """What events that are safe by now led to leaves the engine."""
        for effects in self._telling.leaving():
            if self.on_effects is None:
                continue
            try:
                self.on_effects(effects)
            except Exception:  # the boundary: no listener stops the engine
                logger.exception("a listener failed")

    def _commit(self) -> None:
        try:
            self.log.commit()
        except (OSError, LogError) as error:
            raise EngineError(f"the log cannot be written: {error}") from error

    def _now(self) -> int:
        """Event time: µs since the first `Started` by the wall clock, never less than the last record's."""
        return max(self._fold.t, (self._clock() - self._wall) // 1000)
