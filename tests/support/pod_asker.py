"""A process in a pod that asks the KeysManager: what it was answered, and what it can do with what it got.

    python -m support.pod_asker SOCKET BUNDLE STAGE [WHAT]

Prints one line of JSON. WHAT: `get` (default) tries to write what it was given in every way there is;
`others` sends every request that is not for pods; `hold` keeps its segment until its standard input ends;
`many` opens connections until one is refused; `silent` waits on a connection that it says nothing on.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import mmap
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from keystage.keysmanager.api import (
    Evict,
    Fork,
    Get,
    Invalidate,
    KeyStages,
    Progress,
    Refused,
    StageName,
    Standbys,
    StatusAsked,
)
from keystage.keysmanager.channel import Channel, PeerGone
from keystage.keysmanager.client import Got, KeysManagerRefused, get_segment

_libc = ctypes.CDLL(None, use_errno=True)


def opened(path: str) -> Channel:
    """A connection to the socket."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(path)
    return Channel(sock)


def tried(work: Callable[[], Any]) -> str:
    """Empty: it could be done; else why not."""
    try:
        work()
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def writes(got: Got) -> dict[str, str]:
    """Every way to change a segment, and what came of it."""
    fd, nbytes = got.fd, got.segment.parameters.nbytes

    def through(other: int, work: Callable[[int], Any]) -> None:
        try:
            work(other)
        finally:
            os.close(other)

    def mapped(number: int) -> None:
        with mmap.mmap(number, mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE) as pages:
            pages[0] = 1

    def made_writable() -> None:
        pages = mmap.mmap(fd, mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ)
        address = ctypes.c_void_p.from_buffer_copy(bytes(8))
        _libc.mmap.restype = ctypes.c_void_p
        address = _libc.mmap(None, mmap.PAGESIZE, mmap.PROT_READ, mmap.MAP_SHARED, fd, ctypes.c_long(0))
        done = _libc.mprotect(ctypes.c_void_p(address), mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE)
        pages.close()
        if done:
            raise OSError(ctypes.get_errno(), "mprotect")

    def reopened() -> int:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDWR)

    return {
        "mmap": tried(lambda: mapped(fd)),
        "mprotect": tried(made_writable),
        "pwrite": tried(lambda: os.pwrite(fd, b"x", 0)),
        "shrink": tried(lambda: os.ftruncate(fd, 1)),
        "grow": tried(lambda: os.ftruncate(fd, 2 * nbytes)),
        "seals": tried(lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)),
        "reopened pwrite": tried(lambda: through(reopened(), lambda n: os.pwrite(n, b"x", 0))),
        "reopened mmap": tried(lambda: through(reopened(), mapped)),
        "reopened shrink": tried(lambda: through(reopened(), lambda n: os.ftruncate(n, 1))),
        "reopened seals": tried(
            lambda: through(reopened(), lambda n: fcntl.fcntl(n, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK))
        ),
        "reopened punch": tried(lambda: through(reopened(), _punched)),
    }


def _punched(fd: int) -> None:
    if _libc.fallocate(fd, 3, ctypes.c_long(0), ctypes.c_long(mmap.PAGESIZE)):
        raise OSError(ctypes.get_errno(), "fallocate")


def others(path: str, name: StageName) -> list[list[Any]]:
    """What every request is answered that is not for pods, on one connection each."""
    found: list[list[Any]] = []
    env = {"KEYSTAGE_BUNDLE": name.bundle, "KEYSTAGE_STAGES": str(name.stage)}
    for message in (
        Fork(replica="r", module="keystage.worker.app", env=env, wanted_at_s=0.0),
        KeyStages((name,)),
        Invalidate("ab" * 32),
        Evict("ab" * 32),
        Standbys(name=name, env=env, count=1),
        StatusAsked(),
        Progress(phase="ready", at_s=0.0),
        Refused("no request at all"),
    ):
        channel = opened(path)
        channel.send(message)
        if isinstance(message, Progress):
            channel.send(Get(name=StageName(name.bundle, name.stage + 1)))
        received = channel.receive()
        answer = received[0] if received is not None else None
        found.append([type(message).__name__, type(answer).__name__, getattr(answer, "status", 0)])
        channel.close()
    return found


def main(path: str, bundle: str, stage: str, what: str = "get") -> dict[str, Any]:
    """Does what is asked and says what came of it."""
    name = StageName(bundle, int(stage))
    if what == "others":
        return {"answers": others(path, name)}
    if what == "many":
        channels = []
        for _ in range(64):
            channel = opened(path)
            channels.append(channel)
            with contextlib.suppress(PeerGone):  # it may have been refused and closed already
                channel.send(Get(name=name))
            received = channel.receive()
            if received is not None and isinstance(received[0], Refused):
                return {"open": len(channels) - 1, "status": received[0].status, "reason": received[0].reason}
        return {"open": len(channels), "status": 0, "reason": ""}
    if what == "silent":
        begun_s = time.monotonic()
        received = opened(path).receive()
        return {"received": repr(received), "after_s": time.monotonic() - begun_s}
    begun_s = time.monotonic()
    try:
        got = get_segment(path, name, 20.0)
    except KeysManagerRefused as error:
        return {"status": error.status, "reason": error.reason, "after_s": time.monotonic() - begun_s}
    told: dict[str, Any] = {"status": 200, "identity": got.segment.parameters.identity}
    if what == "hold":
        print(json.dumps(told), flush=True)
        sys.stdin.read()
        return told
    told["writes"] = writes(got)
    told["first"] = os.pread(got.fd, 16, 0).hex()
    with contextlib.suppress(OSError):
        os.close(got.fd)
    return told


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
