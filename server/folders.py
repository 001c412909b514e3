"""The folder of a server's sockets: private, with a short path, and swept away by a later start if its owner died."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_SOCKET_PATH = 100  # a Unix socket's path has 107 bytes at most, on some systems 103
_NAME = re.compile(r"leftfold-(\d+)-\w+")


class SocketFolder:
    """A new folder that nobody else may enter. Its lock says that its process lives; `close` removes it."""

    def __init__(self) -> None:
        sweep(Path(tempfile.gettempdir()))
        prefix = f"leftfold-{os.getpid()}-"
        self.path = tempfile.mkdtemp(prefix=prefix)
        if len(os.fsencode(self.path)) + len("/commands") > _SOCKET_PATH:
            os.rmdir(self.path)
            self.path = tempfile.mkdtemp(prefix=prefix, dir="/tmp")
        self._lock = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def sweep(parent: Path) -> None:
    """Remove our folders in `parent` whose processes are gone: no such process, and nobody holds the lock."""
    for folder in parent.glob("leftfold-*"):
        with suppress(OSError):  # somebody else's, or gone meanwhile
            match = _NAME.fullmatch(folder.name)
            if match is None or folder.is_symlink() or folder.stat().st_uid != os.getuid() or _lives(int(match[1])):
                continue
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # taken: a process of another namespace lives
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # another user's
    return True


__all__ = ["SocketFolder", "sweep"]
