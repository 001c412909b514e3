"""Where what is fetched, converted and compiled is kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """`$LEFTFOLD_CACHE`, or `~/.cache/leftfold`. Raises `RuntimeError` where nobody knows a home."""
    named = os.environ.get("LEFTFOLD_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "leftfold"
