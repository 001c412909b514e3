"""Starts and stops a server: this process answers HTTP, a child process is the engine."""

from __future__ import annotations

import contextlib
import errno
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncio.subprocess import Process

    from leftfold.server.options import ServeOptions

BUILDER = "leftfold.builder:build_engine"
STOPPED, BROKEN, REFUSED = 0, 1, 2
FAULT = 70  # EX_SOFTWARE: nothing else ends with it by chance
"""The engine's process ended since the reducer failed: no other one would get past that, and none is started."""
_BACKLOG = 2048


def serve(options: ServeOptions, builder: str = BUILDER) -> int:
    """Serves until SIGINT or SIGTERM. Returns the exit code: 0 stopped, 1 the engine died, 2 it could not start.

    The port is taken before anything heavy is imported or loaded. `builder`: `module:function` that the engine
    process calls with the options and a callback for effects, to get the engine.
    """
    try:
        listeners = listen(options.host, options.port)
    except OSError as error:
        where = f"{options.host}:{options.port}"
        other = "--port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
        print(f"leftfold: cannot listen on {where}: {error.strerror or error}; choose another {other}", file=sys.stderr)
        return REFUSED
    import asyncio

    with contextlib.ExitStack() as stack:
        for listener in listeners:
            stack.enter_context(listener)
        return asyncio.run(_supervise(options, listeners, builder))


async def _supervise(options: ServeOptions, listeners: list[socket.socket], builder: str) -> int:
    """The engine's process imports what it needs while this one does."""
    import asyncio

    asked_to_stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, asked_to_stop.set)
    process = await start_process(builder)
    try:
        from leftfold.server.supervisor import Supervisor
    except BaseException:
        process.kill()
        await process.wait()
        raise
    return await Supervisor(options, listeners, builder, process, asked_to_stop).run()


async def start_process(builder: str) -> Process:
    """An engine's process, which waits for the line that says what to do."""
    import asyncio.subprocess

    command = (sys.executable, "-m", "leftfold.server.engine_process", builder)
    return await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE, start_new_session=True)


def listen(host: str, port: int) -> list[socket.socket]:
    """Listening TCP sockets, on one port, for every address of `host` (`localhost` may have two).

    Raises OSError if an address is taken, or if this machine has none of them.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    places = {(family, address[0]): address for family, _, _, _, address in found}
    listeners: list[socket.socket] = []
    missing: OSError | None = None
    try:
        for (family, _), address in places.items():
            chosen = listeners[0].getsockname()[1] if listeners else port
            try:
                listeners.append(_listener(family, (address[0], chosen, *address[2:]), len(places) > 1))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                missing = error
        if missing is not None and not listeners:
            raise missing
    except OSError:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def _listener(family: int, address: tuple[Any, ...], one_family: bool) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and one_family:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # the other family has its own socket
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
