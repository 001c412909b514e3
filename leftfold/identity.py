"""Which model a log belongs to: its name, and a fingerprint of its files, since names are soon the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from leftfold.errors import ConfigurationError
from leftfold.events import Event, Record, Started
from leftfold.replay.fold import check_policy

if TYPE_CHECKING:
    from leftfold.hub import ResolvedModel

_SAMPLES = 8
_SAMPLE_BYTES = 1 << 16
_MARK = "#"  # in no name of a model


def identity(model: ResolvedModel) -> str:
    """`name#fingerprint`, as a `Started` carries it. Raises OSError."""
    return f"{model.name}{_MARK}{fingerprint(model.path)}"


def fingerprint(path: Path) -> str:
    """Eight hex digits of a model's files: their names, sizes, beginnings and samples; wherever they lie."""
    digest = hashlib.sha256()
    for file in _files(path):
        size = file.stat().st_size
        if path.is_dir():
            digest.update(file.name.encode())
        digest.update(b"%d;" % size)
        with file.open("rb") as opened:
            for sample in range(_SAMPLES):
                opened.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:8]


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    else:
        yield from (file for file in sorted(path.iterdir()) if file.suffix == ".safetensors")
        yield from (file for file in [path / "config.json"] if file.is_file())


def same_model(logged: str, own: str) -> bool:
    """Whether a log of `logged` may go on with `own`; where one of them has no fingerprint, the names count."""
    if _MARK in logged and _MARK in own:
        return logged == own
    return logged.partition(_MARK)[0] == own.partition(_MARK)[0]


def check_model(event: Event, own: str) -> None:
    """Raises ConfigurationError if the event is the `Started` of another model."""
    if not isinstance(event, Started) or same_model(event.model, own):
        return
    text = f"the log holds model {event.model!r}, not {own!r}"
    if event.model.partition(_MARK)[0] == own.partition(_MARK)[0]:
        text += " (the same name, other files)"
    raise ConfigurationError(f"{text}: choose another --log-dir")


def check_beginning(records: Iterable[Record], own: str) -> None:
    """The same for the first record of a log, before the model is loaded; the rest is checked as it is folded.

    Raises UnknownPolicy, too.
    """
    for seq, event in records:
        check_model(event, own)
        if isinstance(event, Started) and event.config is not None:
            check_policy(f"the Started at seq {seq}", event.config)
        return


__all__ = ["check_beginning", "check_model", "fingerprint", "identity", "same_model"]
