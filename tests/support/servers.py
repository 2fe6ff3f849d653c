"""Real servers of other projects for tests: a test whose server is absent skips and says so.

With KEYSTAGE_REQUIRE_ALL=1 it fails instead. Servers run in the foreground, in a folder of the test.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

WAIT_S = 60.0
SOCKET_PATH_BYTES = 107


def need_program(name: str) -> str:
    """Path of a program; skips the test without it, or fails it under KEYSTAGE_REQUIRE_ALL=1."""
    found = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
    if found is not None:
        return found
    if os.environ.get("KEYSTAGE_REQUIRE_ALL") == "1":
        pytest.fail(f"{name} is not installed and KEYSTAGE_REQUIRE_ALL=1")
    pytest.skip(f"{name} is not installed")


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody uses at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class RedisServer:
    """A Redis that writes every command to disk before it answers (appendfsync always).

    It listens on a socket in its folder, which nobody else can take.

    Args:
        folder: for its files and its socket; they outlive `kill`.
        options: more command-line options.
        tcp: it listens on a free port of 127.0.0.1 instead, for a test in which the address is the point.

    Attributes:
        place: what of its address nobody but its operator is to be told: its port, or its socket's path.
        address: its address without database and password, as a log may show it.
        url: for clients.
    """

    def __init__(self, folder: Path, *options: str, tcp: bool = False) -> None:
        self._program = need_program("redis-server")
        self._folder = folder
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self._port = free_port() if tcp else 0
        self._socket = str(folder.resolve() / "s")
        assert tcp or len(os.fsencode(self._socket)) <= SOCKET_PATH_BYTES, (
            f"{self._socket}: a socket's path has at most {SOCKET_PATH_BYTES} bytes; set a shorter --basetemp"
        )
        self.place = str(self._port) if tcp else self._socket
        self.address = f"redis://127.0.0.1:{self._port}" if tcp else f"unix://{self._socket}"
        self.url = f"{self.address}/0" if tcp else self.address

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def start(self) -> None:
        """Starts it, with what it had before, and waits until it serves."""
        assert self._process is None, "it runs already"
        log = (self._folder / "redis.log").open("ab")
        command = [self._program, "--bind", "127.0.0.1", "--port", str(self._port)]
        command += [] if self._port else ["--unixsocket", self._socket]
        command += ["--dir", str(self._folder), "--appendonly", "yes", "--appendfsync", "always"]
        command += ["--save", "", *self._options]
        with log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        until_s = time.monotonic() + WAIT_S
        try:
            while not self._answers():
                assert self._process.poll() is None, (self._folder / "redis.log").read_text()[-2000:]
                assert time.monotonic() < until_s, f"redis-server did not serve within {WAIT_S} s"
                time.sleep(0.02)
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """Ends it at once (SIGKILL)."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(WAIT_S)
            self._process = None

    def signal(self, number: int) -> None:
        """Sends it a signal, if it runs."""
        if self._process is not None:
            self._process.send_signal(number)

    def _answers(self) -> bool:
        try:
            with socket.socket(socket.AF_INET if self._port else socket.AF_UNIX) as connection:
                connection.settimeout(1.0)
                connection.connect(("127.0.0.1", self._port) if self._port else self._socket)
                connection.sendall(b"PING\r\n")
                # With a password it answers so; while it reads its files, otherwise.
                return connection.recv(64).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False
