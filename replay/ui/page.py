"""The page itself and how it is sent: its files, the headers that keep it to itself, what an answer is."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import NamedTuple

MOST_BODY = 1 << 20
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin", "Cross-Origin-Opener-Policy": "same-origin",
}  # fmt: skip
TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}


class Answer(NamedTuple):
    """What goes back. `type`: the content type."""

    status: int
    type: str
    body: bytes


@cache
def static_files() -> Mapping[str, tuple[str, bytes]]:
    """The page's files by name: content type and content."""
    return {
        path.name: (f"{TYPES[path.name.rpartition('.')[2]]}; charset=utf-8", path.read_bytes())
        for path in (files("leftfold.replay.ui") / "static").iterdir()
        if path.name.rpartition(".")[2] in TYPES
    }
