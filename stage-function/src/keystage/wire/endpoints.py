"""Where a process listens and whose life it hangs on; used by every part that is a process.

`KEYSTAGE_HTTP` is `host:port` or `fd://N` (a listening socket that was passed in, so that no port
can be lost between choosing and binding). `KEYSTAGE_LIFELINE_FD` is the read end of a pipe whose
write end only the owner holds: end of file means the owner is gone.
"""

from __future__ import annotations

import os
import socket
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
        except (ValueError, OSError) as error:
            raise EndpointError(f"KEYSTAGE_HTTP={spec} names no open socket: {error}") from error
    host, _, port = spec.rpartition(":")
    try:
        number = int(port)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host.strip("[]") or "127.0.0.1", number), family=family, backlog=2048)
    except (ValueError, OverflowError, OSError) as error:
        raise EndpointError(f"cannot listen on {spec!r} (expected host:port or fd://N): {error}") from error


def watch_lifeline(fd: int | None) -> None:
    """Ends this process at once when the owner's end of the pipe closes; does nothing for None."""
    if fd is None:
        return

    def wait() -> None:
        while os.read(fd, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()
