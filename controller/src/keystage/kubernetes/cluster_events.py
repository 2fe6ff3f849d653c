"""Events on functions, for people: `kubectl describe function` shows them.

Before it: `reconciler` and `resize` have something to tell. After it: core/v1 Events. The same words about
the same function are told once in a while. A lost event is no harm: it is logged as well. It must not be
needed by anything.
"""

from __future__ import annotations

import datetime as dt
import logging
import secrets
import threading
import time
from collections.abc import Mapping
from typing import Any

from keystage.kubernetes.api import API_VERSION, CONTROLLER_MANAGER, KIND
from keystage.kubernetes.client import EVENTS, Cluster
from keystage.kubernetes.errors import ClusterError

QUIET_S = 120.0
"""The same words again are not told within so long."""
MAX_TEXT = 1000
MAX_REMEMBERED = 4096

log = logging.getLogger(__name__)


class Events:
    """Writes events. Thread-safe.

    Args:
        cluster: the functions' namespace.
        identity: of this controller.
    """

    def __init__(self, cluster: Cluster, identity: str) -> None:
        self._cluster = cluster
        self._identity = identity
        self._told: dict[tuple[str, str, str], float] = {}
        self._lock = threading.Lock()

    def is_news(self, function: Mapping[str, Any], reason: str, text: str) -> bool:
        """Whether these words were not told lately; from now on they were."""
        key, now_s = (function["metadata"]["uid"], reason, text), time.monotonic()
        with self._lock:
            if now_s - self._told.get(key, -QUIET_S) < QUIET_S:
                return False
            if len(self._told) >= MAX_REMEMBERED:
                self._told = {k: s for k, s in self._told.items() if now_s - s < QUIET_S}
            self._told[key] = now_s
        return True

    def tell(self, function: Mapping[str, Any], reason: str, text: str, *, is_warning: bool) -> None:
        """Writes one event; does not raise.

        Args:
            function: the custom resource.
            reason: one word.
            text: one sentence.
            is_warning: else it is normal.
        """
        meta = function["metadata"]
        log.log(logging.WARNING if is_warning else logging.INFO, "%s: %s: %s", meta["name"], reason, text)
        at = dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{meta['name']}.{secrets.token_hex(6)}", "namespace": meta["namespace"]},
            "involvedObject": {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": meta["name"],
                "namespace": meta["namespace"],
                "uid": meta["uid"],
            },
            "reason": reason,
            "message": text[:MAX_TEXT],
            "type": "Warning" if is_warning else "Normal",
            "firstTimestamp": at,
            "lastTimestamp": at,
            "count": 1,
            "source": {"component": CONTROLLER_MANAGER},
            "reportingComponent": CONTROLLER_MANAGER,
            "reportingInstance": self._identity,
        }
        try:
            self._cluster.create(EVENTS, body, manager=CONTROLLER_MANAGER)
        except ClusterError as error:
            log.warning("event %s on %s was not written: %s", reason, meta["name"], error)
