"""Before anything heavy: the port, the model's name in the API, and how long a stop may take."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from leftfold.server import supervisor
from leftfold.server.launch import REFUSED, api_name, listen, serve
from leftfold.server.options import ServeOptions


def test_a_stop_takes_less_than_five_seconds_by_default() -> None:
    answers, engine = supervisor._ANSWER_SECONDS, supervisor._ENGINE_STOP_SECONDS
    assert ServeOptions().shutdown_timeout + answers + supervisor._CLOSE_SECONDS + engine < 5


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
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert serve(ServeOptions(port=port), "no.such.module:build") == REFUSED
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"127.0.0.1:{port}" in error and "--port" in error


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_listeners_accept_at_once(host: str) -> None:
    try:
        listener = listen(host, 0)
    except OSError:
        assert host == "::1"  # no IPv6 on this machine
        return
    with listener, socket.create_connection(listener.getsockname()[:2]):
        pass
