"""The life of a server: HTTP answers at once, the model is fetched, the engine starts, serves, drains and stops."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import threading
import time
from asyncio.subprocess import Process
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import orjson
import uvicorn

from leftfold import hub
from leftfold.executor.memory import give_back
from leftfold.server.app import create_app
from leftfold.server.client import EngineClient
from leftfold.server.deaths import oom_kills, own_doing
from leftfold.server.folders import SocketFolder
from leftfold.server.group import EngineGone
from leftfold.server.launch import BROKEN, FAULT, REFUSED, STOPPED, api_name, start_process
from leftfold.server.metrics import Metrics
from leftfold.server.options import ServeOptions
from leftfold.server.restarts import Restarts
from leftfold.server.restoring import adopt, go_on, log_folder
from leftfold.server.state import ServerState, Service
from leftfold.server.throughput import report_throughput
from leftfold.text import TextError, Tokenizer, load_tokenizer

T = TypeVar("T")
_log = logging.getLogger("leftfold.server")
_STOP_SECONDS = 2.0
"""So long after the drain the engine is killed, if it has not ended; whatever else takes time runs beside that."""
_CUT_SECONDS = 0.3
"""How long those who are cut off wait for their ends from the engine; then they are told without it."""
_ANSWER_SECONDS = 0.5
_LAST_WORDS_SECONDS = 0.05
"""What a process that was killed has said last is read for so long."""


class _Refused(Exception):
    """The server cannot start; the message is the line that the user sees."""


class _Broken(Exception):
    """The engine's process ended by itself, once too often or for good."""


class _Died(Exception):
    """The engine's process ended by itself; the message says how."""


class _DiedForGood(_Died):
    """No other process can go on, since the reducer failed on what the log holds."""


class _Http(uvicorn.Server):
    """Uvicorn without its signal handlers; the supervisor has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Supervisor:
    """Owns the listener, the HTTP server, the engine's process and the way they end. `run` once.

    `spare`: a process of an engine that waits to be told what to do. `asked_to_stop`: set where that was asked already.
    """

    def __init__(
        self,
        options: ServeOptions,
        listeners: Sequence[socket.socket],
        builder: str,
        spare: Process,
        asked_to_stop: asyncio.Event,
    ) -> None:
        self._options = options
        self._listeners = list(listeners)
        self._builder = builder
        name = api_name(options)
        self._state = ServerState(options, name, Metrics(name))
        self._http = _Http(_http_config(self._state))
        self._folder = SocketFolder()
        self._client: EngineClient | None = None
        self._spare: Process | None = spare
        self._process: Process | None = None
        self._starts = self._oom_kills = 0
        self._log_name = ""
        self._engine_addresses: dict[str, str] = {}
        self._asked_to_stop = asked_to_stop
        self._asked_again = asyncio.Event()
        self._no_fetch = threading.Event()

    async def run(self) -> int:
        """Serves until asked to stop or broken. Returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        _set_up_logging()
        http = asyncio.create_task(self._http.serve(sockets=self._listeners))
        try:
            return await self._until_stopped()
        except _Refused as error:
            print(f"leftfold: {error}", file=sys.stderr)
            return REFUSED
        except _Broken as error:
            print(f"leftfold: {error}", file=sys.stderr)
            await asyncio.sleep(_ANSWER_SECONDS)  # those who wait get their error before the connection ends
            return BROKEN
        finally:
            await self._stop(http)

    def _on_signal(self) -> None:
        (self._asked_again if self._asked_to_stop.is_set() else self._asked_to_stop).set()

    async def _until_stopped(self) -> int:
        life = asyncio.create_task(self._live())
        asked = asyncio.create_task(self._asked_to_stop.wait())
        try:
            await _first(life, asked)
            if life.done():
                life.result()
            await self._drain()
            return STOPPED
        finally:
            for task in (life, asked):
                task.cancel()
            await asyncio.gather(life, asked, return_exceptions=True)

    async def _live(self) -> None:
        """Fetches, loads, serves; an engine that dies is started again. Ends only by an exception."""
        self._state.phase = "fetching" if not hub.is_local(self._options.model) else "loading"
        try:
            model = await _in_thread(lambda: hub.resolve(self._options.model, cancel=self._no_fetch), self._no_fetch)
            self._state.phase = "loading"
            client = self._client = EngineClient(**self._addresses())
            process = await self._start_engine()
            self._log_name = model.name
            if self._options.durability != "off":
                self._state.log_folder = Path(self._options.log_dir or Path("logs") / model.name)
            tokenizer = await _in_thread(lambda: _tokenizer(model.path))
        except (hub.HubError, TextError) as error:
            raise _Refused(str(error)) from error
        restarts = Restarts(self._options.engine_restarts)
        while True:
            try:
                await self._serve_with(client, process, tokenizer, restarts)
            except _Died as died:
                again = self._state.service is not None and not isinstance(died, _DiedForGood)
                delay = restarts.died() if again else None
                if delay is None or self._asked_to_stop.is_set():
                    raise self._broken(client, str(died)) from died
                self._lost(client, str(died), restarts, delay)
                blamed = str(died) if client.was_ready and own_doing(process.returncode, self._oom_kills) else ""
            await asyncio.sleep(delay)
            client.connect(**self._addresses())
            process = await self._start_engine(blamed)

    async def _serve_with(
        self, client: EngineClient, process: Process, tokenizer: Tokenizer, restarts: Restarts
    ) -> NoReturn:
        """One engine process, from its start to its end. Raises _Died; _Refused if it is the first and cannot start."""
        receiver = asyncio.create_task(client.run())
        ended = asyncio.create_task(process.wait())
        reporter: asyncio.Task[None] | None = None
        try:
            await _first(client.ready, ended, receiver)
            if ended.done():
                await asyncio.wait({client.ready}, timeout=_ANSWER_SECONDS)  # its last words may still be on the way
            if not client.ready.done():
                raise _Died(f"the engine process ended with code {process.returncode} before it was ready")
            await self._open(Service(client, tokenizer, client.ready.result()), ended)
            restarts.ready()
            reporter = asyncio.create_task(report_throughput(client))
            await _first(ended, receiver)
            if process.returncode in (BROKEN, FAULT):  # it has said why, and that may still be on the way
                await asyncio.wait({client.failed}, timeout=_ANSWER_SECONDS)
            elif ended.done():
                await asyncio.sleep(_LAST_WORDS_SECONDS)
            kind = _DiedForGood if process.returncode == FAULT else _Died
            if client.failed.done():
                raise kind(f"the engine stopped: {client.failed.result()}")
            raise kind(f"the engine process ended with code {process.returncode}")
        except EngineGone as error:
            if self._state.service is None:
                raise _Refused(str(error)) from error
            raise _Died(str(error)) from error
        finally:
            for task in (receiver, ended, reporter):
                if task is not None:
                    task.cancel()
            if process.returncode is None and not self._asked_to_stop.is_set():
                process.kill()

    def _lost(self, client: EngineClient, why: str, restarts: Restarts, delay: float) -> None:
        """The engine is away for a while: nobody new meanwhile, and those who are being answered wait."""
        if self._state.phase != "draining":
            self._state.phase, self._state.reason = "restarting", why
        client.lost(why)
        count = f"{restarts.in_a_row} of {self._options.engine_restarts} in a row"
        _log.error("%s; starting it again in %g s (%s)", why, delay, count)

    def _broken(self, client: EngineClient, why: str) -> _Broken:
        self._state.phase = "failed"
        client.gone(why.removeprefix("the engine stopped: "))
        return _Broken(why)

    async def _open(self, service: Service, ended: asyncio.Future[Any]) -> None:
        fault, again = service.info.get("fault"), self._state.service is not None
        if fault and again:  # clients wait for what can never go on
            raise _DiedForGood(f"the engine stopped: {fault}")
        self._state.service = service
        if fault:
            self._state.phase, self._state.reason = "refusing", str(fault)
            print(f"leftfold: refusing all work: {fault}", file=sys.stderr)
            return
        live = [] if again or self._log_folder is None else adopt(self._state, service.engine, self._log_folder)
        caught_up = asyncio.create_task(service.engine.catch_up())
        await _first(caught_up, ended)
        if not caught_up.done():
            caught_up.cancel()
            return
        caught_up.result()
        go_on(self._state, live)
        if not self._asked_to_stop.is_set():
            self._state.phase, self._state.reason = "ready", ""
        if again:
            _log.warning("the engine is there again")
            return
        host, port = self._listeners[0].getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        print(f"leftfold: serving {self._state.model_name} on http://{shown}:{port}", file=sys.stderr, flush=True)

    @property
    def _log_folder(self) -> Path | None:
        return log_folder(self._options.log_dir, self._options.durability, self._log_name)

    def _addresses(self) -> dict[str, str]:
        """Of new sockets, so that nothing of one engine process can reach the next."""
        self._starts += 1
        names = {"commands": f"in{self._starts}", "outputs": f"out{self._starts}"}
        self._engine_addresses = {role: f"ipc://{self._folder.path}/{name}" for role, name in names.items()}
        return self._engine_addresses

    async def _start_engine(self, died: str = "") -> Process:
        """`died`: how the one before did, if that was its own doing."""
        options = self._options.without_keys()
        setup = {**self._engine_addresses, "builder": self._builder, "options": options, "died": died}
        self._oom_kills = oom_kills()
        self._process, self._spare = self._spare or await start_process(self._builder), None
        assert self._process.stdin is not None
        self._process.stdin.write(orjson.dumps(setup) + b"\n")
        return self._process

    async def _drain(self) -> None:
        """Nobody new, and a while for those who are being answered; a second signal cuts it short.

        What is left then is aborted, and the log says so, so that no later start goes on with it.
        """
        self._state.phase = "draining"
        enough = [asyncio.create_task(event.wait()) for event in (self._state.idle, self._asked_again)]
        await _first(*enough, patience=self._options.shutdown_timeout)
        for task in enough:
            task.cancel()
        for group in self._state.cut_off():
            group.abort("stopping")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._state.idle.wait(), _CUT_SECONDS)

    async def _stop(self, http: asyncio.Task[None]) -> None:
        until = time.monotonic() + _STOP_SECONDS
        if self._client is not None:
            self._client.stop()
        self._http.should_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await http
        if self._spare is not None:
            self._spare.kill()
            await self._spare.wait()
        if self._process is not None:
            await self._end_engine(self._process, until - time.monotonic())
        if self._state.shelf.file is not None:
            await self._state.shelf.file.close()
        if self._client is not None:
            self._client.close()
        self._folder.close()

    async def _end_engine(self, process: Process, patience: float) -> None:
        """Wait for the engine, which was told to stop, and kill it when it takes too long."""
        try:
            await asyncio.wait_for(process.wait(), max(0.0, patience))
        except TimeoutError:
            process.kill()
            await process.wait()


def _tokenizer(path: Path) -> Tokenizer:
    try:
        return load_tokenizer(path)
    finally:
        give_back()  # reading a vocabulary takes several times what is kept of it


def _http_config(state: ServerState) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(state),
        log_config=None,
        http="h11",  # whatever else is installed
        access_log=not state.options.disable_access_log,
        lifespan="off",
        server_header=False,
        timeout_keep_alive=75,  # longer than clients keep idle connections, so that none is closed under a request
        timeout_graceful_shutdown=_ANSWER_SECONDS,  # type: ignore[arg-type]  # a fraction works as well
    )


def _set_up_logging() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)


async def _first(*futures: asyncio.Future[Any], patience: float | None = None) -> None:
    """Waits until one of `futures` is done, for `patience` seconds at most."""
    await asyncio.wait(futures, timeout=patience, return_when=asyncio.FIRST_COMPLETED)


async def _in_thread(work: Callable[[], T], cancel: threading.Event | None = None) -> T:
    """`work` in a thread that does not keep the process from ending; it is told to by `cancel`, if it can be."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(set_it: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            set_it(value)

    def run() -> None:
        try:
            outcome: tuple[Callable[[Any], None], Any] = (future.set_result, work())
        except Exception as error:  # carried over to the waiting task
            outcome = (future.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, *outcome)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        return await future
    except asyncio.CancelledError:
        if cancel is not None:
            cancel.set()
            thread.join(_ANSWER_SECONDS)  # it removes what it has written so far
        raise
