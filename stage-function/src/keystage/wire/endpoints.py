"""Where a process listens and whose life it hangs on; used by every part that is a process.

`KEYSTAGE_HTTP` is `host:port` or `fd://N` (a listening socket that was passed in, so that no port
can be lost between choosing and binding). `KEYSTAGE_LIFELINE_FD` is the read end of a pipe whose
write end only the owner holds: end of file means the owner is gone.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import threading


class EndpointError(Exception):
    """An address that cannot be listened on; names it and the reason."""


def listen(spec: str) -> socket.socket:
    """Opens, or takes over, the listening socket that `spec` names.

    Raises:
        EndpointError: malformed, or the port is in use.
    """
    if spec.startswith("fd://"):
        try:
            return socket.socket(fileno=int(spec.removeprefix("fd://")))
        except (ValueError, OverflowError, OSError) as error:
            raise EndpointError(f"KEYSTAGE_HTTP={spec} names no open socket: {error}") from error
    host, _, port = spec.rpartition(":")
    try:
        number = int(port)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host.strip("[]") or "127.0.0.1", number), family=family, backlog=2048)
    except (ValueError, TypeError, OverflowError, OSError) as error:
        raise EndpointError(f"cannot listen on {spec!r} (expected host:port or fd://N): {error}") from error


class Lifeline:
    """Ends this process at once when the owner's end of the pipe closes, until it is released.

    Args:
        fd: read end of the pipe; None: the process hangs on nobody.
    """

    def __init__(self, fd: int | None) -> None:
        self._is_released = False
        if fd is not None:
            threading.Thread(target=self._wait, args=(fd,), name="lifeline", daemon=True).start()

    def release(self) -> None:
        """The end of this pipe means nothing any more: another owner is watched instead."""
        self._is_released = True

    def _wait(self, fd: int) -> None:
        while os.read(fd, 1):
            pass
        if not self._is_released:
            os._exit(1)


def watch_lifeline(fd: int | None) -> Lifeline:
    """Starts to watch the owner's lifeline; see `Lifeline`.

    Raises:
        EndpointError: the number is no open descriptor, or not the read end of a pipe.
    """
    check_lifeline(fd)
    return Lifeline(fd)


def check_lifeline(fd: int | None) -> None:
    """Refuses a lifeline that cannot be watched.

    Raises:
        EndpointError: the number is no open descriptor, or not the read end of a pipe.
    """
    if fd is None:
        return
    try:
        mode, flags = os.fstat(fd).st_mode, fcntl.fcntl(fd, fcntl.F_GETFL)
    except (OSError, OverflowError, ValueError) as error:
        raise EndpointError(f"KEYSTAGE_LIFELINE_FD={fd} names no open descriptor: {error}") from error
    if not stat.S_ISFIFO(mode) or flags & os.O_ACCMODE == os.O_WRONLY:
        raise EndpointError(f"KEYSTAGE_LIFELINE_FD={fd} is not the read end of a pipe")
