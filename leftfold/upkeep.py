"""What happens beside a log, in a thread of its own: snapshots are written, closed segments compressed and removed."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from queue import Empty, SimpleQueue

from leftfold.events import LogError, LogNotFound
from leftfold.events.compaction import Retention, compress_next, prune
from leftfold.replay.snapshots import Capture

logger = logging.getLogger("leftfold.log")

SECONDS = 30.0
"""How often segments are looked at while nothing else happens."""


class Upkeep:
    """Saves the snapshots it is given, and keeps the log's folder small. Nothing that fails here stops the engine.

    `retention`: what is removed once no recovery needs it. `close` waits for what was given, not for segments.
    """

    def __init__(self, directory: Path, retention: Retention, seconds: float = SECONDS) -> None:
        self._directory = directory
        self._retention = retention
        self._seconds = seconds
        self._jobs: SimpleQueue[tuple[Capture, int] | None] = SimpleQueue()
        self._closing = False
        self._said = ""
        self.done = 0  # number of the record whose snapshot was last dealt with, saved or not
        self._thread = threading.Thread(target=self._run, name="leftfold-upkeep", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def save(self, taken: Capture, chain: int) -> None:
        """Write a snapshot; the log is durable up to its record, whose checksum is `chain`."""
        self._jobs.put((taken, chain))

    def close(self, timeout: float | None = None) -> None:
        """Save what is left, for at most `timeout` seconds; one that is cut off leaves the one before it as it was."""
        self._closing = True
        self._jobs.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _run(self) -> None:
        self._tidy()
        while True:
            try:
                job = self._jobs.get(timeout=self._seconds)
            except Empty:
                self._tidy()
                continue
            if job is None:
                return
            self._save(*job)
            self.done = job[0].seq
            self._tidy()

    def _save(self, taken: Capture, chain: int) -> None:
        try:
            taken.save(self._directory, chain)
        except OSError as error:
            logger.warning("the snapshot after record %d could not be written: %s", taken.seq, error)
        except Exception:  # the boundary: the next one may do
            logger.exception("the snapshot after record %d could not be taken", taken.seq)

    def _tidy(self) -> None:
        try:
            while not self._closing and compress_next(self._directory) is not None:
                pass
            if not self._closing:
                for name in prune(self._directory, self._retention):
                    logger.info("removed %s: retention, and no recovery needs it", name)
        except LogNotFound:
            pass  # nothing is written yet
        except (OSError, LogError) as error:
            if str(error) != self._said:
                self._said = str(error)
                logger.warning("the log's folder could not be tidied: %s", error)
        except Exception:  # the boundary: snapshots go on
            logger.exception("the log's folder could not be tidied")


__all__ = ["Upkeep"]
