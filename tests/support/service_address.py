"""One address in front of a server that moves: what a Service's cluster address is to its pods."""

from __future__ import annotations

import contextlib
import socket
import threading


class ServiceAddress:
    """Listens on `host:port` and carries bytes to and from wherever `backend` is just now.

    Args:
        host: address that clients are told.
        port: of it, and of every backend.

    Attributes:
        backend: host of the server; empty: connections are refused.
    """

    def __init__(self, host: str, port: int) -> None:
        self.backend = ""
        self._port = port
        self._listener = socket.create_server((host, port))
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._is_over = False
        self._is_lost = False
        self._thread = threading.Thread(target=self._accept, name="service", daemon=True)
        self._thread.start()

    def move(self, backend: str, *, loses: bool) -> None:
        """New connections go to another server.

        Args:
            backend: its host.
            loses: whether the old ones fall silent without an end, as when a node is lost; else they
                are left as they are: the old server's end ends them.
        """
        if loses:
            self._is_lost = True
            self._old, self._pairs = self._pairs, []
        self.backend = backend
        self._is_lost = False

    @property
    def lost(self) -> list[tuple[socket.socket, socket.socket]]:
        """Connections that fell silent."""
        return getattr(self, "_old", [])

    def close(self) -> None:
        """Ends everything."""
        self._is_over = True
        for sock in (self._listener, *(s for pair in [*self._pairs, *self.lost] for s in pair)):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        self._thread.join(5)

    def _accept(self) -> None:
        while not self._is_over:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(
                    (self.backend or "127.0.0.1", self._port if self.backend else 9), 2
                )
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            pair = (near, far)
            self._pairs.append(pair)
            for source, target in (pair, pair[::-1]):
                threading.Thread(target=self._carry, args=(pair, source, target), daemon=True).start()

    def _carry(
        self, pair: tuple[socket.socket, socket.socket], source: socket.socket, target: socket.socket
    ) -> None:
        with contextlib.suppress(OSError):
            while block := source.recv(65536):
                if pair in self.lost:
                    continue  # nothing arrives any more, and nobody is told
                target.sendall(block)
        if pair not in self.lost:
            for sock in pair:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
                sock.close()
