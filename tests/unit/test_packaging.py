"""Distributions hold the rooms as ordinary packages `leftfold.<room>`, and nothing at top level but `leftfold`."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("events", "fsm", "kernels", "executor", "replay", "server")
SOURCES = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "constraints.txt", "Makefile", "leftfold", *ROOMS)


def build(hook: str, source: Path, out: Path) -> Path:
    """Call one hook of the build backend in `source`; no network, nothing written but under `source` and `out`."""
    out.mkdir(parents=True, exist_ok=True)
    script = f"from setuptools import build_meta; build_meta.{hook}({str(out)!r})"
    done = subprocess.run([sys.executable, "-c", script], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.iterdir()
    return built


def files_in(tree: Path) -> set[str]:
    """Every file of the packages in the tree, as its path in a distribution."""
    folders = {"leftfold": tree / "leftfold"} | {f"leftfold/{room}": tree / room for room in ROOMS}
    return {
        f"{name}/{path.relative_to(folder).as_posix()}"
        for name, folder in folders.items()
        for path in folder.rglob("*")
        if path.is_file() and (name != "leftfold" or path.relative_to(folder).parts[0] not in ROOMS)
    }


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree, links kept, so that building leaves nothing behind in the checkout."""
    copy = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(ROOT / name, copy / name)
    assert (copy / "leftfold" / "fsm").is_symlink()
    return copy


@pytest.fixture(scope="module")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("build_sdist", source, tmp_path_factory.mktemp("sdist"))


def contents(wheel: Path) -> dict[str, int]:
    with zipfile.ZipFile(wheel) as archive:
        return {info.filename: info.external_attr >> 16 for info in archive.infolist()}


def check_wheel(files: dict[str, int], source: Path) -> None:
    links = [name for name, mode in files.items() if mode & 0o170000 == 0o120000]
    assert not links, f"links do not survive in a wheel: {links}"
    assert {name.split("/")[0] for name in files} == {"leftfold", "leftfold-0.1.0.dist-info"}
    assert {name for name in files if name.startswith("leftfold/")} == files_in(source)
    assert {"leftfold/py.typed", "leftfold/fsm/__init__.py"} <= set(files)


def test_rooms_are_relative_links_beside_the_front_door() -> None:
    for room in ROOMS:
        link = ROOT / "leftfold" / room
        assert link.is_symlink() and link.readlink() == Path("..") / room
        assert (link / "__init__.py").is_file()


@pytest.mark.slow
def test_wheel_holds_every_room_and_no_other_top_level_module(source: Path, tmp_path: Path) -> None:
    check_wheel(contents(build("build_wheel", source, tmp_path / "wheel")), source)


@pytest.mark.slow
def test_sdist_holds_files_where_the_tree_has_links(source: Path, sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert not [member.name for member in members if member.issym() or member.islnk()]
    names = {member.name.partition("/")[2] for member in members}
    assert files_in(source) <= names
    assert not names & {f"{room}/__init__.py" for room in ROOMS}, "each module once"
    assert {"LICENSE", "README.md", "constraints.txt", "Makefile"} <= names


@pytest.mark.slow
def test_wheel_built_from_the_sdist_is_the_same_and_imports(source: Path, sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        since_3_11_4 = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(tmp_path, **since_3_11_4)
    wheel = build("build_wheel", tmp_path / "leftfold-0.1.0", tmp_path / "wheel")
    check_wheel(contents(wheel), source)
    unpacked = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
        entry_points = archive.read("leftfold-0.1.0.dist-info/entry_points.txt").decode()
    assert "leftfold = leftfold.cli:main" in entry_points
    script = (
        f"import sys; sys.path.insert(0, {str(unpacked)!r}); import leftfold.events, leftfold.fsm, leftfold.replay;"
        "print(leftfold.events.__file__); leftfold.events.Tick(t=0)"
    )
    done = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(unpacked)
