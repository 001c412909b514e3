"""Starts and stops a server: this process answers HTTP, a child process is the engine."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from leftfold.server.options import ServeOptions

BUILDER = "leftfold.builder:build_engine"
STOPPED, BROKEN, REFUSED = 0, 1, 2
_BACKLOG = 2048


def serve(options: ServeOptions, builder: str = BUILDER) -> int:
    """Serves until SIGINT or SIGTERM. Returns the exit code: 0 stopped, 1 the engine died, 2 it could not start.

    The port is taken before anything heavy is imported or loaded. `builder`: `module:function` that the engine
    process calls with the options and a callback for effects, to get the engine.
    """
    try:
        listener = listen(options.host, options.port)
    except OSError as error:
        where = f"{options.host}:{options.port}"
        print(f"leftfold: cannot listen on {where}: {error.strerror or error}; choose another --port", file=sys.stderr)
        return REFUSED
    import asyncio

    from leftfold.server.supervisor import Supervisor

    with listener:
        return asyncio.run(Supervisor(options, listener, builder).run())


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises OSError if the address cannot be taken."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def api_name(options: ServeOptions) -> str:
    """The model's name in the API: as told, or the last part of a path, or the model as it was asked for."""
    if options.served_model_name:
        return options.served_model_name
    path = Path(options.model).expanduser()
    if not path.exists():
        return options.model
    return path.resolve().name if path.is_dir() else path.stem
