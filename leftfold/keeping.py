"""How long events are kept: not at all, or group-committed to disk by a thread of their own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

from leftfold.events import Event, EventLog, ForwardDone, LogError, Record, Tick, encode

logger = logging.getLogger("leftfold.log")

COMMIT_SECONDS = 0.1
"""How often what was appended is made durable."""


class NoLog:
    """Numbers events and keeps none of them (`durability` "off"); what a log could not hold is refused all the same."""

    def __init__(self) -> None:
        self._seq = 0

    def append(self, event: Event) -> int:
        if not isinstance(event, Tick | ForwardDone):
            encode(event)
        self._seq += 1
        return self._seq

    def flush(self) -> int:
        return self._seq

    sync = flush

    def close(self) -> None:
        pass  # nothing is kept

    def __iter__(self) -> Iterator[Record]:
        return iter(())


class GroupCommit:
    """A thread that syncs a log every `seconds` while anything was appended; for `durability` "async".

    A write that fails (a full disk) has lost nothing and is tried again; a sync that fails breaks the log: the next
    append raises, and so stops the engine with the reason.
    """

    def __init__(self, log: EventLog, seconds: float = COMMIT_SECONDS) -> None:
        self._log = log
        self._seconds = seconds
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="leftfold-log", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        synced, failing = 0, False
        while not self._done.wait(self._seconds):
            if self._log.next_seq - 1 == synced:
                continue
            try:
                synced = self._log.sync()
            except LogError as error:  # broken or closed: nothing more can be done here
                logger.error("the log is not made durable any more: %s", error)
                return
            except OSError as error:
                if not failing:
                    logger.error("the log could not be made durable, trying again: %s", error)
                failing = True
            else:
                if failing:
                    logger.warning("the log is durable again, up to seq %d", synced)
                failing = False

    def close(self) -> None:
        """Stop; the log's own `close` makes the rest durable."""
        self._done.set()
        self._thread.join()


class CommittedLog:
    """A directory's log with its group commit, as one thing to the engine."""

    def __init__(self, log: EventLog, seconds: float = COMMIT_SECONDS) -> None:
        self._log = log
        self._commit = GroupCommit(log, seconds)
        self.append = log.append
        self.flush = log.flush
        self.sync = log.sync

    def __iter__(self) -> Iterator[Record]:
        return iter(self._log)

    def close(self) -> None:
        self._commit.close()
        self._log.close()


__all__ = ["CommittedLog", "GroupCommit", "NoLog"]
