"""Folders of models, and folders that get their name when all that belongs in them is on the drive."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from . import _native


@contextlib.contextmanager
def written_to(folder: str | os.PathLike) -> Iterator[None]:
    """Around what writes there: an error of the system or of safetensors becomes StorageError if the drive failed, and EnvironmentError if not; it names the folder."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        kind = _native.StorageError if getattr(error, "errno", None) == errno.EIO else _native.EnvironmentError
        raise kind(f"{os.fspath(folder)}: cannot be written: {error}") from error


def expect_empty(folder: Path) -> None:
    """Raises UsageError where something lies there; it need not be there yet."""
    if os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise _native.UsageError(f"{folder}: --out exists and is not an empty folder")


def save_whole(folder: str, write: Callable[[str], Any]) -> None:
    """A folder that gets its name when what `write` puts there is durable. It is not there yet, or empty."""
    target, partial = Path(folder), Path(f"{folder}.partial")
    expect_empty(target)
    try:
        _fill(partial, lambda: write(str(partial)))
        partial.rename(target)
        _flush(target.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def save_over(folder: str | os.PathLike, names: tuple[str, ...], write: Callable[[Path], Any]) -> None:
    """Writes the files `names`, which write(other folder) makes, in the place of those in a folder, all at once: what was there can be loaded until the new ones are
    durable. Other files in the folder stay. It need not be there yet. standing() finds it where the machine stopped on the way. Raises UsageError if it is a file, or the
    working folder or one above it, which would be another one then, or if something else has the name that the old ones get on the way."""
    target = Path(folder).resolve()
    if target.exists() and not target.is_dir():
        raise _native.UsageError(f"{target} is a file: name a folder")
    if Path.cwd().is_relative_to(target):
        raise _native.UsageError(f"{target} is the working folder, or above it: name a folder of its own")
    partial, old = _beside(target, ".partial"), _beside(target, ".old")
    if old.exists() and not (old.is_dir() and (not any(old.iterdir()) or any((old / name).exists() for name in names))):
        raise _native.UsageError(f"{old} is in the way: rename it")
    try:
        _fill(partial, lambda: write(partial))
        if target.exists():
            _give_up(old, target, names)
            target.rename(old)
        partial.rename(target)
        _flush(target.parent)
        _give_up(old, target, names)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def standing(folder: str | os.PathLike) -> Path:
    """The folder in which what save_over() wrote last, and whole, lies."""
    target = Path(folder).resolve()
    old = _beside(target, ".old")
    return old if not target.exists() and old.exists() else target


def _beside(target: Path, ending: str) -> Path:
    return target.with_name(target.name + ending)


def _fill(partial: Path, write: Callable[[], Any]) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write()
    for path in [*partial.iterdir(), partial]:
        _flush(path)


def _give_up(old: Path, target: Path, names: tuple[str, ...]) -> None:
    """Removes what save_over() wrote before `target`. What else lies there moves to `target`, unless something has its name there since."""
    if not old.is_dir():
        return
    for path in sorted(old.iterdir()):
        if path.name not in names and not os.path.lexists(target / path.name):
            path.rename(target / path.name)
    shutil.rmtree(old)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def expect_model_folder(path: Path) -> None:
    """Raises InputError unless it is one."""
    _native.expect_model_folder(str(path))
