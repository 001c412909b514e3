"""Whether an engine's process died of what it was doing: then the requests of its step are under suspicion."""

from __future__ import annotations

import signal
from pathlib import Path

from leftfold.server.launch import BROKEN, FAULT, REFUSED, STOPPED

_SAID_WHY = (STOPPED, BROKEN, REFUSED, FAULT)
"""It ended in order, and its requests had no part in it."""
_FROM_OUTSIDE = (-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)
_VMSTAT = Path("/proc/vmstat")


def oom_kills() -> int:
    """How many processes this machine has killed for memory since it was started; 0 where it does not say."""
    try:
        lines = _VMSTAT.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def own_doing(code: int | None, killed_before: int) -> bool:
    """Whether a process that ended with `code` (negative: by that signal) brought it on itself.

    SIGKILL is somebody else's doing, unless the machine has killed for memory since there were `killed_before`.
    """
    if code is None or code in _SAID_WHY or code in _FROM_OUTSIDE:
        return False
    return code != -signal.SIGKILL or oom_kills() > killed_before


__all__ = ["oom_kills", "own_doing"]
