"""A server that leaves without breaking a request: it stays for a while, and sends its clients away first.

Around uvicorn's server, under `gateway.app`. A client that keeps its connection may write its next request
just when the server closes it, and cannot know whether that was read. So after the signal requests are still
served, each answer says `Connection: close`, and only what has been silent since is closed. A second signal
ends the stay. It must not know what is served.
"""

from __future__ import annotations

import time
from types import FrameType

import uvicorn

from keystage.gateway.server import ClientProtocol


class LeavingServer(uvicorn.Server):
    """Uvicorn's, which stays `leave_s` seconds after it was told to stop.

    Args:
        config: uvicorn's.
        protocol: its HTTP protocol.
        leave_s: see above, 0: it stops at once.
        has_successor: another process takes connections of the same socket: this one takes no new ones from
            the signal on. Else whoever comes is served while it stays.

    Attributes:
        is_leaving: it was told to stop.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        protocol: type[ClientProtocol],
        leave_s: float,
        *,
        has_successor: bool = False,
    ) -> None:
        super().__init__(config)
        self._has_successor = has_successor
        self._protocol = protocol
        self._leave_s = leave_s
        self._leaves_at_s = 0.0
        self.is_leaving = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Takes a signal."""
        if self.is_leaving or not self._leave_s:
            self.is_leaving = True
            super().handle_exit(sig, frame)
            return
        self.is_leaving = True
        self._leaves_at_s = time.monotonic() + self._leave_s
        self._protocol.leaving = True
        for connection in self.server_state.connections:
            if isinstance(connection, ClientProtocol):
                connection.end_after_answer()

    async def on_tick(self, counter: int) -> bool:
        """Looks ten times a second whether it is time to stop."""
        if self.is_leaving and self._has_successor:
            for server in self.servers:
                server.close()
        if self._leaves_at_s and time.monotonic() >= self._leaves_at_s:
            self.should_exit = True
        return await super().on_tick(counter)
