"""Before anything heavy: the port, the model's name in the API, and how long a stop may take."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from leftfold.engine import CLOSE_SECONDS
from leftfold.options import EngineOptions
from leftfold.server import folders, supervisor
from leftfold.server.launch import REFUSED, api_name, listen, serve
from leftfold.server.options import ServeOptions


def test_a_stop_takes_less_than_five_seconds_by_default() -> None:
    assert ServeOptions().shutdown_timeout + supervisor._CUT_SECONDS + supervisor._STOP_SECONDS < 4.5  # half to spare
    assert supervisor._STOP_SECONDS > CLOSE_SECONDS + 0.5  # the engine's own wait, and a log to close


def test_options_travel_as_data() -> None:
    options = ServeOptions(model="m", port=1, kv_tokens=64, prefix_cache=False)
    assert ServeOptions.from_dict(options.to_dict()) == options
    with pytest.raises(TypeError):
        ServeOptions.from_dict({"no_such_option": 1})


@pytest.mark.parametrize(("model", "served", "name"), [
    ("smollm2", None, "smollm2"),
    ("owner/model", None, "owner/model"),
    ("smollm2", "mine", "mine"),
])  # fmt: skip
def test_names(model: str, served: str | None, name: str) -> None:
    assert api_name(ServeOptions(model=model, served_model_name=served)) == name


def test_the_name_of_a_path_is_its_last_part(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"")
    assert api_name(ServeOptions(model=str(tmp_path / "tiny.gguf"))) == "tiny"
    assert api_name(ServeOptions(model=str(tmp_path))) == tmp_path.name


def test_a_port_in_use_is_one_line_before_anything_is_built(capsys: pytest.CaptureFixture[str]) -> None:
    (listener,) = listen("127.0.0.1", 0)
    with listener:
        port = listener.getsockname()[1]
        assert serve(ServeOptions(port=port), "no.such.module:build") == REFUSED
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"127.0.0.1:{port}" in error and "--port" in error


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])  # of nobody, by their registries
def test_an_address_that_is_not_ours_calls_for_another_host(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve(ServeOptions(host=host, port=0), "no.such.module:build") == REFUSED
    error = capsys.readouterr().err
    assert error.endswith("; choose another --host\n") and error.count("\n") == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_listeners_accept_at_once(host: str) -> None:
    try:
        listeners = listen(host, 0)
    except OSError:
        assert host == "::1"  # no IPv6 on this machine
        return
    with contextlib.ExitStack() as stack:
        for listener in listeners:
            stack.enter_context(listener)
            with socket.create_connection(listener.getsockname()[:2]):
                pass


def test_every_address_of_a_name_is_served_on_one_port(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("100::1", 0, 0, 0)),  # an address that this machine lacks
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.2", 0)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: places)
    first, second = listen("name", 0)
    with first, second:
        assert (first.getsockname()[0], second.getsockname()[0]) == ("127.0.0.1", "127.0.0.2")
        assert first.getsockname()[1] == second.getsockname()[1]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: places[:1])
    with pytest.raises(OSError, match=r"."):
        listen("name", 0)


@pytest.mark.parametrize(("depth", "is_used"), [(1, True), (120, False)])
def test_sockets_get_a_folder_with_a_short_path(depth: int, is_used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        base = Path(short, "d" * depth)
        base.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(base))
        made = folders.SocketFolder()
        folder = Path(made.path)
        try:
            assert (base in folder.parents) == is_used
            assert len(str(folder / "commands")) < 104 and folder.stat().st_mode & 0o777 == 0o700
        finally:
            made.close()
        assert list(base.iterdir()) == [] and not folder.exists()


def test_folders_of_dead_servers_are_swept_and_no_others(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    kept = [f"leftfold-{dead.pid}-held", f"leftfold-{os.getpid()}-mine", "leftfold-notes", f"other-{dead.pid}-x"]
    names = {f"leftfold-{dead.pid}-left": False, **dict.fromkeys(kept, True)}
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "commands").touch()
    held = os.open(tmp_path / f"leftfold-{dead.pid}-held", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    folders.sweep(tmp_path)
    os.close(held)
    assert {name: (tmp_path / name).exists() for name in names} == names


def test_the_servers_options_are_the_engines_and_more() -> None:
    assert EngineOptions.of(ServeOptions(kv_tokens=7, port=1)) == EngineOptions(kv_tokens=7)


@pytest.mark.parametrize("name", ["api_key", "admin_api_key"])
@pytest.mark.parametrize("empty", ["", "  "])
def test_an_empty_key_opens_nothing(name: str, empty: str) -> None:
    with pytest.raises(ValueError, match="is empty"):
        ServeOptions(**{name: empty})  # type: ignore[arg-type]
