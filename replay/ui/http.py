"""The debugger's server: the standard library's, on this machine alone unless told otherwise, behind a random token.

The token is the first part of every path. A request whose Host is a name that nobody gave is refused, so that a page
from elsewhere cannot get here under a name of its own.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from leftfold.replay.ui.api import Api
from leftfold.replay.ui.page import HEADERS, MOST_BODY, Answer


class Server(ThreadingHTTPServer):
    """Answers once `serve_forever` runs; `url` leads to the page. Raises `OSError` where it cannot listen."""

    daemon_threads = True

    def __init__(self, api: Api, host: str = "127.0.0.1", port: int = 0) -> None:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self.address_family = family
        self.api = api
        self.token = secrets.token_urlsafe(24)
        self.names = {host.lower(), "localhost"}
        super().__init__((str(address[0]), port), Handler)

    @property
    def url(self) -> str:
        """Where the page is."""
        host, port = str(self.server_address[0]), self.server_address[1]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/{self.token}/"

    def knows(self, host: str) -> bool:
        """Whether a request may be for `host` (with its port): an address, or a name that this server was given."""
        name = urlsplit(f"//{host}").hostname or ""
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self.names
        return True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away is no error."""


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    server: Server
    timeout = 60

    def do_GET(self) -> None:
        self._reply(self._answer("GET", b""))

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > MOST_BODY:
            self.close_connection = True
            self._reply(_refused(413, f"the body has a length of at most {MOST_BODY} bytes"))
            return
        body = self.rfile.read(int(length))
        if self.headers.get("Content-Type", "").partition(";")[0].strip() != "application/json":
            self._reply(_refused(415, "the body is application/json"))
            return
        self._reply(self._answer("POST", body))

    def _answer(self, method: str, body: bytes) -> Answer:
        try:
            if not self.server.knows(self.headers.get("Host", "")):
                return _refused(421, "this server does not go by that name")
            parts = urlsplit(self.path)
        except ValueError:
            return _refused(400, "that is no address")
        token, slash, path = parts.path.lstrip("/").partition("/")
        if not slash or not hmac.compare_digest(token.encode(), self.server.token.encode()):
            return _refused(403, "the address lacks its token: take the one that leftfold replay ui has printed")
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        return self.server.api.answer(method, unquote(path), query, body)

    def _reply(self, answer: Answer) -> None:
        self.send_response(answer.status)
        for name, value in {**HEADERS, "Content-Type": answer.type, "Content-Length": str(len(answer.body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer.body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed for each request: its path has the token."""


def _refused(status: int, text: str) -> Answer:
    from leftfold.replay.ui.views import dumps

    return Answer(status, "application/json", dumps({"error": text}))


__all__ = ["HEADERS", "Server"]
