"""A connection between nodes that breaks is told to whoever sent over it: what was on its way may be lost."""

from __future__ import annotations

import contextlib
import select
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import wait_for

from keystage.wire import api
from keystage.wire.link import Link
from keystage.wire.mailbox import Mailbox
from keystage.wire.secret import Secret

SECRET = Secret(b"a" * 32)


class Cable:
    """Carries bytes between a port of its own and another one until it is cut."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._ends: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Ends every connection; new ones are carried."""
        ends, self._ends = self._ends, []
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        self._thread.join(5)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
            except OSError:
                return
            self._ends += [near, far]
            threading.Thread(target=self._carry, args=(near, far), daemon=True).start()

    def _carry(self, near: socket.socket, far: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):
            while True:
                for source in select.select([near, far], [], [])[0]:
                    block = source.recv(65536)
                    if not block:
                        return
                    (far if source is near else near).sendall(block)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ks", dir="/tmp") as name:
        yield Path(name)


def arrived(mailbox: Mailbox) -> list[api.ToWorker]:
    mailbox.wait(0.05)
    return [api.decode_to_worker(body) for _, body, _ in mailbox.drain()]


def test_a_broken_connection_is_told_once_and_only_if_it_was_made(folder: Path) -> None:
    a = Mailbox(f"ipc://{folder}/a", link=Link("n", SECRET, "127.0.0.1"))
    b = Mailbox(f"ipc://{folder}/b", link=Link("m", SECRET, "127.0.0.1"))
    own = int(b.address.partition("tcp=")[2].partition("&")[0].rpartition(":")[2])
    cable = Cable(own)
    name = b.address.replace(f":{own}", f":{cable.port}")
    nobody = "tcp://127.0.0.1:9"
    try:
        a.send(name, api.Ack([1]))
        a.send(nobody, api.Ack([1]))
        wait_for(lambda: arrived(b) == [api.Ack([1])], "the first message")
        assert a.broken() == []
        cable.cut()
        wait_for(lambda: a.broken() == [name], "the break is told")
        # It is made anew by itself, and that it broke is told once.
        a.send(name, api.Ack([2]))
        wait_for(lambda: api.Ack([2]) in arrived(b), "a message over the new connection")
        assert a.broken() == []
        # Who was forgotten is not watched any longer.
        a.forget(name)
        cable.cut()
        assert a.broken() == []
        # An end of the process at the other side is a break, too.
        a.send(name, api.Ack([3]))
        wait_for(lambda: api.Ack([3]) in arrived(b), "a message after the peer was forgotten")
        b.close()
        cable.close()
        wait_for(lambda: a.broken() == [name], "the end is told")
    finally:
        cable.close()
        a.close()
