"""Deadlines of requests: the server's, or an earlier one that the client asked for."""

from __future__ import annotations

from leftfold.server.options import ServeOptions

MICROSECONDS = 1_000_000


def deadlines(timeout: float | None, queue_timeout: float | None, options: ServeOptions) -> dict[str, int]:
    """`Admit`'s deadlines in µs (0: none) from seconds, the client's and the server's."""
    return {
        "deadline": _sooner(timeout, options.request_timeout),
        "queue_deadline": _sooner(queue_timeout, options.queue_timeout),
    }


def _sooner(asked: float | None, limit: float) -> int:
    seconds = min((value for value in (asked, limit) if value), default=0.0)
    return max(1, round(seconds * MICROSECONDS)) if seconds else 0
