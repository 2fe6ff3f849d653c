"""A folder that appears complete or not at all.

`bundle.split` and `bundle.export` fill a folder beside the wanted one and rename it when all is
written; an interrupted run leaves nothing under the wanted name, and the next run sweeps its rest.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil

from keystage.bundle.errors import SplitError

_OURS = ("pipeline.json", "config.json")


def check_place(folder: Path) -> None:
    """Refuses to replace what is neither a bundle nor an empty folder, or may be served right now.

    Raises:
        SplitError: something else is there, or a process serves from the state folder it lies in.
    """
    if not folder.exists():
        return
    server = _served_by(folder)
    if server:
        raise SplitError(
            f"{folder}: process {server} serves from this state folder, and replicas of another cut would "
            "not fit its routers: end it first, or give the bundle another --name or folder"
        )
    if not folder.is_dir():
        raise SplitError(f"{folder}: is a file, a folder is expected")
    if any(folder.iterdir()) and not any((folder / name).is_file() for name in _OURS):
        raise SplitError(f"{folder}: holds something that is no bundle; choose another folder")


def _served_by(folder: Path) -> str:
    """The process that has locked the state folder `.../bundles/NAME` lies in, empty: none has."""
    lock = folder.parent.parent / "lock"
    if folder.parent.name != "bundles" or not (folder / "pipeline.json").exists():
        return ""
    try:
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # released with the descriptor
    except BlockingIOError:
        return lock.read_text(errors="replace").strip() or "unknown"
    except OSError:  # no lock: nobody has served from there
        return ""
    return ""


def check_room(folder: Path, nbytes: int) -> None:
    """Refuses to begin what the disk cannot hold: a large model fills it only after minutes.

    Args:
        folder: where it will be written; exists.
        nbytes: how much.

    Raises:
        SplitError: there is less room; names both sizes.
    """
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise SplitError(
            f"{folder.parent}: the bundle takes {nbytes / 1e9:.1f} GB, the disk has {free / 1e9:.1f} GB "
            f"free; choose another folder, or a narrower type (bf16)"
        )


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Gives a folder to fill; on success it takes the place of `folder`, else it is removed.

    Raises:
        SplitError: the file system refuses.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        partial = folder.parent / f".{folder.name}.partial-{os.getpid()}"
        partial.mkdir()
        try:
            yield partial
            _swap(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise SplitError(f"{error.filename or folder}: {error.strerror or error}") from error


def _swap(partial: Path, folder: Path) -> None:
    old = folder.parent / f".{folder.name}.old-{os.getpid()}"
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Removes what runs that were killed have left."""
    for word in ("partial", "old"):
        for rest in folder.parent.glob(f".{folder.name}.{word}-*"):
            owner = rest.name.rpartition("-")[2]
            if owner.isdigit() and (int(owner) == os.getpid() or not psutil.pid_exists(int(owner))):
                shutil.rmtree(rest, ignore_errors=True)
