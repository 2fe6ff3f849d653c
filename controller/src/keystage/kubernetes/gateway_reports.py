"""Tells every gateway what the controller sees and decides (`PUT /_/report`).

Before it: `controller.telling`, once a second at most. After it: gateways keep the newest report for
their operators. All are told in parallel, each with its own bound; one that still has the last one to
take is passed over, so that a gateway that hangs delays nobody. It must not read a report.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor

from keystage.kubernetes.api import HTTP_PORT, REPORT_PATH
from keystage.kubernetes.asking import Asking, NotAnswered
from keystage.kubernetes.view import address_of, is_ended
from keystage.kubernetes.world import World

TIMEOUT_S = 2.0
MAX_PARALLEL = 8
log = logging.getLogger(__name__)


class GatewayReports:
    """See `controller.audience.Audience`.

    Args:
        world: knows the gateways' pods.
        asking: the exchanges.
        port: of gateways.
    """

    def __init__(self, world: World, asking: Asking, *, port: int = HTTP_PORT) -> None:
        self._world = world
        self._asking = asking
        self._port = port
        self._pool = ThreadPoolExecutor(MAX_PARALLEL, thread_name_prefix="gateway-reports")
        self._pending: dict[str, Future[None]] = {}
        self._unheard: set[str] = set()

    def tell(self, report: bytes) -> None:
        """Begins to tell all that are there and free; waits for none."""
        targets = self._targets()
        self._pending = {name: done for name, done in self._pending.items() if not done.done()}
        self._unheard &= targets.keys()
        for name, address in targets.items():
            if name not in self._pending:
                self._pending[name] = self._pool.submit(self._one, name, address, report)

    def close(self) -> None:
        """Ends; what is on its way may still arrive."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _targets(self) -> dict[str, str]:
        return {
            name: address
            for name, pod in self._world.gateways().items()
            if not is_ended(pod) and (address := address_of(pod, self._port))
        }

    def _one(self, name: str, address: str, report: bytes) -> None:
        try:
            self._asking.ask("PUT", address, REPORT_PATH, body=report, timeout_s=TIMEOUT_S)
        except NotAnswered as error:
            if name not in self._unheard:  # said once for as long as it lasts
                self._unheard.add(name)
                log.warning("gateway %s does not take reports: %s", name, error)
        else:
            self._unheard.discard(name)
