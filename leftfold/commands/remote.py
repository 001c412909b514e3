"""A chat with a server over its OpenAI-compatible API, with the standard library alone."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator
from http.client import HTTPException
from typing import Any

from leftfold.commands.common import UsageError


class RemoteChat:
    """Streams answers of the server at `url`; `model` None: the first it names."""

    def __init__(self, url: str, api_key: str | None, model: str | None, sampling: dict[str, Any]) -> None:
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"--url {url}: must start with http:// or https://")
        self._base = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._sampling = sampling
        self._model = model or self._first_model()

    def ask(self, messages: list[dict[str, str]]) -> Generator[str, None, None]:
        """One answer in pieces of text. Raises UsageError when the server refuses or cannot be reached."""
        body = {"model": self._model, "messages": messages, "stream": True, **self._sampling}
        with self._open("/v1/chat/completions", json.dumps(body).encode()) as response:
            yield from self._pieces(response)

    def _pieces(self, response: Any) -> Iterator[str]:
        try:
            for line in response:
                data = line.decode().strip().removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                if not line.startswith(b"data:"):
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise UsageError(f"the server says: {event['error'].get('message', event['error'])}")
                for choice in event.get("choices", ()):
                    if text := choice["delta"].get("content"):
                        yield text
        except (OSError, HTTPException) as error:
            raise UsageError(f"the server at {self._base} went away: {error}") from error

    def _first_model(self) -> str:
        with self._open("/v1/models") as response:
            models = json.load(response).get("data", [])
        if not models:
            raise UsageError(f"the server at {self._base} names no model")
        return str(models[0]["id"])

    def _open(self, path: str, body: bytes | None = None) -> Any:
        request = urllib.request.Request(self._base + path, body, self._headers)
        try:
            return urllib.request.urlopen(request)
        except urllib.error.HTTPError as error:
            raise UsageError(f"{self._base}{path} answers {error.code}: {_message(error)}") from error
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise UsageError(f"no server at {self._base}: {reason}") from error


def _message(error: urllib.error.HTTPError) -> str:
    raw = error.read(4096).decode(errors="replace")
    try:
        return str(json.loads(raw)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return " ".join(raw.split())[:200] or error.reason
