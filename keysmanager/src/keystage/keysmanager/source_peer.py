"""Parameters from another node's KeysManager: ranges over several connections.

The peer serves them from its memory or disk (`peer_server`). A peer that lacks them says 404 at the
first range and costs one round trip. Several peers are read from at once by `loader_lanes`.
"""

from __future__ import annotations

from keystage.keysmanager.api import Parameters, Source
from keystage.keysmanager.loader_http import PEER_LIMITS, HttpLimits, RangeReader
from keystage.keysmanager.loader_source import LANES


class PeerSource:
    """One peer that may have the file of one stage."""

    kind: Source = "peer"

    def __init__(
        self,
        url: str,
        token: str,
        parameters: Parameters,
        *,
        lanes: int = LANES,
        limits: HttpLimits = PEER_LIMITS,
    ) -> None:
        """Names the peer; nothing is opened.

        Args:
            url: `http://host:port`.
            token: bearer token of the nodes.
            parameters: what is wanted.
            lanes: connections.
            limits: how long it may take.
        """
        self._url = f"{url.rstrip('/')}/v1/parameters/{parameters.identity}"
        self._headers = {"Authorization": f"Bearer {token}", "Accept-Encoding": "identity"}
        self._nbytes = parameters.nbytes
        self._limits = limits
        self.name = f"peer {url}"
        self.lanes = lanes

    def open(self) -> RangeReader:
        """Connects."""
        return RangeReader(self._url, self._nbytes, self._headers, self._limits)

    def facts(self) -> str:
        """Number of connections."""
        return f"{self.lanes} connections"

    def damaged(self) -> None:
        """The peer's copy is the peer's to delete."""
