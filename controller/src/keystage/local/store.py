"""`functions.json`: what is deployed, kept across restarts.

Read once when the supervisor starts, written whole and atomically after every change. One
function per line, so that an error can name the line. It must not interpret deployments.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from keystage.local.api import FunctionRecord
from keystage.local.errors import CorruptState, NotKept
from keystage.wire.unreadable import UNREADABLE

log = logging.getLogger(__name__)

_BYTE = re.compile(r"\(byte (\d+)\)")


def save(file: Path, functions: Iterable[FunctionRecord], *, durable: bool) -> None:
    """Writes all records by way of a temporary file and a rename.

    Args:
        file: target.
        functions: records to keep.
        durable: wait until the bytes are on the disk (deploy, delete); replica numbers change
            several times a second and are not worth that.
    """
    lines = b",\n".join(msgspec.json.encode(record) for record in functions)
    temporary = file.with_suffix(".tmp")
    fd = os.open(
        temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600
    )  # environments are in it
    with os.fdopen(fd, "wb") as out:
        os.fchmod(fd, 0o600)
        out.write(b"[\n" + lines + b"\n]\n")
        if durable:
            out.flush()
            os.fsync(out.fileno())
    temporary.replace(file)


def keep(file: Path, functions: Iterable[FunctionRecord], *, durable: bool) -> None:
    """As `save`, but a disk that takes nothing (full, read-only) stops nobody.

    Raises:
        NotKept: the same where it matters (`durable`): names the folder and what the system says.
    """
    try:
        save(file, functions, durable=durable)
    except OSError as error:
        told = f"the state folder {file.parent} takes nothing: {error.strerror or error}"
        if durable:
            done = "it was done, but a restart of `keystage up` will not know of it"
            raise NotKept(f"{done}: {told}; make room, and do it again") from error
        log.warning("replica numbers are not kept: %s", told)


def load(file: Path) -> list[FunctionRecord]:
    """Reads all records; a missing file is an empty list.

    Raises:
        CorruptState: names file, line and what is wrong.
    """
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return []
    try:
        raws = msgspec.json.decode(data, type=list[msgspec.Raw])
    except msgspec.ValidationError as error:
        raise CorruptState(f"{file}, line 1: {error}") from error
    except UNREADABLE as error:
        found = _BYTE.search(str(error))
        offset = int(found.group(1)) if found else len(data)
        raise CorruptState(f"{file}, line {_line(data, offset)}: {error}") from error
    records = []
    position = 0
    for raw in raws:
        body = bytes(raw)
        position = data.index(body, position)
        try:
            records.append(msgspec.json.decode(body, type=FunctionRecord))
        except UNREADABLE as error:
            raise CorruptState(f"{file}, line {_line(data, position)}: {error}") from error
        position += len(body)
    return records


def _line(data: bytes, offset: int) -> int:
    return data.count(b"\n", 0, offset) + 1
