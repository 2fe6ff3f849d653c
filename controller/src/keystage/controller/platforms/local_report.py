"""The local world's audience: the supervisor keeps the newest report, and gateways ask it there.

Before it: `controller.telling`. After it: `PUT /report` on the control socket.
"""

from __future__ import annotations

import http.client
from pathlib import Path

from keystage.controller.audience import Unheard
from keystage.controller.domain.platform import PlatformError
from keystage.controller.platforms.unix_http import UnixConnection, exchange

TIMEOUT_S = 2.0
"""Of one exchange. The supervisor answers within milliseconds; a machine short of CPU takes longer."""


class SupervisorAudience:
    """See `controller.audience.Audience`.

    Args:
        control: the supervisor's UNIX socket.
    """

    def __init__(self, control: Path) -> None:
        self._control = str(control)

    def tell(self, report: bytes) -> None:
        """Puts a report in place of the last one."""
        try:
            status, body = exchange(UnixConnection(self._control, TIMEOUT_S), "PUT", "/report", report)
        except PlatformError as error:
            raise Unheard(f"{error} on {self._control}") from error
        if status >= http.client.MULTIPLE_CHOICES:
            raise Unheard(f"PUT /report on {self._control} answered {status}: {body[:200]!r}")

    def close(self) -> None:
        """Nothing is kept open."""
