"""One running process: start with the right descriptors, follow its output, end it.

Made by `local.supervisor` from a `Program`, or by `local.node` around a process that a KeysManager
forked for us. Sockets and pipes are passed, never inherited by accident. Exits are seen through a
pidfd; before a dead process is reaped its whole group is killed, while its process id cannot yet name
anything else. This module must not decide anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

from keystage.local import private_mount
from keystage.local.adopted import reap
from keystage.local.handover import KeptProcess
from keystage.local.lifeline import LIFELINE
from keystage.local.logs import ReplicaLog
from keystage.local.program import Program, with_port

BACKLOG = 2048
OUTPUT_WAIT_S = 0.5
"""For the last lines of a dead process to come through its pipe."""


def listening_socket(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """Binds a TCP socket and listens; port 0 picks a free one.

    Raises:
        OSError: the port is in use.
    """
    server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((host, port))
        server.listen(BACKLOG)
    except OSError:
        server.close()
        raise
    return server


class _Output(asyncio.Protocol):
    def __init__(self, log: ReplicaLog, now: Callable[[], float]) -> None:
        self._log = log
        self._now = now
        self.closed = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self._log.feed(data, self._now())

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


class Process:
    """A started process, leader of its own process group.

    Args:
        pid: process id.
        address: `host:port` it serves on, empty if it serves nothing.
        log: takes its output.
        pipe: read end of its output.
        reap: waits for the dead process and returns its exit code, minus the signal that ended it, or None
            where nobody can tell.
        lifeline: write end of a lifeline of its own, closed when it is gone; None: it watches ours.

    Attributes:
        pid: process id.
        address: see above.
    """

    def __init__(
        self,
        pid: int,
        address: str,
        log: ReplicaLog,
        pipe: int,
        reap: Callable[[], int | None],
        lifeline: int | None = None,
    ) -> None:
        self.pid = pid
        self.address = address
        self._log = log
        self._pipe = pipe
        self._reap_it = reap
        self._lifeline = lifeline
        self._code: int | None = None
        self._ended = False

    @property
    def kept(self) -> KeptProcess:
        """What a successor needs to go on with it."""
        return KeptProcess(
            self.pid, self.address, self._pipe, -1 if self._lifeline is None else self._lifeline
        )

    @classmethod
    def resumed(cls, kept: KeptProcess, log: ReplicaLog) -> Process:
        """One that was started before `handover`."""
        lifeline = None if kept.lifeline < 0 else kept.lifeline
        return cls(kept.pid, kept.address, log, kept.pipe, lambda: reap(kept.pid), lifeline)

    @property
    def alive(self) -> bool:
        """Whether the process has not been reaped yet."""
        return not self._ended

    async def wait(self, now: Callable[[], float]) -> str:
        """Follows the output until the process is gone.

        Args:
            now: clock in Unix seconds, for the log.

        Returns:
            One line on how it ended, with its last line of output.
        """
        loop = asyncio.get_running_loop()
        transport, output = await loop.connect_read_pipe(
            lambda: _Output(self._log, now), os.fdopen(self._pipe, "rb", buffering=0)
        )
        try:
            await _ended(self.pid, lambda: self.signal_group(signal.SIGKILL))
        finally:
            self._reap()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(output.closed), OUTPUT_WAIT_S)
            transport.close()
            self._log.close(now())
        how = _how(self._code)
        return f"{how}: {self._log.last}" if self._log.last else how

    def _reap(self) -> None:
        self.signal_group(signal.SIGKILL)
        self._code = self._reap_it()
        self._ended = True
        if self._lifeline is not None:
            os.close(self._lifeline)

    def terminate(self) -> None:
        """Asks the process to finish (SIGTERM)."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def signal_group(self, number: signal.Signals) -> None:
        """Signals the process and everything it started."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)


async def _ended(pid: int, kill: Callable[[], None]) -> None:
    """Waits until a process is dead; kills it if the wait is cancelled."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return  # dead and reaped by another: nothing to wait for
    loop = asyncio.get_running_loop()
    gone = loop.create_future()

    def mark_gone() -> None:
        if not gone.done():
            gone.set_result(None)

    loop.add_reader(pidfd, mark_gone)
    try:
        await gone
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        if gone.cancelled():
            kill()


def _how(code: int | None) -> str:
    if code is None:
        return "ended, nobody knows how"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def spawn(
    program: Program, *, log: ReplicaLog, lifeline_fd: int, server: socket.socket | None = None
) -> Process:
    """Starts a program.

    Args:
        program: what to run.
        log: takes its output.
        lifeline_fd: read end of the lifeline.
        server: listening socket to hand over; without one a free port is chosen. For a program that
            takes sockets it is bound here, so nobody can take the port in between; a foreign program
            binds the chosen port itself and is started anew should it be taken meanwhile.

    Raises:
        OSError: the program cannot be executed.
    """
    # Opened anew, so that a child which makes its descriptor non-blocking does so for itself alone.
    own_lifeline = os.open(f"/proc/self/fd/{lifeline_fd}", os.O_RDONLY)
    env = dict(program.env)
    env[LIFELINE] = str(own_lifeline)
    argv = program.argv
    passed = [own_lifeline]
    own = server is None
    read_end, write_end = os.pipe()
    try:
        address = ""
        if program.serves_http:
            server = server or listening_socket()
            host, port = server.getsockname()[:2]
            address = f"{host}:{port}"
            if program.takes_socket:
                passed.append(server.fileno())
                env[program.socket_variable] = f"fd://{server.fileno()}"
            else:
                server.close()
                env |= {"KEYSTAGE_HTTP": address, "PORT": str(port)}
                at = str(private_mount.SECRETS)
                secrets = ("--secrets", program.secrets, at) if program.secrets else ()
                guard = (sys.executable, "-m", "keystage.local.lifeline", *secrets, "--")
                argv = (*guard, *with_port(argv, port))
        popen = subprocess.Popen(
            argv,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=write_end,
            stderr=write_end,
            pass_fds=passed,
            start_new_session=program.is_session,
            process_group=None if program.is_session else 0,
        )
    except OSError:
        os.close(read_end)
        raise
    finally:
        os.close(own_lifeline)
        os.close(write_end)
        if own and server is not None:
            server.close()
    return Process(popen.pid, address, log, read_end, popen.wait)
