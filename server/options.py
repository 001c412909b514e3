"""What `leftfold serve` can be told: plain data that the command line fills and both processes read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from leftfold.checking import Named, OneOf, Seconds, Whole
from leftfold.options import EngineOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions(EngineOptions):
    """Options of one server: the engine's, and those of HTTP.

    `shutdown_timeout` in seconds. `max_body_bytes`: largest request body. `max_open_requests`: HTTP requests that are
    being answered at a time. `max_n`: most choices of one request. `request_timeout`, `queue_timeout`: seconds until a
    request ends, or must run, at the latest (0: no limit). `sleep_policy`: while paused or asleep new requests "wait",
    or the server will "refuse" them. `engine_restarts`: how often in a row an engine process that died is started
    again. `on_disconnect`: a stream whose last reader hangs up is ended ("abort"), or goes on ("continue").
    `retain_responses`: seconds for which an answer can be read again after its end. An empty key is a ValueError: it
    would open the server.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Whole(0, 65_535)] = 8000
    api_key: str | None = None
    admin_api_key: str | None = None
    served_model_name: Annotated[str | None, Named()] = None
    shutdown_timeout: Annotated[float, Seconds()] = 2.0
    request_timeout: Annotated[float, Seconds()] = 0.0
    queue_timeout: Annotated[float, Seconds()] = 600.0
    sleep_policy: Annotated[str, OneOf(("wait", "refuse"))] = "wait"
    engine_restarts: Annotated[int, Whole(0)] = 5
    on_disconnect: Annotated[str, OneOf(("abort", "continue"))] = "abort"
    retain_responses: Annotated[float, Seconds()] = 600.0
    max_body_bytes: Annotated[int, Whole()] = 16 * 1024 * 1024
    max_open_requests: Annotated[int, Whole()] = 4096
    max_n: Annotated[int, Whole()] = 128
    disable_access_log: bool = False

    def __post_init__(self) -> None:
        EngineOptions.__post_init__(self)
        for name in ("api_key", "admin_api_key"):
            key = getattr(self, name)
            if key is not None and not key.strip():
                raise ValueError(f"{name} is empty; give a key, or leave it out to let everybody in")

    def to_dict(self) -> dict[str, Any]:
        """The options as JSON-able data, for the engine process."""
        return dataclasses.asdict(self)

    def without_keys(self) -> dict[str, Any]:
        """The options as data for whoever needs no keys."""
        return dataclasses.asdict(dataclasses.replace(self, api_key=None, admin_api_key=None))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ServeOptions:
        """The options from `to_dict`; unknown keys raise TypeError."""
        return cls(**data)
