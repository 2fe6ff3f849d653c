"""Which of a mailbox's tcp connections broke after they had been made.

ZeroMQ makes a broken connection anew and goes on with what it has queued, but what lay in the system's
buffers is gone, and neither end is told: a wave that never comes back, tokens with a gap. Both processes may
be well, as when a network was cut for longer than ZeroMQ's own pings are waited for. So whoever sends asks
here which connections broke, and begins anew with that peer: what is void on both sides cannot be missed.

Before it: `mailbox` connects an outbox. After it: `Mailbox.broken`. A connection that never came about has
lost nothing: its messages are still queued.
"""

from __future__ import annotations

import zmq
from zmq.utils.monitor import recv_monitor_message

_MADE, _ENDED = int(zmq.Event.HANDSHAKE_SUCCEEDED), int(zmq.Event.DISCONNECTED)
_NOBLOCK = int(zmq.NOBLOCK)


class LinkWatch:
    """The outboxes over tcp, by peer. All methods belong to the mailbox's thread."""

    def __init__(self) -> None:
        self._monitors: dict[str, tuple[zmq.Socket[bytes], zmq.Socket[bytes]]] = {}
        self._made: set[str] = set()

    def add(self, peer: str, outbox: zmq.Socket[bytes]) -> None:
        """Watches an outbox that is not connected yet."""
        self.drop(peer)
        monitor = outbox.get_monitor_socket(_MADE | _ENDED)
        monitor.linger = 0
        self._monitors[peer] = outbox, monitor

    def drop(self, peer: str) -> None:
        """Looks away, before its owner closes the outbox; unknown peers are ignored."""
        self._made.discard(peer)
        outbox, monitor = self._monitors.pop(peer, (None, None))
        if outbox is not None and monitor is not None:
            outbox.disable_monitor()  # first: events that nobody can take would stop ZeroMQ's thread
            monitor.close(0)

    def broken(self) -> list[str]:
        """Peers whose connection broke since the last call, each once."""
        found = []
        for peer, (_, monitor) in self._monitors.items():
            is_broken = False
            while True:
                try:
                    event = recv_monitor_message(monitor, _NOBLOCK)["event"]
                except zmq.Again:
                    break
                is_broken |= event == _ENDED and peer in self._made
                if event == _MADE:
                    self._made.add(peer)
                elif event == _ENDED:
                    self._made.discard(peer)
            if is_broken:
                found.append(peer)
        return found

    def close(self) -> None:
        """Looks away from all."""
        for peer in list(self._monitors):
            self.drop(peer)
