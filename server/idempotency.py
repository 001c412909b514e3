"""Asking again under a key of the client's: one answer for each key, however often and at whatever moment it is asked.

The header is `Idempotency-Key` (draft-ietf-httpapi-idempotency-key-header): the client that names its request this way
says that it means the same one. `X-Request-Id` says no such thing; it is echoed and nothing else.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import orjson
from starlette.requests import Request
from starlette.responses import Response

from leftfold.server.errors import ApiError, invalid
from leftfold.server.kept import Kept, Shelf
from leftfold.server.options import ServeOptions

HEADER = "Idempotency-Key"
REPLAYED = "Idempotent-Replayed"
"""Header of an answer that was asked for before."""
KEYED = {
    "parameters": [
        {"name": HEADER, "in": "header", "required": False, "schema": {"type": "string", "maxLength": 255},
         "description": "Asked again with the same key and body, the same answer comes; nothing is computed twice."}
    ]
}  # fmt: skip
"""The header's part of a route in `/openapi.json`."""
_NAME = re.compile(r'(?P<quote>"?)(?P<name>[\x21\x23-\x7e]{1,255})(?P=quote)')


@dataclass(frozen=True, slots=True)
class Key:
    """`name`: digest of the client's key, and of whose API key it is; `body`: of what is asked, route included."""

    name: str
    body: str


def key_of(request: Request, data: Any, options: ServeOptions) -> Key | None:
    """The key of a request whose body says `data`; None without the header. Raises a 400 ApiError.

    Without API keys all clients are one, whatever they send as theirs.
    """
    names = request.headers.getlist(HEADER)
    if not names:
        return None
    if len(names) > 1:
        raise invalid(HEADER, "is given more than once", names)
    given = names[0]
    found = _NAME.fullmatch(given)
    if found is None:
        raise invalid(HEADER, "must be 1 to 255 visible ASCII characters, in double quotes or not", given)
    keyed = options.api_key is not None or options.admin_api_key is not None
    whose = request.headers.get("authorization", "").partition(" ")[2].strip() if keyed else ""
    try:
        asked = orjson.dumps([request.url.path, data], option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError as error:  # it can be read deeper than it can be written
        raise invalid("body", f"cannot be compared with others ({error}); leave out {HEADER}") from error
    return Key(_digest(whose.encode(), found["name"].encode()), _digest(asked))


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\n".join(parts)).hexdigest()


class Turns:
    """One at a time looks for the answer of a key and, where there is none, makes it."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def turn(self, key: Key) -> AsyncIterator[Kept | None]:
        """The answer of `key` if there is one. Raises a 422 ApiError if it was asked for with another body.

        422 is the draft's; clients that take a 409 for a passing trouble would ask once more.
        """
        lock = self._locks.setdefault(key.name, asyncio.Lock())
        async with lock:
            kept = self._shelf.asked(key.name)
            if kept is not None and kept.terms.body != key.body:
                message = f"{HEADER}: was used for another request (route or body differ); take a new key"
                raise ApiError(422, message, param=HEADER, code="idempotency_key_reused")
            yield kept


def marked(response: Response, again: bool) -> Response:
    """`response`, with a header that says so if it was asked for before."""
    if again:
        response.headers[REPLAYED] = "true"
    return response


__all__ = ["HEADER", "KEYED", "REPLAYED", "Key", "Turns", "key_of", "marked"]
