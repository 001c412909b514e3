"""Errors as clients see them: OpenAI's form, with a status, and a message that names field and value."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from itertools import islice
from typing import Any

_SHOWN = 80


class ApiError(Exception):
    """An answer other than success. `param` names the field at fault, `code` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The error object of OpenAI's API."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


_BEYOND = 2.0**63


def beyond(value: Any) -> bool:
    """Whether this may have been a whole number of more than 64 bits: such arrive from JSON as the nearest float."""
    return isinstance(value, float) and abs(value) >= _BEYOND


class _Short(reprlib.Repr):
    """Looks at the beginning of a value alone, however large it is."""

    maxlevel = 3

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 2 * _SHOWN

    def repr_str(self, value: str, level: int) -> str:
        return repr(value[: self.maxstring])

    def repr_float(self, value: float, level: int) -> str:
        return "a number beyond 64 bits" if beyond(value) else repr(value)

    def repr_dict(self, value: Mapping[Any, Any], level: int) -> str:
        if level <= 0:
            return "{…}"
        shown = [f"{self.repr1(k, level - 1)}: {self.repr1(v, level - 1)}" for k, v in islice(value.items(), 6)]
        return "{" + ", ".join(shown) + (", …}" if len(value) > 6 else "}")


def shown(value: Any) -> str:
    """A value as it may stand in a message: short, control characters escaped."""
    text = _Short().repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


_ABSENT = object()


def invalid(param: str, problem: str, value: Any = _ABSENT, *, code: str | None = None) -> ApiError:
    """A 400: `param` is at fault, `problem` says how, `value` is what came."""
    got = "" if value is _ABSENT else f", got {shown(value)}"
    return ApiError(400, f"{param}: {problem}{got}", param=param, code=code)


def unsupported(param: str, hint: str = "leave it out") -> ApiError:
    """A 400 for a real field of the API that this server does not know how to serve."""
    return ApiError(400, f"{param}: not supported by this server; {hint}", param=param, code="unsupported_parameter")


def unavailable(message: str, state: str | None = None, retry_after: int = 1) -> ApiError:
    """A 503 that says when to come back."""
    headers = {"Retry-After": str(retry_after)}
    if state is not None:
        headers["x-leftfold-state"] = state
    return ApiError(503, message, kind="service_unavailable", code="unavailable", headers=headers)


def stopping() -> ApiError:
    """A 503: the server stops, and this request has no answer yet."""
    return unavailable("the server is stopping", "draining")


def too_late() -> ApiError:
    """A 504: the request's deadline passed and it had no token yet. (With tokens it is an answer that ends early.)"""
    message = "the request's deadline passed before its first token"
    return ApiError(504, message, kind="timeout_error", code="deadline_exceeded")


def engine_error(error: Mapping[str, Any] | None) -> ApiError:
    """What an engine's {code, text} means over HTTP."""
    code, text = (error or {}).get("code"), str((error or {}).get("text", "the engine gave no reason"))
    if code == "invalid":
        return ApiError(400, text, param="prompt", code="invalid_prompt")
    if code in ("queue_full", "closing"):
        return unavailable(text)
    return ApiError(500, text, kind="server_error", code="engine_failed")
