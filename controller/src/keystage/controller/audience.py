"""The port to whoever is told what the controller sees and decides: operators, through the gateway.

Before it: `telling` makes reports of the loop's ticks. After it: the supervisor's control socket
(`platforms.local_report`), or every gateway of a cluster (`kubernetes.gateway_reports`).
"""

from __future__ import annotations

from typing import Protocol


class Unheard(Exception):
    """A report did not arrive; the next one holds all that it held."""


class Audience(Protocol):
    """Takes reports."""

    def tell(self, report: bytes) -> None:
        """Delivers one report; may take a second, since nobody who steers waits for it.

        Args:
            report: JSON of an `observability.api.Report`.

        Raises:
            Unheard: it did not arrive; says why.
        """
        ...

    def close(self) -> None:
        """Ends; nothing is told afterwards."""
        ...
