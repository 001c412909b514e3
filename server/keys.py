"""Who may ask for what: the API key for everything, the admin key for control as well; pages of others for nothing."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("latin-1", "replace")).digest()


class Keys:
    """Compared as digests, in constant time. Without an admin key control routes want the API key, if there is one."""

    def __init__(self, api_key: str | None, admin_key: str | None, control_paths: Collection[str]) -> None:
        self._user = _digest_of(api_key)
        self._admin = _digest_of(admin_key)
        self._control_paths = control_paths

    def allow(self, path: str, headers: Headers) -> bool:
        """Whether the bearer token of a request opens `path`; the admin key opens whatever the API key opens."""
        if path in self._control_paths and self._admin is not None:
            wanted = [self._admin]
        elif self._user is None:
            return True
        else:
            wanted = [self._user] if self._admin is None else [self._user, self._admin]
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = _digest(token.strip())
        fits = [hmac.compare_digest(given, key) for key in wanted]  # all of them, so that time tells nothing
        return scheme.lower() == "bearer" and any(fits)

    def foreign(self, path: str, headers: Headers) -> bool:
        """Whether a browser asks for a control route on behalf of a page from elsewhere; the page needs no answer."""
        origin = headers.get("origin")
        return path in self._control_paths and origin is not None and urlsplit(origin).netloc != headers.get("host", "")


def _digest_of(key: str | None) -> bytes | None:
    return None if key is None else hashlib.sha256(key.encode()).digest()
