"""The engine's process: builds the engine, feeds its inbox from a socket, sends what it makes visible.

Started as `python -m leftfold.server.engine_process BUILDER`; the first line of standard input is a JSON object
(options, socket addresses, the engine's builder, how the process before died), and the end of standard input means
that the parent is gone.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from typing import Any

import orjson
import zmq

from leftfold.errors import EngineFault
from leftfold.recall import Memory, Recall
from leftfold.server.launch import BROKEN, FAULT, REFUSED
from leftfold.server.options import ServeOptions
from leftfold.server.publishing import Publisher
from leftfold.server.wire import (
    Ask,
    Failed,
    Ready,
    Stats,
    StatsRequest,
    Stop,
    Submit,
    WireError,
    from_frames,
    to_frames,
)

LINGER_SECONDS = 0.5  # a server that reads takes a few; one that does not must not keep a stop waiting


class _Sender:
    """The engine thread's socket to the server; ZMQ sockets belong to one thread, so each thread has its own."""

    def __init__(self, context: zmq.Context[Any], address: str) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, int(1000 * LINGER_SECONDS))
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.connect(address)

    def __call__(self, message: Any) -> None:
        self._socket.send_multipart(to_frames(message))

    def close(self) -> None:
        self._socket.close()


def main() -> int:
    """Runs the engine until told to stop. Returns the process's exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides what it means
    logging.basicConfig(level=logging.WARNING, format="leftfold: %(levelname)s: %(message)s", stream=sys.stderr)
    for builder in sys.argv[1:]:  # imports what the builder needs before it is known what to build
        with suppress(Exception):  # whatever is wrong with it is told when it is used
            importlib.import_module(builder.partition(":")[0])
    line = sys.stdin.buffer.readline()
    if not line:  # the server has changed its mind
        return 0
    setup: Mapping[str, Any] = orjson.loads(line)
    threading.Thread(target=_die_with_parent, name="parent-watch", daemon=True).start()
    context: zmq.Context[Any] = zmq.Context()
    send = _Sender(context, setup["outputs"])
    try:
        publisher = Publisher(send)
        engine = _build(setup["builder"], ServeOptions.from_dict(setup["options"]), publisher)
        engine.memory, engine.died = Memory(), setup.get("died", "")
        engine.start()
    except Exception as error:  # the one boundary: whatever a model, a disk or a setting does wrong at the start
        if os.environ.get("LEFTFOLD_DEBUG"):
            traceback.print_exc()
        send(Failed(_one_line(error)))
        send.close()
        context.term()
        return REFUSED
    publisher.watch(engine)
    send(Ready(_info(engine)))
    commands = threading.Thread(target=_obey, args=(engine, context, setup), name="commands", daemon=True)
    commands.start()
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=engine.stop).start())  # may not take locks here
    try:
        engine.run()
        code = 0
    except Exception as error:  # the same boundary, for what an executor, a disk or the reducer does wrong later
        if os.environ.get("LEFTFOLD_DEBUG"):
            traceback.print_exc()
        send(Failed(_one_line(error)))
        code = FAULT if isinstance(error, EngineFault) else BROKEN
    send.close()
    context.term()  # what was said last is on its way when this returns
    return code


def _build(builder: str, options: ServeOptions, on_effects: Callable[[Any], None]) -> Any:
    module, _, name = builder.partition(":")
    return getattr(importlib.import_module(module), name)(options, on_effects)


def _info(engine: Any) -> dict[str, Any]:
    """What the server must know: the limits, and why the engine refuses all work, if it does."""
    return {**engine.config.as_dict(), "fault": engine.stats().get("fault", "")}


def _obey(engine: Any, context: zmq.Context[Any], setup: Mapping[str, Any]) -> None:
    """The receiving thread: events into the inbox, gauges out, stop; until the engine has ended."""
    with (
        suppress(zmq.ContextTerminated),
        context.socket(zmq.PULL) as commands,
        closing(_Sender(context, setup["outputs"])) as send,
    ):
        commands.setsockopt(zmq.RCVHWM, 0)
        commands.setsockopt(zmq.LINGER, 0)
        commands.connect(setup["commands"])
        while True:
            try:
                _take(engine, from_frames(commands.recv_multipart()), send)
            except WireError as error:
                print(f"leftfold: ignored a message to the engine: {error}", file=sys.stderr)


def _take(engine: Any, message: Any, send: Callable[[Any], None]) -> None:
    match message:
        case Submit(event):
            fields = {f.name: getattr(event, f.name) for f in dataclasses.fields(event) if f.name != "t"}
            engine.submit(type(event), **fields)
        case StatsRequest(call):
            send(Stats(call, engine.stats()))
        case Ask(call, wanted, calls):
            engine.recall(Recall(call, [_wanted(row) for row in wanted], calls))
        case Stop():
            engine.stop()


def _wanted(row: Any) -> tuple[tuple[str, int, int], int]:
    match row:
        case [str(rid), int(epoch), int(choice), int(position)]:
            return (rid, epoch, choice), position
    raise WireError(f"an Ask for {row!r}"[:200])


def _die_with_parent() -> None:
    """Standard input ends when the parent is gone, however it went; an engine nobody hears must not live on."""
    while os.read(0, 4096):
        pass
    os._exit(1)


def _one_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
